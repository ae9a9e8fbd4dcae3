"""Pictures of answers beside ground truth: a run's first and last held-out rollouts, and one inspected sample."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from stage2_api.errors import refused
from stage2_report.held_out import EvaluatedStep, read_evaluations
from stage2_report.run_history import EvaluatedRun
from stage2_report.sample_cards import recorded_image
from stage2_trainer.data.drawing import Outline, draw_bar, draw_lines, draw_outlines, grid
from stage2_trainer.data.images import ImageError, load_image
from stage2_trainer.data.records import Record as DataRecord
from stage2_trainer.matching import MatchedTarget
from stage2_trainer.scores.answer_picture import COLORS, TRUE, answered_outlines, true_outlines
from stage2_trainer.scores.image_counts import rank_of, sample_f1, verdicts
from stage2_trainer.scores.scored_image import ScoredImage

_MAX_ROWS = 6
_INSPECTED_WIDTH = 480  # pixels of each of the two images
_MISSED, _MATCHED, _FOLLOWING, _UNMATCHED = "#bc4c00", "#0969da", "#8250df", "#cf222e"


def write_held_out(runs: Sequence[EvaluatedRun], path: Path, *, images: Path | None) -> None:
    """Draw held-out answers of one or two runs into one PNG.

    The columns are the truth, the first and the last evaluation of the first run, and the last one of the second. A bar
    above each is the share of the true objects of all images that are found with the right name; its label says how
    many are found at all, too. The rows are images evenly spaced between the last column's largest gain over the one
    before and its largest loss. images: the folder in which images are found by name. Raises ConfigError where a run
    has no held-out answers.
    """
    columns = _columns(runs, path)
    common = [name for name in columns[0][1].images if all(name in one.images for _, one in columns)]
    if not common:
        rule = "needs evaluations of the same held-out records"
        raise refused("--picture", str(path), rule, "draw each run alone")
    chosen = _spread(sorted(common, key=lambda name: -_gain(name, columns)))
    bars = [_bar([one.images[name] for name in common]) for _, one in columns]
    first = "largest gain" if len(columns) > 1 else "best"
    legend = draw_lines(
        [(f"{len(chosen)} of {len(common)} images, the {first} first", "black"),
         ("right", COLORS["right"]), ("another name", COLORS["misnamed"]),
         ("wrong place", COLORS["wrong"]), ("repeated", COLORS["duplicate"])])  # fmt: skip
    try:
        rows = [[legend, *bars], *(_row(name, columns, images) for name in chosen)]
    except ImageError as error:
        raise refused("--images", str(images), str(error), "name the folder of the held-out images") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    grid(rows, ["ground truth", *(title for title, _ in columns)]).save(path)


def _columns(runs: Sequence[EvaluatedRun], path: Path) -> list[tuple[str, EvaluatedStep]]:
    columns: list[tuple[str, EvaluatedStep]] = []
    for run in runs:
        ends = run.steps[-1:] if columns else (*run.steps[:1], *run.steps[-1:])
        evaluations = read_evaluations(run.log, ends)
        if not evaluations:
            way_out = (
                "set custom.val_jsonl and training.eval_strategy, then run again; the page (--html) has the reward"
                " curves of a GRPO run"
            )
            raise refused("--picture", str(path), "needs held-out rollouts in the log", way_out)
        mark = f"{run.name}, " if len(runs) > 1 else ""
        columns += [(f"{mark if step else ''}step {step}", one) for step, one in evaluations.items()]
    return columns


def _gain(name: str, columns: Sequence[tuple[str, EvaluatedStep]]) -> float:
    """Return how much better the last column's answer is than the one before; its F1, if there is no other."""
    scores = [rank_of(sample_f1(one.images[name])) for _, one in columns]
    return scores[-1] - scores[-2] if len(scores) > 1 else scores[0]


def _spread(names: Sequence[str]) -> list[str]:
    """Return at most as many names as there are rows, evenly spaced from the first to the last."""
    rows = min(_MAX_ROWS, len(names))
    return [names[round(row * (len(names) - 1) / max(rows - 1, 1))] for row in range(rows)]


def _bar(images: Sequence[ScoredImage]) -> Image.Image:
    answered = [verdict for image in images for verdict in verdicts(image).answered]
    right, misnamed = answered.count("right"), answered.count("misnamed")
    truth = sum(int((~image.crowds).sum()) for image in images)
    share, found = (right / truth, (right + misnamed) / truth) if truth else (0.0, 0.0)
    text = f"{truth} objects: {found:.0%} found, {share:.0%} named" if truth else "there are no true objects"
    return draw_bar(share, text, COLORS["right"])


def _row(name: str, columns: Sequence[tuple[str, EvaluatedStep]], images: Path | None) -> list[Image.Image]:
    record = columns[0][1].rollouts[name].record
    if record.images:
        image = recorded_image(record.images[0], images)
    else:  # the data file holds the image itself, which the log leaves out
        image = Image.new("RGB", (record.width, record.height), "white")
    outlines = [true_outlines(record.objects), *(answered_outlines(one.images[name]) for _, one in columns)]
    return [draw_outlines(image, one) for one in outlines]


def write_picture(record: DataRecord, target: MatchedTarget, path: Path, *, answered: bool) -> None:
    """Draw the record's first image twice into a PNG: with the ground truth on the left, with the answer on the right.

    Ground truth is green where it was found and orange where it was missed; the answer's valid objects are blue where
    they matched, violet where they follow a true one, and red elsewhere. Not answered, as in stage 1: the ground truth
    alone, in green. Raises ConfigError where the file cannot be written, ImageError where the image cannot be read.
    """
    missed = set(target.false_negatives) if answered else set()
    colors = dict.fromkeys((pair.pred for pair in target.matching.following), _FOLLOWING)
    colors |= dict.fromkeys((pair.pred for pair in target.matching.pairs), _MATCHED)
    truth = [
        Outline(one.kind, one.bins, f"{i} {one.desc}", _MISSED if i in missed else TRUE)
        for i, one in enumerate(target.ground_truth.objects)
    ]
    answer = [
        Outline(one.kind, one.bins, f"{one.key} {one.desc}", colors.get(i, _UNMATCHED))
        for i, one in enumerate(target.parsed.valid_objects)
        if one.kind
    ]
    image = load_image(record.images[0])
    columns = {"ground truth": truth, **({"answer": answer} if answered else {})}
    pictures = [draw_outlines(image, outlines, width=_INSPECTED_WIDTH) for outlines in columns.values()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        grid([pictures], list(columns)).save(path, format="PNG")
    except OSError as error:
        rule = f"must be a file that can be written ({error.strerror})"
        raise refused("--picture", str(path), rule, "correct the path") from error
