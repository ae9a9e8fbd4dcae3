"""Names of data and of answers are drawn whatever they hold: a picture must not end a run."""

import numpy as np
import pytest
from PIL import Image

from stage2_cli.data import COLORS
from stage2_trainer.data.drawing import Outline, captioned_page, draw_outlines, grid

pytestmark = pytest.mark.in_turns(3, apart=True)
NAMES = ["two\nlines", "\x1b[31mred", "\ud800", "猫" * 5000, "", "\0"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_object_name_is_drawn_on_one_line(name):
    drawn = draw_outlines(Image.new("RGB", (64, 48)), [Outline("bbox", (0, 0, 500, 500), name, "#cf222e")])
    assert drawn.size == (288, 216)
    assert captioned_page([(drawn, f"{name} (1 objects)")], columns=4, width=288).width == 300


def test_object_name_with_line_break_is_drawn_differently_from_space():
    pictures = [
        draw_outlines(Image.new("RGB", (64, 48)), [Outline("bbox", (0, 500, 500, 900), name, "#cf222e")])
        for name in ("a b", "a\nb")
    ]
    assert pictures[0].tobytes() != pictures[1].tobytes()


SCRIPTS = {"Latin": "tasse à café", "Greek": "κούπα", "Cyrillic": "чашка", "CJK": "猫と茶碗", "none": "\U0001f9ff"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_object_names_in_any_script_are_drawn_distinguishably(script):
    """Two names of equal length would look alike if their letters were empty frames."""
    name = SCRIPTS[script]
    one, other = (
        draw_outlines(Image.new("RGB", (64, 48)), [Outline("bbox", (0, 500, 500, 900), text, "#cf222e")])
        for text in (name, name[::-1] if len(name) > 1 else chr(ord(name) + 1))
    )
    assert one.tobytes() != other.tobytes()


def luminance(colour):
    linear = np.asarray(colour) / 255
    linear = np.where(linear <= 0.04045, linear / 12.92, ((linear + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


BACKGROUNDS = [*COLORS, "white", "black", "grey", "#ffff00", "#ff0000"]


@pytest.mark.parametrize("kind", ["bbox", "poly"])
@pytest.mark.parametrize("background", BACKGROUNDS)
@pytest.mark.parametrize("colour", COLORS)
def test_outline_has_sufficient_contrast_on_any_background(colour, background, kind):
    """By WCAG's contrast, 3 to 1, on each of its four sides, inside of the picture and at its edge."""
    image = Image.new("RGB", (100, 100), background)
    plain = luminance(image.getpixel((0, 0)))
    for x1, y1, x2, y2 in ((200, 200, 800, 800), (0, 0, 999, 999), (500, 500, 530, 530)):
        bins = (x1, y1, x2, y2) if kind == "bbox" else (x1, y1, x2, y1, x2, y2, x1, y2)
        drawn = luminance(np.asarray(draw_outlines(image, [Outline(kind, bins, "", colour)], width=300)))
        contrast = (np.maximum(drawn, plain) + 0.05) / (np.minimum(drawn, plain) + 0.05)
        left, top, right, bottom = (round(number * 0.3) for number in (x1, y1, x2, y2))
        middle_x, middle_y = (left + right) // 2, (top + bottom) // 2
        sides = (
            contrast[middle_y, max(0, left - 3) : left + 4],
            contrast[middle_y, right - 4 : right + 4],
            contrast[max(0, top - 3) : top + 4, middle_x],
            contrast[bottom - 4 : bottom + 4, middle_x],
        )
        assert min(side.max() for side in sides) >= 3


def test_grid_accepts_images_of_different_aspect_ratios():
    shapes = [(40, 30), (30, 40), (10, 4000), (4000, 10)]
    rows = [[draw_outlines(Image.new("RGB", shape, "red"), [])] * 2 for shape in shapes]
    assert [row[0].size for row in rows] == [(288, 216), (288, 384), (288, 576), (288, 13)]
    table = grid(rows, ("left", "right"))
    tops = [24, 24 + 222, 24 + 222 + 390, 24 + 222 + 390 + 582]
    assert [table.getpixel((6, top)) for top in tops] == [(255, 0, 0)] * 4
    assert table.height == tops[-1] + 13 + 12
