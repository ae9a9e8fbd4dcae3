"""Files that call themselves images: each is refused in one line with its name, by all who read images."""

from __future__ import annotations

import contextlib
import gzip
import io
import pickle
import struct
import zlib
from pathlib import Path

import pytest
from PIL import EpsImagePlugin, Image

from stage2_trainer.data.images import ImageError, image_url, load_image, read_header


def saved(form: str, size: tuple[int, int] = (40, 30)) -> bytes:
    """A sound image in a format."""
    written = io.BytesIO()
    Image.effect_noise(size, 50).convert("RGB").save(written, form)
    return written.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG, with the sum that belongs to it."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, bits: int = 8, colour: int = 2) -> bytes:
    """A PNG that says this of itself, whatever it holds."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks) + chunk(b"IEND", b"")


PNG, JPEG, GIF, BMP, WEBP, TIFF = (saved(form) for form in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"))
BOMB = zlib.compress(b"\0" * 50_000_000)
REFUSED: dict[str, bytes] = {
    "nothing": b"",
    "one byte": b"\x89",
    "text": b"not an image",
    "a page": b"<!doctype html><html><body><img src=x></body></html>",
    "JSON": b'{"image": "a.png"}',
    "a drawing that scripts": b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
    "PostScript that deletes": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) deletefile\n%%EOF\n",
    "a document": b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n",
    "a program": b"\x7fELF" + b"\0" * 200,
    "a pickle": pickle.dumps({"image": [1, 2, 3]}),
    "an archive": b"PK\x03\x04" + b"\0" * 100,
    "an image that was packed": gzip.compress(PNG),
    "a film": b"\0\0\0\x18ftypmp42" + b"\0" * 100,
    "the first bytes of a PNG": PNG[:8],
    "a PNG without pixels": png(40, 30),
    "a PNG of no width": png(0, 30, chunk(b"IDAT", zlib.compress(b"\0" * 30))),
    "a PNG as wide as a number goes": png(2**31 - 1, 1, chunk(b"IDAT", zlib.compress(b"\0"))),
    "a PNG of 100,000 by 100,000": png(100_000, 100_000, chunk(b"IDAT", BOMB)),
    "a PNG whose pixels are noise": png(40, 30, chunk(b"IDAT", bytes(range(256)) * 4)),
    "a PNG whose pixels end soon": png(40, 30, chunk(b"IDAT", zlib.compress(b"\0" * 100))),
    "a PNG of bits that there are not": png(40, 30, chunk(b"IDAT", zlib.compress(b"\0" * 9000)), bits=77),
    "a PNG whose header lies of its sum": PNG[:29] + bytes(byte ^ 255 for byte in PNG[29:33]) + PNG[33:],
    "a PNG with a text that unpacks to 50 MB": png(40, 30, chunk(b"zTXt", b"a\0\0" + BOMB)),
    "the first half of a JPEG": JPEG[: len(JPEG) // 2],
    "a JPEG of no lines": JPEG.replace(b"\x08\x00\x1e\x00\x28", b"\x08\x00\x00\x00\x28"),
    "a JPEG of 65,000 by 65,000": JPEG.replace(b"\x08\x00\x1e\x00\x28", b"\x08\xfd\xe8\xfd\xe8"),
    "a JPEG without its tables": JPEG[:2] + JPEG[-200:],
    "a GIF without a frame": GIF[:13] + b";",
    "the first bytes of a GIF": GIF[:10],
    "a BMP of a negative width": BMP[:18] + struct.pack("<i", -40) + BMP[22:],
    "a BMP of two thousand million lines": BMP[:22] + struct.pack("<i", 2**31 - 1) + BMP[26:],
    "a WebP that is cut off": WEBP[:40],
    "a WebP of another length": WEBP[:4] + b"\xff\xff\xff\x7f" + WEBP[8:30],
    "a TIFF whose directory is nowhere": b"II*\0\xff\xff\xff\x7f",
    "a TIFF whose directory is itself": b"II*\0\x08\0\0\0\0\0\x08\0\0\0",
    "the first half of a TIFF": TIFF[: len(TIFF) // 2],
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning", "ignore:.*[Cc]orrupt.*:UserWarning")
@pytest.mark.parametrize("content", REFUSED.values(), ids=REFUSED)
def test_non_image_file_is_refused_with_its_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    with pytest.raises(ImageError, match=r"a\.png: ") as refused:
        load_image(str(path))
    assert "\n" not in str(refused.value)
    try:
        header = read_header(str(path))
    except ImageError as error:
        assert "a.png: " in str(error)  # noqa: PT017  # a header may be sound though its pixels are not
    else:
        assert min(header.size) > 0


def test_postscript_file_is_not_passed_to_ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow runs Ghostscript on PostScript, whatever the file is called."""
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # asked for anew
    path = tmp_path / "a.png"
    path.write_bytes(REFUSED["PostScript that deletes"])
    with Image.open(path) as believed, pytest.raises(OSError):
        believed.load()
    assert (tmp_path / "ran").exists(), "the program stands where Pillow looks for it"
    (tmp_path / "ran").unlink()
    for use in (load_image, image_url, read_header):
        with contextlib.suppress(ImageError):
            use(str(path))
    assert not (tmp_path / "ran").exists()
