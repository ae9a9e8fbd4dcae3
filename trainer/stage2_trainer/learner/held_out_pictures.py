"""Pictures of held-out rollouts for TensorBoard: ground truth beside the answer, at each evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from stage2_api.runconfig import RunConfig
from stage2_trainer.data.drawing import Outline, draw_outlines, grid
from stage2_trainer.data.images import ImageError, load_image
from stage2_trainer.learner.matcher import Matched
from stage2_trainer.process.ranks import rank

FOLDER = Path("runs") / "held-out"
PICTURES = 8
TRUE, MATCHED, UNMATCHED = "#1a7f37", "#0969da", "#cf222e"


class HeldOutPictures:
    """A listener of evaluations that writes pictures of their first samples, each evaluation into a file of its own.

    Green: ground truth; blue: an object that found its own by matching; red: one that did not.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER

    def __call__(self, step: int, matched: Sequence[Matched]) -> None:
        """Write the pictures of an evaluation; a sample whose image cannot be read is left out."""
        from torch.utils.tensorboard import SummaryWriter  # only runs that report to it need it

        with SummaryWriter(str(self._folder)) as writer:
            for one in matched[:PICTURES]:
                try:
                    image = load_image(one.record.images[0])
                except ImageError:
                    continue
                sheet = np.asarray(_sheet(image, one))
                writer.add_image(f"held-out/{one.record.sample_id}", sheet, step, dataformats="HWC")


def held_out_pictures(config: RunConfig) -> list[HeldOutPictures]:
    """Return the listener of a run that reports to TensorBoard, in its first process; else none."""
    if "tensorboard" not in config.training.report_to or rank():
        return []
    return [HeldOutPictures(Path(config.training.output_dir))]


def _sheet(image: Image.Image, one: Matched) -> Image.Image:
    found = {pair.pred for pair in one.target.matching.pairs}
    truth = [Outline(true.kind, true.bins, true.desc, TRUE) for true in one.record.objects]
    said = [
        Outline(said.kind or "bbox", said.bins, said.desc, MATCHED if place in found else UNMATCHED)
        for place, said in enumerate(one.target.parsed.valid_objects)
    ]
    return grid([[draw_outlines(image, truth), draw_outlines(image, said)]], ("ground truth", "answer"))
