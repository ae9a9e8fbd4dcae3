"""Names of data and of answers are drawn whatever they hold: a picture must not end a run."""

import pytest
from PIL import Image

from stage2_trainer.data.drawing import Outline, captioned_page, draw_outlines

NAMES = ["two\nlines", "\x1b[31mred", "\ud800", "猫" * 5000, "", "\0"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_is_drawn_on_one_line(name):
    drawn = draw_outlines(Image.new("RGB", (64, 48)), [Outline("bbox", (0, 0, 500, 500), name, "#cf222e")])
    assert drawn.size == (288, 216)
    assert captioned_page([(drawn, f"{name} (1 objects)")], columns=4, width=288).width == 300


def test_a_name_with_a_line_break_differs_from_one_without():
    pictures = [
        draw_outlines(Image.new("RGB", (64, 48)), [Outline("bbox", (0, 500, 500, 900), name, "#cf222e")])
        for name in ("a b", "a\nb")
    ]
    assert pictures[0].tobytes() != pictures[1].tobytes()
