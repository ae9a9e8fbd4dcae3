"""Images: from a path or `data:` URL to RGB pixels, and to the string that travels in a request."""

from __future__ import annotations

import base64
import binascii
import io
import mimetypes
from pathlib import Path

from PIL import Image


def load_image(source: str) -> Image.Image:
    """Return the RGB image of a path, a `file://` URL or a base64 `data:` URL.

    Raises ValueError that names the source when it cannot be read as an image.
    """
    try:
        with Image.open(io.BytesIO(image_bytes(source))) as image:
            return image.convert("RGB")
    except (OSError, binascii.Error) as error:
        raise ValueError(
            f"image {source[:120]}: cannot be read ({error}); replace the file or drop its record"
        ) from error


def image_bytes(source: str) -> bytes:
    """Return the encoded file's bytes of a path, a `file://` URL or a base64 `data:` URL."""
    if source.startswith("data:"):
        head, separator, body = source.partition(",")
        if not separator or not head.endswith(";base64"):
            raise ValueError(f"image {source[:60]}: must be a base64 data: URL; write data:image/png;base64,...")
        return base64.b64decode(body, validate=True)
    return Path(source.removeprefix("file://")).read_bytes()


def image_url(source: str) -> str:
    """Return the `data:` URL of an image, so that a server needs no file system in common with the learner."""
    if source.startswith("data:"):
        return source
    mime = mimetypes.guess_type(source)[0] or "image/png"
    return f"data:{mime};base64,{base64.b64encode(image_bytes(source)).decode('ascii')}"
