"""A scene of three shapes, answers to it, and the tiny model's tokenizer, for the tests of `stage2 inspect`."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image

from stage2_cli.inspect_sample import Spelling, read_spelling
from stage2_trainer.matching import GroundTruth, GTObject, MatchedTarget, MatchOptions, build_target, serialize_objects

TINY_MODEL = Path(__file__).parents[3] / "examples" / "tiny-qwen3-vl"

RED = GTObject("red box", "bbox", (100, 100, 400, 400))
BLUE = GTObject("blue triangle", "poly", (500, 500, 900, 500, 700, 900))
GREEN = GTObject("green ellipse", "bbox", (50, 600, 250, 800))
SCENE = (RED, BLUE, GREEN)

NEAR_RED = GTObject("red box", "bbox", (110, 100, 410, 390))
NEAR_BLUE = GTObject("blue triangle", "poly", (500, 510, 900, 500, 690, 880))
NOWHERE = GTObject("grey box", "bbox", (600, 10, 700, 90))

COMPLETE = serialize_objects([NEAR_RED, NEAR_BLUE])
# A box of three coordinates, then an object that breaks off.
TRUNCATED = (
    serialize_objects([NEAR_RED, NOWHERE])[:-1]
    + ', "object_3": {"desc": "odd box", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>"]}'
    + ', "object_4": {"desc": "gre'
)
GARBAGE = "There are three shapes."
ANSWERS = {"complete": COMPLETE, "truncated": TRUNCATED, "garbage": GARBAGE, "empty": ""}


@cache
def tiny_spelling() -> Spelling:
    return read_spelling(TINY_MODEL, option="--tokenizer")


def target_of(answer: str, **options: Any) -> MatchedTarget:
    vocab = tiny_spelling().vocab
    return build_target(vocab.encode(answer), GroundTruth(SCENE), vocab, MatchOptions(**options))


def write_records(folder: Path, *, image: bool = False) -> Path:
    """Two records, the scene second; its image is only there when it is asked for."""
    if image:
        Image.new("RGB", (96, 96), "#dddddd").save(folder / "scene.png")
    empty = {"images": ["scene.png"], "width": 96, "height": 96, "objects": []}
    full = {**empty, "objects": [_item(one) for one in SCENE]}
    path = folder / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, (empty, full))) + "\n", encoding="utf-8")
    return path


def _item(one: GTObject) -> dict[str, object]:
    tokens = [f"<|coord_{k}|>" for k in one.bins]
    return {"desc": one.desc, "poly" if one.kind == "poly" else "bbox_2d": tokens}
