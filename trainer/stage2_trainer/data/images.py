"""Images: from a path or `data:` URL to RGB pixels, and to the string that travels in a request."""

from __future__ import annotations

import base64
import functools
import io
import mimetypes
from collections.abc import Iterable
from pathlib import Path

from PIL import Image, UnidentifiedImageError

BLANK_SIDE = 64  # pixels


class ImageError(ValueError):
    """An image is not there, or cannot be decoded. The message names it, and says why."""

    def __init__(self, source: str, why: object) -> None:
        super().__init__(f"image {_named(source)}: cannot be read ({why}); replace the file or drop its record")


def load_image(source: str) -> Image.Image:
    """Return the RGB image of a path, a `file://` URL or a base64 `data:` URL. Raise ImageError where there is none."""
    encoded = image_bytes(source)
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            return image.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # what is broken makes Pillow's decoders raise whatever they came to
        raise ImageError(source, _why(error)) from error


def image_bytes(source: str) -> bytes:
    """Return the encoded file's bytes of a path, a `file://` URL or a base64 `data:` URL. Raise ImageError."""
    if source.startswith("data:"):
        head, separator, body = source.partition(",")
        if not separator or not head.endswith(";base64"):
            raise ImageError(source, "it must be a base64 data: URL; write data:image/png;base64,...")
        try:
            return base64.b64decode(body, validate=True)
        except ValueError as error:
            raise ImageError(source, error) from error
    try:
        return Path(source.removeprefix("file://")).read_bytes()
    except OSError as error:
        raise ImageError(source, error.strerror or error) from error


def source_fault(sources: Iterable[str]) -> ImageError | None:
    """Return what is wrong with the first image that cannot be read; None where all can be."""
    try:
        for source in sources:
            load_image(source)
    except ImageError as error:
        return error
    return None


@functools.cache
def blank_image() -> str:
    """Return a small grey image as a `data:` URL, for where an image is needed and its content is not."""
    encoded = io.BytesIO()
    Image.new("RGB", (BLANK_SIDE, BLANK_SIDE), "grey").save(encoded, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode('ascii')}"


def image_url(source: str) -> str:
    """Return the `data:` URL of an image, so that a server needs no file system in common with the learner."""
    if source.startswith("data:"):
        return source
    mime = mimetypes.guess_type(source)[0] or "image/png"
    return f"data:{mime};base64,{base64.b64encode(image_bytes(source)).decode('ascii')}"


def _named(source: str) -> str:
    return f"{source[:40]}… ({len(source)} characters)" if source.startswith("data:") else source


def _why(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "no image format that is known"  # Pillow names a buffer in memory
    return str(error) or type(error).__name__
