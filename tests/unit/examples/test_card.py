"""The card and the figures that lie next to the checkpoint."""

import json
from dataclasses import replace

from PIL import Image

from tiny_model.answers import Answer, truth, write
from tiny_model.card import HeldOut, Making, write_card
from tiny_model.evaluate import measure
from tiny_model.scenes import make_scene
from tiny_model.warm_up import Recipe

SCENES = [make_scene(7, "held-out", index) for index in range(10)]
ANSWERS = [Answer(write(scene), tuple(truth(scene)), True) for scene in SCENES]
QUALITY = replace(measure(ANSWERS, [truth(scene) for scene in SCENES]), recall_at_50=0.457)
MAKING = Making("python make it", seed=7, minutes=7.5, parameters=1_631_616, vocabulary=1355, recipe=Recipe())


def test_the_card_tells_how_good_the_model_is_and_how_it_was_made(tmp_path):
    write_card(tmp_path, MAKING, HeldOut(SCENES, {"float32": QUALITY}, ANSWERS))
    text = (tmp_path / "README.md").read_text()
    assert "| recall at IoU 0.5 | 0.46 |" in text
    assert "python make it" in text
    assert f"- steps: {MAKING.recipe.steps}" in text
    assert write(SCENES[0]) in text
    assert json.loads((tmp_path / "metrics.json").read_text())["held_out"]["float32"]["recall_at_50"] == 0.457


def test_the_picture_is_small(tmp_path):
    write_card(tmp_path, MAKING, HeldOut(SCENES, {"float32": QUALITY}, ANSWERS))
    picture = tmp_path / "held-out.png"
    assert picture.stat().st_size < 150_000
    with Image.open(picture) as image:
        assert image.width < 1100
