"""The headers of records' images: whether they can be read, and are as large as their records say."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import islice

from PIL import Image

from stage2_trainer.data.images import image_bytes, shown_size
from stage2_trainer.data.records import Record
from stage2_trainer.doctor.requirement import Requirement, good

NAMED = 3
LARGE_PIXELS = 50_000_000


def images_of(records: Sequence[Record]) -> Requirement:
    """Return whether the images of these records can be read, and have the sizes that the records say."""
    broken: list[str] = []
    other: list[str] = []
    large: list[str] = []
    sources = [(record, source) for record in records for source in record.images]
    for record, source in sources:
        try:
            width, height = size_of(source)
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            broken.append(f"{record.sample_id} ({error})")
            continue
        if record.width and (width, height) != (record.width, record.height):
            other.append(f"{record.sample_id} ({record.width}x{record.height}, and its image has {width}x{height})")
        if width * height > LARGE_PIXELS:
            large.append(record.sample_id)
    if broken:
        return Requirement(
            "images", "missing", f"{_share(broken, sources)} cannot be read: {_few(broken)}", "replace them"
        )
    if other:
        said = f"{_share(other, sources)} have another size than their records say: {_few(other)}"
        return Requirement("images", "doubtful", said, "correct width and height, which turn pixels into bins")
    if large:
        said = f"{_share(large, sources)} have more than {LARGE_PIXELS // 10**6} megapixels: {_few(large)}"
        return Requirement("images", "doubtful", said, "make them smaller: each is decoded whole, again and again")
    return good("images", f"the headers of {len(sources)} can be read")


def size_of(source: str) -> tuple[int, int]:
    """Return width and height of an image as it is shown, from its header. Raises OSError, ValueError."""
    with Image.open(io.BytesIO(image_bytes(source))) as image:
        return shown_size(image)


def _share(some: Sequence[object], of: Sequence[object]) -> str:
    return f"{len(some)} of {len(of)}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(islice(names, NAMED)) + (", …" if len(names) > NAMED else "")
