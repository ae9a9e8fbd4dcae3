"""The headers of images: the one reader of how large an image is as it is shown, and what compares records with it.

A header says it without the pixels: a few kilobytes of each file are read. When each is compared: of all images that
`stage2 data` and `stage2 validate` read, of so many at the start of a run (`LOOKED_AT`, spread over the file), and of
every image that is trained on, before it is.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, TypeVar

from stage2_api.errors import Problem
from stage2_trainer.data.images import UPRIGHT, ImageError, file_path, image_bytes, opened, orientation
from stage2_trainer.data.records import MAX_REPORTED_PROBLEMS, Record, lines
from stage2_trainer.data.regular_files import open_regular

LOOKED_AT = 1000
THREADS = 8  # a file on a network's drive is waited for
SIDEWAYS = range(5, 9)  # orientations that swap width and height (Exif 2.32, section 4.6.4)

T = TypeVar("T")


@dataclass(frozen=True)
class Header:
    """The header of an image: its format, width and height of its pixels as they lie, and EXIF's orientation."""

    format: str
    stored: tuple[int, int]
    orientation: int = UPRIGHT

    @property
    def turned(self) -> bool:
        """Whether it is shown otherwise than its pixels lie."""
        return self.orientation != UPRIGHT

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the image as it is shown."""
        width, height = self.stored
        return (height, width) if self.orientation in SIDEWAYS else (width, height)


class SizeError(ImageError):
    """An image has another size than its record says."""

    def __init__(self, source: str, said: tuple[int, int], found: tuple[int, int]) -> None:
        self.said, self.found = said, found
        super().__init__(source, self.words(said, found), way_out="correct the record's width and height")

    @staticmethod
    def words(said: tuple[int, int], found: tuple[int, int]) -> str:
        """Return both sizes in words."""
        return f"{_by(found)} as it is shown, where its record says {_by(said)}"


def read_header(source: str) -> Header:
    """Return the header of a path, a `file://` URL or a base64 `data:` URL. Raise ImageError where there is none."""
    if source.startswith("data:"):
        return header_of(image_bytes(source), source)
    try:
        with open_regular(file_path(source)) as file:
            return _header(file, source)
    except OSError as error:
        raise ImageError.of(source, error) from error


def header_of(encoded: bytes, source: str) -> Header:
    """Return the header of an encoded image, `source` in messages. Raise ImageError where there is none."""
    return _header(io.BytesIO(encoded), source)


def _header(file: BinaryIO, source: str) -> Header:
    try:
        with opened(file) as image:
            return Header(image.format or "", image.size, orientation(image, file))
    except MemoryError:
        raise
    except Exception as error:  # what is broken makes Pillow raise whatever it came to
        raise ImageError.of(source, error) from error


def size_fault(record: Record) -> SizeError | None:
    """Return that a record says another size than its image has as it is shown; of several images one must have it.

    None where the record says none, and where an image cannot be read: whoever decodes it says so.
    """
    said, found = (record.width, record.height), (0, 0)
    if said == (0, 0):
        return None
    for source in reversed(record.images):
        try:
            found = read_header(source).size
        except ImageError:
            return None
        if found == said:
            return None
    return SizeError(record.images[0], said, found)


def size_problem(where: str, fault: SizeError) -> Problem:
    """Return what is wrong with the record at `where` (`file:line`)."""
    rule = f"its image has {_by(fault.found)} as it is shown, after EXIF"
    way_out = "correct width and height, and coordinates that were made with them, or remove the record"
    return Problem(f"{where} width, height", _by(fault.said), rule, way_out)


def size_problems(path: Path | str, records: Sequence[Record], most: int = LOOKED_AT) -> list[Problem]:
    """Return which of at most `most` records, spread over a file's, contradict the headers of their images."""
    with ThreadPoolExecutor(THREADS) as threads:
        faults = list(threads.map(_placed_fault, spread(records, most)))
    found = dict(islice((one for one in faults if one is not None), MAX_REPORTED_PROBLEMS))
    if not found:
        return []
    return [
        size_problem(f"{path}:{line.number}", found[line.position])
        for line in islice(lines(path), max(found) + 1)
        if line.position in found
    ]


def spread(items: Sequence[T], most: int) -> Sequence[T]:
    """Return at most `most` of them, at equal distances."""
    return items[:: max(1, -(-len(items) // most))]


def _placed_fault(record: Record) -> tuple[int, SizeError] | None:
    fault = size_fault(record)
    return None if fault is None else (record.index, fault)


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
