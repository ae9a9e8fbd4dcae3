"""Names what a file holds by its first bytes, where it is no image that can be read."""

from __future__ import annotations

from dataclasses import dataclass

LONGEST = 1024  # bytes of a file that are compared

CONVERT = "convert it to PNG or JPEG"
REPLACE = "replace the file or drop its record"
FETCH = "fetch the file with `git lfs pull`"


@dataclass(frozen=True)
class Contents:
    """What a file holds, in words, and the way out."""

    name: str
    way_out: str = REPLACE


_READ: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89PNG", "PNG"), (0, b"\xff\xd8\xff", "JPEG"), (0, b"GIF8", "GIF"), (0, b"BM", "BMP"), (8, b"WEBP", "WebP"),
    (0, b"II*\0", "TIFF"), (0, b"MM\0*", "TIFF"), (4, b"jP  ", "JPEG 2000"), (4, b"ftypavif", "AVIF"),
    (4, b"ftypavis", "AVIF"), (0, b"II+\0", "TIFF"), (0, b"MM\0+", "TIFF"), (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
)  # fmt: skip
_OTHER_IMAGES: tuple[tuple[int, bytes, str], ...] = (
    (4, b"ftyphei", "HEIC"), (4, b"ftyphev", "HEIC"), (4, b"ftypmif1", "HEIF"), (4, b"ftypmsf1", "HEIF"),
    (0, b"\xff\x0a", "JPEG XL"), (4, b"JXL ", "JPEG XL"), (4, b"ftypcrx", "a raw photograph (CR3)"),
    (0, b"8BPS", "a Photoshop file"), (0, b"v/1\x01", "OpenEXR"),
    (0, b"#?RADIANCE", "Radiance HDR"), (0, b"SIMPLE  =", "FITS"), (128, b"DICM", "DICOM"), (0, b"DDS ", "DDS"),
    (0, b"\x93NUMPY", "a NumPy array"), (0, b"%!PS", "PostScript"), (0, b"%PDF", "PDF"),
)  # fmt: skip
_NO_IMAGES: tuple[tuple[int, bytes, str], ...] = (
    (4, b"ftyp", "a film (MP4 or MOV)"), (8, b"AVI ", "a film (AVI)"), (0, b"\x1a\x45\xdf\xa3", "a film (Matroska)"),
    (0, b"PK\x03\x04", "a ZIP archive"), (0, b"\x1f\x8b", "a gzip archive"), (0, b"\x89HDF", "HDF5"),
    (0, b"\x7fELF", "a program"),
)  # fmt: skip
_LFS = b"version https://git-lfs.github.com/"
_MARKS = (
    ("<!doctype html", "HTML"), ("<html", "HTML"), ("<?xml", "XML"), ("<", "XML"), ("{", "JSON"), ("[", "JSON"),
)  # fmt: skip


def contents_of(head: bytes) -> Contents:
    """Return what a file holds that begins with these bytes (at most LONGEST are needed)."""
    if not head:
        return Contents("it is empty")
    if head.startswith(_LFS):
        return Contents("it is a pointer of Git LFS, not the image", FETCH)
    for signatures, words, way_out in (
        (_READ, "it is a damaged {} file", REPLACE),
        (_OTHER_IMAGES, "it is {}, which is not read", CONVERT),
        (_NO_IMAGES, "it is {}, no image", REPLACE),
    ):
        for offset, signature, name in signatures:
            if head.startswith(signature, offset):
                return Contents(words.format(name), way_out)
    return _marked_up(head)


def _marked_up(head: bytes) -> Contents:
    """Return what a file holds that may be text."""
    if not any(head):
        return Contents("it holds zeros only, as after a transfer that broke off")
    text = head.decode("utf-8-sig", errors="replace").removesuffix("\ufffd").strip().lower()  # cut in a character
    if "\ufffd" in text or not " ".join(text.split()).isprintable():
        return Contents("it has no format that is known", CONVERT)
    if "<svg" in text:
        return Contents("it is SVG, which is not read", CONVERT)
    mark = next((name for begin, name in _MARKS if text.startswith(begin)), "text")
    return Contents(f"it is {mark}, no image")
