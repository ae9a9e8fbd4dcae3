"""The files of records' images: whether they can be read, and are no larger than they need be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from stage2_trainer.data.images import ImageError, read_header
from stage2_trainer.data.records import Record
from stage2_trainer.doctor.requirement import Requirement, good

NAMED = 3
LARGE_PIXELS = 50_000_000


def images_of(records: Sequence[Record]) -> Requirement:
    """Return whether the images of these records can be read, by their headers."""
    broken: list[str] = []
    large: list[str] = []
    sources = [(record, source) for record in records for source in record.images]
    for record, source in sources:
        try:
            width, height = read_header(source).size
        except ImageError as error:
            broken.append(f"{record.sample_id} ({error})")
            continue
        if width * height > LARGE_PIXELS:
            large.append(record.sample_id)
    if broken:
        return Requirement(
            "images", "missing", f"{_share(broken, sources)} cannot be read: {_few(broken)}", "replace them"
        )
    if large:
        said = f"{_share(large, sources)} have more than {LARGE_PIXELS // 10**6} megapixels: {_few(large)}"
        return Requirement("images", "doubtful", said, "make them smaller: each is decoded whole, again and again")
    return good("images", f"the headers of {len(sources)} can be read")


def _share(some: Sequence[object], of: Sequence[object]) -> str:
    return f"{len(some)} of {len(of)}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(islice(names, NAMED)) + (", …" if len(names) > NAMED else "")
