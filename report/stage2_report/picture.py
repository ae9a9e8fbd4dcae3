"""Pictures of answers beside ground truth: a run's first and last held-out rollouts, and one inspected sample."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from stage2_api.errors import ConfigError, Problem
from stage2_report.held_out import EvaluatedStep, HeldOutRollout
from stage2_report.run_history import Record
from stage2_trainer.data.drawing import Outline, draw_outlines, grid
from stage2_trainer.data.images import ImageError, load_image
from stage2_trainer.data.records import Record as DataRecord
from stage2_trainer.matching import MatchedTarget
from stage2_trainer.scores.image_counts import Verdict, verdicts
from stage2_trainer.scores.scored_image import ScoredImage

_MAX_ROWS = 6
_INSPECTED_WIDTH = 480  # pixels of each of the two images
_TRUTH, _MISSED, _MATCHED, _UNMATCHED = "#1a7f37", "#bc4c00", "#0969da", "#cf222e"
_COLORS: dict[Verdict, str] = {
    "right": "#1a7f37", "misnamed": "#bc4c00", "duplicate": "#8250df", "wrong": "#cf222e", "unjudged": "#57606a",
}  # fmt: skip


class EndSamples:
    """The samples of a run's first and last evaluation, by step and name; all others are dropped."""

    def __init__(self) -> None:
        self.evaluations: dict[int, dict[str, Record]] = {}

    def add(self, sample: Record) -> None:
        """Add an `evaluation_sample` record."""
        step = sample["step"]
        self.evaluations.setdefault(step, {})[sample["sample_id"]] = sample  # of a repeated evaluation, the last
        ends = (min(self.evaluations), max(self.evaluations))
        self.evaluations = {one: samples for one, samples in self.evaluations.items() if one in ends}


def write_samples(runs: Sequence[tuple[str, EndSamples]], path: Path, *, images: Path | None) -> None:
    """Draw the evaluations of one or two runs into one PNG.

    Objects are judged as `stage2 evaluate` judges them: green where place and name are right, orange where the name is
    wrong, red where nothing is. One run has its first and its last evaluation; of a second one, which is named, the
    last one follows. images: the folder in which images are found by name. Raises ConfigError where a log holds no
    samples.
    """
    columns: list[tuple[str, dict[str, Record]]] = []
    for name, samples in runs:
        found = samples.evaluations
        if not found:
            way_out = (
                "set custom.val_jsonl and training.eval_strategy, then run again; the page (--html) has the reward"
                " curves of a GRPO run"
            )
            raise ConfigError([Problem("--picture", str(path), "needs held-out rollouts in the log", way_out)])
        steps = (min(found), max(found)) if not columns else (max(found),)
        mark = f"{name}, " if len(runs) > 1 else ""
        columns += [(f"{mark if step else ''}step {step}", found[step]) for step in steps]
    names = [name for name in columns[0][1] if all(name in samples for _, samples in columns)]
    if not names:
        rule = "needs evaluations of the same held-out records"
        raise ConfigError([Problem("--picture", str(path), rule, "draw each run alone")])
    try:
        rows = [_row([samples[name] for _, samples in columns], images) for name in names[:_MAX_ROWS]]
    except ImageError as error:
        way_out = "name the folder of the held-out images"
        raise ConfigError([Problem("--images", str(images), str(error), way_out)]) from error
    titles = ("ground truth", *(title for title, _ in columns[:-1]), f"{columns[-1][0]} (orange: another name)")
    path.parent.mkdir(parents=True, exist_ok=True)
    grid(rows, titles).save(path)


def _row(samples: Sequence[Record], images: Path | None) -> list[Image.Image]:
    path = Path(samples[0]["image"])
    judged = EvaluatedStep(0, {str(i): HeldOutRollout.from_line(one, i) for i, one in enumerate(samples)})
    image = load_image(str(images / path.name if images is not None else path))
    truth = [Outline(one.kind, one.bins, one.desc, _TRUTH) for one in judged.rollouts["0"].record.objects]
    return [draw_outlines(image, truth), *(draw_outlines(image, _answered(one)) for one in judged.images.values())]


def _answered(image: ScoredImage) -> list[Outline]:
    objects = zip(image.answer.objects, verdicts(image).answered, strict=True)
    return [Outline(one.kind, one.bins, one.desc, _COLORS[verdict]) for one, verdict in objects]


def write_picture(record: DataRecord, target: MatchedTarget, path: Path) -> None:
    """Draw the record's first image twice into a PNG: with the ground truth on the left, with the answer on the right.

    Ground truth is green where it was found and orange where it was missed; the answer's valid objects are blue where
    they matched and red where they did not. Raises ConfigError where the file cannot be written, ImageError where the
    image cannot be read.
    """
    missed = set(target.false_negatives)
    matched = {pair.pred for pair in target.matching.pairs}
    truth = [
        Outline(one.kind, one.bins, f"{i} {one.desc}", _MISSED if i in missed else _TRUTH)
        for i, one in enumerate(target.ground_truth.objects)
    ]
    answer = [
        Outline(one.kind, one.bins, f"{one.key} {one.desc}", _MATCHED if i in matched else _UNMATCHED)
        for i, one in enumerate(target.parsed.valid_objects)
        if one.kind
    ]
    image = load_image(record.images[0])
    pictures = [draw_outlines(image, outlines, width=_INSPECTED_WIDTH) for outlines in (truth, answer)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        grid([pictures], ("ground truth", "answer")).save(path, format="PNG")
    except OSError as error:
        rule = f"must be a file that can be written ({error.strerror})"
        raise ConfigError([Problem("--picture", str(path), rule, "correct the path")]) from error
