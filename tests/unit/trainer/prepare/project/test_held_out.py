"""The images that are held out are a stated share, the same in whatever order images come."""

from pathlib import Path

import pytest

from stage2_trainer.prepare.annotations import AnnotatedImage
from stage2_trainer.prepare.project_folder import MOST_HELD_OUT, choose_held_out


def images(count):
    return [AnnotatedImage(str(number), Path("a.jpg"), None, ()) for number in range(count)]


@pytest.mark.parametrize(("count", "expected"), [(2, 1), (20, 1), (200, 10), (100_000, MOST_HELD_OUT)])
def test_their_number_follows_that_of_all(count, expected):
    assert len(choose_held_out(images(count))) == expected


def test_they_do_not_depend_on_the_order():
    assert choose_held_out(images(100)) == choose_held_out(images(100)[::-1])


def test_they_are_spread_over_the_file():
    numbers = sorted(int(one) for one in choose_held_out(images(1000)))
    assert numbers[0] < 200
    assert numbers[-1] > 800


def test_most_of_them_stay_when_images_are_added():
    before, after = choose_held_out(images(1000)), choose_held_out(images(1100))
    assert len(before & after) > 0.8 * len(before)
