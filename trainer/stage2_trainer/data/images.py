"""Images: from a path or `data:` URL to RGB pixels, and to the string that travels in a request.

Learner and server must see the same pixels. An image that every reader decodes alike (8 bits, RGB or grey, upright, one
frame, opaque) is sent as its file is; any other is converted first, by the rules of `displayed`.
"""

from __future__ import annotations

import base64
import functools
import io
import math
import mimetypes
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageOps, TiffImagePlugin, UnidentifiedImageError

from stage2_trainer.data.files import open_regular
from stage2_trainer.data.signatures import LONGEST, REPLACE, contents_of

BLANK_SIDE = 64  # pixels
MOST_PIXELS = 90_000_000
"""Pixels of an image, 270 MB once decoded: a file of a few kB may expand to any number. Pillow only warns."""
STRIP_PIXELS = 1 << 20  # of a strip that is converted at once
MOST_ASPECT = 200  # ratio of an image's longer side to its shorter one; Qwen's image processor refuses more
MOST_BYTES = 256 << 20  # bytes of an image's file
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Pillow's names of the formats that are read. It knows forty more, and passes PostScript to Ghostscript."""
UPRIGHT = 1
SIDEWAYS = range(5, 9)  # orientations that swap width and height (Exif 2.32, section 4.6.4)
PLAIN_FORMATS = frozenset({"JPEG", "PNG", "WEBP"})
PLAIN_MODES = frozenset({"RGB", "L"})
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHUNK_HEAD, KEYWORD_BYTES = 8, 32
TEXT_CHUNKS, ORIENTING_KEYWORDS = (b"tEXt", b"zTXt", b"iTXt"), (b"Raw profile", b"XML:com")
ORIENTING_CHUNKS = (b"eXIf", *(kind + key for kind in TEXT_CHUNKS for key in ORIENTING_KEYWORDS))
SIXTEEN_BITS = frozenset({"I;16", "I;16B", "I;16L", "I;16N", "I"})
THIRTY_TWO_BITS = frozenset({"F", "I"})  # Pillow's I has 16 bits if the file is a PPM
WHITE_IS_ZERO = 0  # Pillow inverts such TIFFs of 8 bits, and no others
SCALE = "scale it so that white is 255, and save it with 8 bits"
TOO_LARGE, SMALLER = f"it has more than {MOST_PIXELS:,} pixels", "make it smaller"
DARKEST_WHITE = 1 / 4  # of the largest value: below it the upper two of the bits are empty
STRAY_PIXELS = 1 / 1000  # of an image: a sensor has broken ones, which are white


class ImageError(ValueError):
    """An image is missing or cannot be used. The message names it and the reason.

    fault: the reason in words that all images with it share. way_out: what to do about it.
    """

    fault = ""
    way_out = ""

    @classmethod
    def at(cls, source: str, why: object, *, way_out: str = REPLACE) -> ImageError:
        """Return the error of an image at a path or URL."""
        return cls(f"image {_shortened(source)}: {why}; {way_out}").because(str(why), way_out)

    @classmethod
    def unreadable(cls, source: str, error: Exception, head: bytes | None = None) -> ImageError:
        """Return the error of an image that a decoder or the machine could not read. head: the file's first bytes."""
        fault, detail, way_out = _reason(error, head)
        shown = f"{fault}: {detail}" if detail else fault
        return cls.at(source, f"cannot be read ({shown})", way_out=way_out).because(fault, way_out)

    def because(self, fault: str, way_out: str) -> ImageError:
        """Return the error with these reasons."""
        self.fault, self.way_out = fault, way_out
        return self


class RefusedImageError(ValueError):
    """An image has a form that is not read, by a rule of this module. detail: of this image."""

    def __init__(self, fault: str, detail: str, way_out: str = REPLACE) -> None:
        super().__init__(fault)
        self.fault, self.detail, self.way_out = fault, detail, way_out


@dataclass(frozen=True)
class Header:
    """The header of an image: its format, the width and height of its stored pixels, and EXIF's orientation."""

    format: str
    stored: tuple[int, int]
    orientation: int = UPRIGHT

    @property
    def rotated(self) -> bool:
        """Whether it is displayed rotated or mirrored."""
        return self.orientation != UPRIGHT

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the image as displayed."""
        width, height = self.stored
        return (height, width) if self.orientation in SIDEWAYS else (width, height)


def load_image(source: str) -> Image.Image:
    """Return the RGB image of a path, a `file://` URL or a base64 `data:` URL. Raises ImageError."""
    return _decoded(image_bytes(source), source)


def _decoded(encoded: bytes, source: str) -> Image.Image:
    """Return the RGB pixels of an encoded image; `source` names it in errors. Raises ImageError."""
    try:
        with open_image(io.BytesIO(encoded)) as image:
            return displayed(image)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders may raise anything for a broken file
        raise ImageError.unreadable(source, error, encoded[:LONGEST]) from error


def open_image(file: BinaryIO) -> Image.Image:
    """Open an image and read its header.

    Raises RefusedImageError if it is too large for a model or for memory, or if nothing says what its white is.
    """
    image = Image.open(file, formats=_formats())
    sides = f"{image.width} x {image.height}"
    if image.width * image.height > MOST_PIXELS:
        raise RefusedImageError(TOO_LARGE, sides, SMALLER)
    if max(image.size) > MOST_ASPECT * min(image.size):
        fault = f"one side is more than {MOST_ASPECT} times the other, which the model's image processor refuses"
        raise RefusedImageError(fault, sides, "cut it into pieces")
    if image.mode in THIRTY_TWO_BITS and (image.mode, image.format) != ("I", "PPM"):
        kind = "floats" if image.mode == "F" else "integers"
        fault = f"its pixels are {kind} of more than 16 bits, and nothing says which of them is white"
        raise RefusedImageError(fault, "", SCALE)
    if image.mode in SIXTEEN_BITS and _photometric(image) == WHITE_IS_ZERO:
        raise RefusedImageError("it is a TIFF of 16 bits whose white is 0", "", "save it so that black is 0")
    if not _converts(image.mode):
        raise RefusedImageError("its colours are not converted to RGB", image.mode, "convert it to RGB")
    return image


def _photometric(image: Image.Image) -> object:
    """Return the PhotometricInterpretation of a TIFF; None of any other image."""
    tags = getattr(image, "tag_v2", {})
    return tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION)


@functools.cache
def _converts(mode: str) -> bool:
    """Whether pixels of a mode become RGB."""
    try:
        displayed(Image.new(mode, (1, 1)))
    except ValueError:
        return False
    return True


def check_depth(image: Image.Image) -> None:
    """Decode an image of 16 bits a channel, and raise RefusedImageError if the upper two are empty.

    Its levels were 10 to 14 bits of a camera, say. Their upper eight bits would be dark, or black.
    """
    if not _has_sixteen_bits(image):
        return
    image.load()
    grey = image.mode in SIXTEEN_BITS
    names = [name for name in image.getbands() if name != "A"]
    levels = [_grey_levels(image)] if grey else [_levels(image.getchannel(name).histogram()) for name in names]
    bright, dim = max(found[0] for found in levels), any(found[1] for found in levels)
    pixels = image.width * image.height
    if bright <= min(math.ceil(STRAY_PIXELS * pixels), pixels - 1) and (dim or not grey):
        fault = "it has 16 bits, and is nearly all below a quarter of white: its upper bits are empty"
        raise RefusedImageError(fault, f"{bright:,} of {pixels:,} pixels are brighter", SCALE)


def _grey_levels(image: Image.Image) -> tuple[int, bool]:
    """Return how many pixels of 16 bits are no darker than DARKEST_WHITE, and whether any other is not black."""
    values = np.asarray(image)
    bright = values >= DARKEST_WHITE * 65536
    return int(np.count_nonzero(bright)), int(np.count_nonzero(values)) > int(np.count_nonzero(bright))


def _levels(histogram: list[int]) -> tuple[int, bool]:
    """Return the same for an image whose decoder keeps only the upper eight bits. histogram: pixels of each level."""
    first = int(DARKEST_WHITE * 256)
    return sum(histogram[first:]), any(histogram[1:first])


def _has_sixteen_bits(image: Image.Image) -> bool:
    """Whether an image that was opened, and not decoded yet, has more than 8 bits a channel."""
    if image.mode in SIXTEEN_BITS:
        return True
    layouts = [tile.args for tile in getattr(image, "tile", ())] if image.format in ("PNG", "TIFF", "PPM") else []
    return any(";16" in str(layout) or _highest(layout) > 255 for layout in layouts)


def _highest(layout: object) -> int:
    """Return the highest value of a PPM."""
    return layout[1] if isinstance(layout, tuple) and len(layout) == 2 and isinstance(layout[1], int) else 0


@functools.cache
def _formats() -> list[str]:
    """Return the formats that this build of Pillow reads."""
    Image.init()
    return [one for one in FORMATS if one in Image.OPEN]


def displayed(image: Image.Image) -> Image.Image:
    """Return the RGB pixels (8 bits) of an image as a viewer displays it.

    EXIF's rotation is applied; transparency is on white, or ignored if it hides all; 16 bits keep the upper eight,
    which must not be empty; the first of several frames counts; palettes and CMYK are converted as Pillow does. Raises
    RefusedImageError.
    """
    check_depth(image)
    image.load()  # a broken file is an error here; below, the rest of its image would be black
    image = _upright(image)
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    shown = Image.new("RGB", image.size)
    hidden = is_hidden(image)
    for strip, top in _strips(image):
        shown.paste(_as_rgb(strip, hidden=hidden), (0, top))
    return shown


def is_hidden(image: Image.Image) -> bool:
    """Whether an image is transparent everywhere: some tools leave the channel at 0, and mean no transparency."""
    return image.has_transparency_data and not any(
        strip.convert("RGBA").getchannel("A").getextrema()[1] for strip, _ in _strips(image)
    )


def open_source(source: str) -> AbstractContextManager[BinaryIO]:
    """Open the encoded bytes of a path or URL. Raises ImageError for a URL, OSError for a path."""
    return io.BytesIO(image_bytes(source)) if source.startswith("data:") else open_regular(file_path(source))


def _strips(image: Image.Image) -> Iterator[tuple[Image.Image, int]]:
    """Yield an image in strips, each with its place from the top: conversions need several copies."""
    rows = max(1, STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        yield image.crop((0, top, image.width, min(top + rows, image.height))), top


def _as_rgb(image: Image.Image, *, hidden: bool) -> Image.Image:
    """Return the RGB pixels of an upright image. hidden: its transparency is ignored."""
    if image.mode in SIXTEEN_BITS:
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    if image.has_transparency_data and not hidden:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return (image.convert("RGBA") if hidden else image).convert("RGB")


def orientation(image: Image.Image, file: BinaryIO) -> int:
    """Return EXIF's orientation of an image that was opened from this file; 1 is upright.

    No pixels are decoded, except of a PNG that may have EXIF after them.
    """
    if image.format == "PNG" and not _has_orienting_chunk(file):
        return UPRIGHT
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, UPRIGHT))
    except Exception:  # noqa: BLE001  # Pillow may raise anything; a viewer ignores broken EXIF
        return UPRIGHT


def image_bytes(source: str) -> bytes:
    """Return the encoded bytes of a path, a `file://` URL or a base64 `data:` URL. Raises ImageError."""
    if source.startswith("data:"):
        head, separator, body = source.partition(",")
        if not separator or not head.endswith(";base64"):
            raise ImageError.at(source, "must be a base64 data: URL", way_out="write data:image/png;base64,...")
        try:
            return base64.b64decode(body, validate=True)
        except ValueError as error:
            raise ImageError.unreadable(source, error) from error
    try:
        with open_regular(file_path(source)) as file:
            encoded = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ImageError.unreadable(source, error) from error
    if len(encoded) > MOST_BYTES:
        raise ImageError.at(source, f"the file is larger than {MOST_BYTES} bytes")
    return encoded


def file_path(source: str) -> Path:
    """Return the path of an image that is not a `data:` URL."""
    return Path(source.removeprefix("file://"))


def read_header(source: str) -> Header:
    """Return the header of a path, a `file://` URL or a base64 `data:` URL. Raises ImageError."""
    if source.startswith("data:"):
        return header_of(image_bytes(source), source)
    try:
        with open_source(source) as file:
            return _header(file, source)
    except OSError as error:
        raise ImageError.unreadable(source, error) from error


def header_of(encoded: bytes, source: str) -> Header:
    """Return the header of an encoded image; `source` names it in errors. Raises ImageError."""
    return _header(io.BytesIO(encoded), source)


def _header(file: BinaryIO, source: str) -> Header:
    try:
        with open_image(file) as image:
            header = Header(image.format or "", image.size, orientation(image, file))
            check_depth(image)
            return header
    except MemoryError:
        raise
    except Exception as error:  # Pillow may raise anything for a broken file
        raise ImageError.unreadable(source, error, _head(file)) from error


def _head(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read(LONGEST)


def source_fault(sources: Iterable[str]) -> ImageError | None:
    """Return the error of the first image that cannot be read; None if all can."""
    try:
        for source in sources:
            load_image(source)
    except ImageError as error:
        return error
    return None


@functools.cache
def blank_image() -> str:
    """Return a small grey image as a `data:` URL, a placeholder."""
    encoded = io.BytesIO()
    Image.new("RGB", (BLANK_SIDE, BLANK_SIDE), "grey").save(encoded, format="PNG")
    return _data_url("image/png", encoded.getvalue())


def image_url(source: str) -> str:
    """Return the `data:` URL of an image, so that a server needs no file system in common with the learner.

    An image that readers may decode differently becomes a PNG of the pixels that `load_image` returns. Each is decoded
    first, so that no bytes of any other file are sent. Raises ImageError.
    """
    encoded = image_bytes(source)
    image = _decoded(encoded, source)
    if not _is_plain(encoded):
        png = io.BytesIO()
        image.save(png, format="PNG", compress_level=1)
        return _data_url("image/png", png.getvalue())
    if source.startswith("data:"):
        return source
    return _data_url(mimetypes.guess_type(source)[0] or "image/png", encoded)


def _is_plain(encoded: bytes) -> bool:
    """Whether every reader decodes an image alike."""
    with open_image(io.BytesIO(encoded)) as image:
        return (
            image.format in PLAIN_FORMATS
            and image.mode in PLAIN_MODES
            and not _has_sixteen_bits(image)
            and not image.has_transparency_data
            and getattr(image, "n_frames", 1) == 1
            and not _may_be_rotated(image, io.BytesIO(encoded))
        )


def _may_be_rotated(image: Image.Image, file: BinaryIO) -> bool:
    """Whether an image may be rotated; for a PNG, without decoding it as Pillow would."""
    return _has_orienting_chunk(file) if image.format == "PNG" else orientation(image, file) != UPRIGHT


def _has_orienting_chunk(png: BinaryIO) -> bool:
    return any(chunk.startswith(ORIENTING_CHUNKS) for chunk in _chunks(png))


def _chunks(png: BinaryIO) -> Iterator[bytes]:
    """Yield the type and first bytes of each chunk of a PNG (specification, 5.3: length, type, data, checksum)."""
    position = len(PNG_SIGNATURE)
    png.seek(position)
    while len(head := png.read(CHUNK_HEAD + KEYWORD_BYTES)) >= CHUNK_HEAD:
        yield head[4:]
        position += int.from_bytes(head[:4], "big") + CHUNK_HEAD + 4
        png.seek(position)


def _upright(image: Image.Image) -> Image.Image:
    """Return an image rotated by its EXIF; unchanged if that cannot be read."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # noqa: BLE001  # Pillow may raise anything; a viewer ignores broken EXIF
        return image


def _data_url(mime: str, encoded: bytes) -> str:
    return f"data:{mime};base64,{base64.b64encode(encoded).decode('ascii')}"


def _shortened(source: str) -> str:
    return f"{source[:40]}… ({len(source)} characters)" if source.startswith("data:") else source


def _reason(error: Exception, head: bytes | None) -> tuple[str, str, str]:
    """Return why an image cannot be read, in shared words and for this image, and the way out."""
    if isinstance(error, RefusedImageError):
        return error.fault, error.detail, error.way_out
    if isinstance(error, Image.DecompressionBombError):
        return TOO_LARGE, str(error), SMALLER
    if isinstance(error, OSError) and error.strerror:
        return error.strerror, "", REPLACE
    why = str(error) or type(error).__name__
    if head is None:
        return why, "", REPLACE
    contents = contents_of(head)
    return contents.name, "" if isinstance(error, UnidentifiedImageError) else why, contents.way_out
