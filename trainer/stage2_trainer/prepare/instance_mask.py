"""Images whose pixels are numbers of objects, as VOC's SegmentationObject has them: an outline for each object."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.ndimage import find_objects

from stage2_trainer.data.files import open_regular
from stage2_trainer.data.images import opened
from stage2_trainer.prepare.annotated_image import Outlines
from stage2_trainer.prepare.outline import of_mask

BORDER = 255  # of objects, and what nobody could tell: no object's
NUMBERED = frozenset({"P", "L"})  # of a palette or of grey: a byte a pixel, which is the number


def outlines_by_number(file: Path) -> tuple[tuple[int, int], dict[int, Outlines]]:
    """Return a mask's width and height, and the outlines of each object's parts by its number, in pixels.

    Raises:
        OSError, ValueError: it is not there, cannot be read, or is too large.
    """
    with open_regular(file) as encoded, opened(encoded) as image:
        if image.mode not in NUMBERED:
            raise ValueError(f"mode {image.mode}")
        numbers = np.asarray(image)
    numbers = np.where(numbers == BORDER, 0, numbers)
    found = {
        number: _moved(of_mask(numbers[place] == number), place[1].start, place[0].start)
        for number, place in enumerate(find_objects(numbers), start=1)
        if place is not None
    }
    return (numbers.shape[1], numbers.shape[0]), found


def _moved(outlines: Outlines, right: int, down: int) -> Outlines:
    return replace(outlines, parts=[[(x + right, y + down) for x, y in part] for part in outlines.parts])
