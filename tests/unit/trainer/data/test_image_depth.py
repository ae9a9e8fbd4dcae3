"""Pixels of more than 8 bits: what is visible is not trained on as black, and what cannot be scaled is refused."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from stage2_trainer.data.images import SCALE, ImageError, _is_plain, image_url, load_image, read_header

RAMP = np.tile(np.linspace(0, 1, 40), (20, 1))


def saved(array, form="PNG"):
    file = io.BytesIO()
    Image.fromarray(array).save(file, format=form)
    return file.getvalue()


def grey(white, form="PNG", kind="u2"):
    return saved((RAMP * white).astype(kind), form)


def colour(white, bands=3, bright=0):
    """A PNG of 16 bits a channel, which Pillow cannot write; with four channels, the last is opaque."""
    opaque = [np.full_like(RAMP, 65535)] * (bands in (2, 4))
    levels = np.stack([RAMP * white] * (bands - len(opaque)) + opaque, axis=-1).astype(">u2")
    levels[0, :bright] = 65535
    rows = b"".join(b"\0" + row.tobytes() for row in levels)

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 40, 20, 16, {2: 4, 3: 2, 4: 6}[bands], 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def ppm(magic, highest, white):
    bands = 3 if magic == b"P6" else 1
    levels = np.stack([RAMP * white] * bands, axis=-1).astype(">u2")
    return magic + b" 40 20 %d\n" % highest + levels.tobytes()


def url(content):
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def with_bright_pixels(levels, count):
    """The same levels, of which the darkest are white: a sensor's broken pixels."""
    changed = levels.copy()
    changed.flat[:count] = 65535
    return changed


TWELVE_BITS = np.tile(np.arange(0, 4000, 40), (50, 1)).astype("u2")  # 5,000 pixels, so 5 of them may be broken
FLOATS = "its pixels are floats of more than 16 bits, and nothing says which of them is white"
INTEGERS = FLOATS.replace("floats", "integers")
EMPTY_BITS = "it has 16 bits, and is nearly all below a quarter of white: its upper bits are empty"
REFUSED = {
    "floats from 0 to 1": (grey(1, "TIFF", "f4"), FLOATS),
    "floats from 0 to 255": (grey(255, "TIFF", "f4"), FLOATS),
    "floats of a PFM": (b"Pf\n40 20\n-1.0\n" + RAMP.astype("<f4").tobytes(), FLOATS),
    "no numbers": (saved(np.full((20, 40), np.nan, "f4"), "TIFF"), FLOATS),
    "8 bits in 32": (grey(255, "TIFF", "i4"), INTEGERS),
    "16 bits in 32": (grey(65535, "TIFF", "i4"), INTEGERS),
    "negative integers": (grey(-900, "TIFF", "i4"), INTEGERS),
    "8 bits in 16": (grey(255), EMPTY_BITS),
    "10 bits in 16": (grey(1023), EMPTY_BITS),
    "12 bits in 16": (grey(4095), EMPTY_BITS),
    "12 bits in 16 as TIFF": (grey(4095, "TIFF"), EMPTY_BITS),
    "12 bits in 16 and one bright pixel": (saved(with_bright_pixels(TWELVE_BITS, 1)), EMPTY_BITS),
    "12 bits in 16 and five bright pixels": (saved(with_bright_pixels(TWELVE_BITS, 5), "TIFF"), EMPTY_BITS),
    "12 bits in 16 of each colour and one bright pixel": (colour(4095, bright=1), EMPTY_BITS),
    "14 bits in 16": (grey(16383), EMPTY_BITS),
    "12 bits in 16 as PGM": (ppm(b"P5", 65535, 4095), EMPTY_BITS),
    "8 bits in 16 of each colour": (colour(255), EMPTY_BITS),
    "12 bits in 16 of each colour": (colour(4095), EMPTY_BITS),
    "14 bits in 16 of each colour": (colour(16383), EMPTY_BITS),
    "12 bits in 16 of each colour, opaque": (colour(4095, bands=4), EMPTY_BITS),
    "12 bits in 16 of grey, opaque": (colour(4095, bands=2), EMPTY_BITS),
    "12 bits in 16 of each colour as PPM": (ppm(b"P6", 65535, 4095), EMPTY_BITS),
}


@pytest.mark.parametrize("case", REFUSED)
def test_image_with_unknown_white_level_is_refused_by_every_reader(tmp_path, case):
    content, fault = REFUSED[case]
    path = tmp_path / "a.tif"
    path.write_bytes(content)
    for use in (read_header, load_image, image_url):
        with pytest.raises(ImageError, match=rf"a\.tif: cannot be read \({fault}") as refused:
            use(str(path))
        assert (refused.value.fault, refused.value.way_out) == (fault, SCALE)
        assert str(refused.value).endswith(SCALE)


KEPT = {
    "16 bits": grey(65535),
    "16 bits of half the brightness": grey(32767),
    "16 bits as TIFF": grey(65535, "TIFF"),
    "16 bits as JPEG 2000": grey(65535, "JPEG2000"),
    "16 bits as PGM": ppm(b"P5", 65535, 65535),
    "12 bits, as a PGM's header says": ppm(b"P5", 4095, 4095),
    "12 bits of each colour, as a PPM's header says": ppm(b"P6", 4095, 4095),
    "16 bits of each colour": colour(65535),
    "16 bits of each colour, opaque": colour(65535, bands=4),
    "16 bits of grey, opaque": colour(65535, bands=2),
}


@pytest.mark.parametrize("case", KEPT)
def test_sixteen_bit_image_keeps_upper_eight_bits(case):
    path = url(KEPT[case])
    assert read_header(path).size == (40, 20)
    pixels = np.asarray(load_image(path))[..., 0].astype(int)
    white = 127 if "half" in case else 255
    assert np.abs(pixels - RAMP * white).max() <= 1
    assert np.array_equal(np.asarray(load_image(image_url(path))), np.asarray(load_image(path)))


def test_sixteen_bit_tiff_with_white_as_zero_is_refused(tmp_path):
    path = tmp_path / "a.tif"
    path.write_bytes(grey(65535, "TIFF"))
    assert load_image(str(path)).getpixel((39, 0)) == (255, 255, 255)
    tag = struct.pack("<HHI", 262, 3, 1)
    path.write_bytes(path.read_bytes().replace(tag + struct.pack("<I", 1), tag + struct.pack("<I", 0)))
    for use in (read_header, load_image):
        with pytest.raises(ImageError, match=r"whose white is 0.*; save it so that black is 0"):
            use(str(path))


def test_image_with_several_bright_pixels_keeps_its_levels():
    shown = np.asarray(load_image(url(saved(with_bright_pixels(TWELVE_BITS, 6)))))[..., 0]
    assert (shown.max(), np.count_nonzero(shown == 255)) == (255, 6)


@pytest.mark.parametrize("white", [1, 3])
def test_black_image_with_white_dots_keeps_white(white):
    pixels = np.zeros((50, 100), "u2")
    pixels[0, :white] = 65535
    assert np.count_nonzero(np.asarray(load_image(url(saved(pixels))))[..., 0] == 255) == white
    assert np.asarray(load_image(url(saved(np.full((1, 1), 65535, "u2"))))).min() == 255


def test_all_black_sixteen_bit_image_stays_black():
    assert np.asarray(load_image(url(grey(0)))).max() == 0


def test_sixteen_bit_image_is_not_sent_unchanged():
    assert _is_plain(saved(np.zeros((2, 2, 3), "u1")))
    assert not _is_plain(colour(65535))
