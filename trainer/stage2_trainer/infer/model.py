"""A model that lists the objects of images: a checkpoint, an exported or stock model on this machine, or a server.

It asks as the run asked that trained it: a checkpoint and an export have the prompt, the limits of an image's pixels
and the length of an answer in `stage2_course.json`. Answers are greedy.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Protocol

from stage2_api.errors import refused
from stage2_trainer.data.images import load_image
from stage2_trainer.data.question import Question
from stage2_trainer.infer.answered_image import AnsweredImage, Box
from stage2_trainer.infer.served import Server
from stage2_trainer.model.checkpoints import COURSE
from stage2_trainer.process.activity import ACTIVITY, LIBRARIES
from stage2_trainer.wire.credentials import is_tls


class Answers(Protocol):
    """Where answers come from."""

    def answer(self, question: Question, image: str) -> tuple[str, str]:
        """Return the text of an answer, and why it ended: `stop`, `length` or `repetition`."""
        ...

    def samples(self, question: Question, image: str, count: int) -> list[tuple[str, str]]:
        """Return as many answers, sampled at temperature 1; the same ones each time."""
        ...


class Model:
    """A model that lists the objects of images.

    source: a checkpoint's folder, or a run's (its best one); the folder of a model or an adapter, as `stage2 export`
    writes them; a stock model's name on a hub; or the URL of a server with OpenAI's API, such as `vllm serve` starts.
    base: folder or name of the model that an adapter belongs to, if it has moved. device: as PyTorch names it; by
    default the first GPU, else the CPU. longer: makes the model list more objects, by a bias in nats against closing
    the list; by default the one that `stage2 export --longer` wrote, if any. options: fields of
    `Question` that replace those of the model's run.

    Raises ConfigError if the model is not there, or cannot be loaded safely.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        base: str | None = None,
        device: str | None = None,
        longer: float | None = None,
        **options: Any,
    ) -> None:
        self._answers: Answers
        if is_tls(str(source)) or str(source).startswith("http://"):
            self.question = Question.of_course({}, **options)
            self._answers = Server(str(source), os.environ, longer=longer)
            return
        with ACTIVITY.doing(LIBRARIES):
            from stage2_trainer.infer.loaded import Loaded, find_weights

        weights = find_weights(str(source), base)
        self.question = Question.of_course(read_course(weights.described_by), **options)
        self._answers = Loaded(weights, self.question.pixel_limits(), device, longer=longer)

    def boxes(self, image: str | Path) -> list[Box]:
        """Return the objects of an image, in the order of the answer. Raises ImageError if it cannot be read."""
        return list(self.answer(image).boxes)

    def answer(self, image: str | Path) -> AnsweredImage:
        """Return the objects of an image with the whole answer. Raises ImageError if the image cannot be read."""
        size = load_image(str(image)).size
        text, finish_reason = self._answers.answer(self.question, str(image))
        return AnsweredImage.from_text(str(image), size, text, finish_reason)

    def samples(self, image: str | Path, count: int) -> list[AnsweredImage]:
        """Return as many answers, sampled at temperature 1. Raises ImageError if the image cannot be read."""
        size = load_image(str(image)).size
        found = self._answers.samples(self.question, str(image), count)
        return [AnsweredImage.from_text(str(image), size, *one) for one in found]


def read_course(folder: Path) -> dict[str, Any]:
    """Return the recorded keys of the run that trained a model; none if it has no record of one."""
    file = folder / COURSE
    if not file.is_file():
        return {}
    try:
        course = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        way_out = "copy the file from the checkpoint again"
        raise refused("MODEL", str(file), f"must be JSON ({error})", way_out) from error
    return course if isinstance(course, dict) else {}
