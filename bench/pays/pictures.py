"""The pictures of the comparison: digits of few kinds, so large that a model of toy size can learn to read them.

Train and held-out part share no scan and no photograph.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.pays.arms import Sizes

from stage2_trainer.prepare.annotations import Tally
from stage2_trainer.prepare.coco import read_coco
from stage2_trainer.prepare.record_writer import RecordChoice, write_records

EXAMPLES = Path(__file__).parents[2] / "examples"
KINDS = 4
SEED = 7


def write_pictures(folder: Path, sizes: Sizes) -> None:
    """Write `train.jsonl` and `val.jsonl` and the pictures that they name; the last of these files comes last."""
    sys.path.insert(0, str(EXAMPLES))
    from digits.coco import Part, write_part
    from digits.scene import Hand

    hand = Hand(KINDS, sizes.smallest, sizes.largest)
    scenes = folder / "scenes"
    look = SEED, sizes.side, sizes.most_objects, hand
    for part, name in ((Part("train", sizes.train, *look), "train"), (Part("test", sizes.held_out, *look), "val")):
        for _ in write_part(scenes, part):
            pass
        tally = Tally()
        images = read_coco(scenes / f"{part.name}.json", scenes / part.name, tally)
        write_records(images, folder / f"{name}.jsonl", RecordChoice(), tally)
