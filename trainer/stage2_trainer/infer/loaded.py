"""Answers of a model in this process, which transformers and PEFT load."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from stage2_api.errors import refused
from stage2_trainer.data.encode import Encoder, PromptCache
from stage2_trainer.data.model_files import INTACT, fetched_model, flaw_of_model, require_plain
from stage2_trainer.data.question import Question
from stage2_trainer.export.checkpoint_folder import ADAPTER_CONFIG, BASE_NAME, open_checkpoint
from stage2_trainer.matching.closing import closing_bias, take_bias
from stage2_trainer.model.checkpoints import STATE, best_whole
from stage2_trainer.model.policy import load_model, load_processor
from stage2_trainer.process.activity import ACTIVITY
from stage2_trainer.rollouts.hf import Decoding, HfBackend
from stage2_trainer.wire.requests import RolloutRequest, SeedPlan


@dataclass(frozen=True)
class Weights:
    """The folders of a model. adapter: its adapter, if any. described_by: it may have the record of the model's run."""

    model: Path
    adapter: Path | None
    processor: Path
    described_by: Path


def find_weights(source: str, base: str | None) -> Weights:
    """Return the folders of a checkpoint, a model or an adapter. base: of an adapter, if it has moved.

    Raises ConfigError if there is none, or its files must not be loaded.
    """
    folder = Path(source)
    if (folder / STATE).is_file() or (folder.is_dir() and best_whole(folder)):
        found = open_checkpoint(folder, model=base)
        if found.adapter is None:
            return Weights(found.folder, None, found.processor, found.folder)
        return Weights(found.base, found.folder, found.base, found.folder)
    adapter = folder if (folder / ADAPTER_CONFIG).is_file() else None
    if adapter:
        require_plain(adapter, path="MODEL", value=source)
    elif base:
        rule = "is no adapter, so it has no base model"
        raise refused("--base", base, rule, "leave out --base")
    model = _model_folder(_base_of(adapter, base) if adapter else source, path="--base" if adapter else "MODEL")
    return Weights(model, adapter, model, adapter or model)


def _base_of(adapter: Path, base: str | None) -> str:
    name = base or json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8")).get(BASE_NAME)
    if not name:
        rule = f"{ADAPTER_CONFIG} names no base model"
        raise refused("MODEL", str(adapter), rule, "name it: --base DIR")
    return str(name)


def _model_folder(name: str, *, path: str) -> Path:
    way_out = "name a checkpoint, a run's folder, a folder of `stage2 export`, a model's name on a hub, or a URL"
    folder = fetched_model(name, path=path, origin=way_out)
    if not (folder / "config.json").is_file():
        rule = "holds no model: there is no config.json" if folder.is_dir() else "there is no such folder"
        raise refused(path, name, rule, way_out)
    require_plain(folder, path=path, value=name)
    if flaw := flaw_of_model(folder):
        raise refused(path, name, flaw, INTACT)
    return folder


class Loaded:
    """A model in this process. pixel_limits: of an image, as image processors take them. device: as PyTorch names it.

    longer: the bias against closing the list, in nats; None = that of the model's generation configuration, if any.

    Raises ConfigError if it is no Qwen3-VL, or there is no such device.
    """

    def __init__(
        self, weights: Weights, pixel_limits: dict[str, int], device: str | None, *, longer: float | None = None
    ) -> None:
        target = _device(device)
        with ACTIVITY.doing(f"loading {weights.described_by}"):
            model: Any = load_model(weights.model, dtype=None, attn_implementation=None)
            own = take_bias(model.generation_config)  # of the base model, if there is an adapter
            if weights.adapter:
                model = PeftModel.from_pretrained(model, str(weights.adapter))
        self._model = model.to(target).eval()
        self._encoder = Encoder(load_processor(weights.processor, **pixel_limits))
        self._bias = {} if weights.adapter else own
        if longer is not None:
            self._bias = closing_bias(self._encoder.encode, longer)

    def answer(self, question: Question, image: str) -> tuple[str, str]:
        """Return the text of an answer, and why it ended."""
        (answer,) = self._generate(question, image, Decoding(max_new_tokens=question.max_new_tokens), 1)
        return answer

    def samples(self, question: Question, image: str, count: int) -> list[tuple[str, str]]:
        """Return as many answers, sampled at temperature 1; the same ones each time."""
        decoding = Decoding(max_new_tokens=question.max_new_tokens, temperature=1.0, batch_size=count)
        return self._generate(question, image, decoding, count)

    def _generate(self, question: Question, image: str, decoding: Decoding, count: int) -> list[tuple[str, str]]:
        backend = HfBackend(self._model, self._encoder, decoding, cache=PromptCache(self._encoder, 0))
        request = RolloutRequest(question.messages(image), bias=self._bias)
        answers = backend.generate([request] * count, seed_plan=SeedPlan(0, 0, 0))
        return [(one.text, one.finish_reason) for one in answers]


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        rule = f"must be a device that PyTorch finds here ({str(error).splitlines()[0]})"
        raise refused("--device", name, rule, "leave it out, or write cpu, cuda or cuda:1") from error
    return device
