"""The pictures of the comparison: few, large digits of few kinds, so that a model of toy size can learn to read them.

Train and held-out part share no scan and no photograph.
"""

from __future__ import annotations

import sys
from pathlib import Path

from stage2_trainer.prepare.annotated_image import Tally
from stage2_trainer.prepare.coco import read_coco
from stage2_trainer.prepare.record_writer import RecordChoice, write_records

EXAMPLES = Path(__file__).parents[2] / "examples"
SIDE, MOST_DIGITS, KINDS = 64, 2, 4
SMALLEST, LARGEST = 0.4, 0.6  # heights of digits, as shares of an image's shorter side
SEED = 7


def write_pictures(folder: Path, train: int, held_out: int) -> None:
    """Write `train.jsonl` and `val.jsonl` and the pictures that they name; the last of these files comes last."""
    sys.path.insert(0, str(EXAMPLES))
    from digits.coco import Part, write_part
    from digits.scene import Hand

    hand = Hand(KINDS, SMALLEST, LARGEST)
    scenes = folder / "scenes"
    for part, name in ((Part("train", train, SEED, SIDE, MOST_DIGITS, hand), "train"), (
        Part("test", held_out, SEED, SIDE, MOST_DIGITS, hand), "val",
    )):  # fmt: skip
        for _ in write_part(scenes, part):
            pass
        tally = Tally()
        images = read_coco(scenes / f"{part.name}.json", scenes / part.name, tally)
        write_records(images, folder / f"{name}.jsonl", RecordChoice(), tally)
