"""A file that is no image which can be read is named by what it is, and with the way out."""

import io
import json

import pytest
from PIL import Image

from stage2_trainer.data.images import ImageError, load_image, read_header
from stage2_trainer.data.signatures import CONVERT, FETCH, LONGEST, REPLACE, contents_of


def saved(form):
    file = io.BytesIO()
    Image.new("RGB", (40, 20)).save(file, format=form)
    return file.getvalue()


CASES = {
    "HEIC of a telephone": (b"\0\0\0\x18ftypheic" + bytes(90), "it is HEIC, which is not read", CONVERT),
    "JPEG XL": (b"\xff\x0a" + bytes(90), "it is JPEG XL, which is not read", CONVERT),
    "DICOM": (bytes(128) + b"DICM" + bytes(90), "it is DICOM, which is not read", CONVERT),
    "PDF": (b"%PDF-1.7\n", "it is PDF, which is not read", CONVERT),
    "an array": (b"\x93NUMPY\x01\0", "it is a NumPy array, which is not read", CONVERT),
    "a drawing": (b"<?xml version='1.0'?>\n<svg/>", "it is SVG, which is not read", CONVERT),
    "a page": (b"\n <!DOCTYPE html><html>404</html>", "it is HTML, no image", REPLACE),
    "a page with a mark": (b"\xef\xbb\xbf<HTML>", "it is HTML, no image", REPLACE),
    "an answer of a store": (b"<?xml version='1.0'?><Error/>", "it is XML, no image", REPLACE),
    "an error": (json.dumps({"error": "no"}).encode(), "it is JSON, no image", REPLACE),
    "words": ("naïve\tå\r\n".encode(), "it is text, no image", REPLACE),
    "long words": (("å" * LONGEST).encode()[:LONGEST], "it is text, no image", REPLACE),
    "long words that end within a letter": (("a" + "å" * LONGEST).encode()[:LONGEST], "it is text, no image", REPLACE),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "it is a pointer of Git LFS, not the image", FETCH),
    "a film": (b"\0\0\0\x18ftypmp42" + bytes(90), "it is a film (MP4 or MOV), no image", REPLACE),
    "an archive": (b"PK\x03\x04" + bytes(90), "it is a ZIP archive, no image", REPLACE),
    "nothing": (b"", "it is empty", REPLACE),
    "zeros": (bytes(90), "it holds zeros only, as after a transfer that broke off", REPLACE),
    "noise": (bytes(range(128, 255)), "it has no format that is known", CONVERT),
    "controls": (b"\x01\x02\x03", "it has no format that is known", CONVERT),
    "the beginning of a PNG": (saved("PNG")[:20], "it is a damaged PNG file", REPLACE),
    "the beginning of a TIFF": (saved("TIFF")[:7], "it is a damaged TIFF file", REPLACE),
}


@pytest.mark.parametrize("case", CASES)
def test_non_image_file_is_refused_with_its_detected_type(tmp_path, case):
    content, fault, way_out = CASES[case]
    assert contents_of(content[:LONGEST]).name == fault
    (tmp_path / "a.jpg").write_bytes(content)
    for use in (read_header, load_image):
        with pytest.raises(ImageError, match=r"a\.jpg: cannot be read") as refused:
            use(str(tmp_path / "a.jpg"))
        assert (refused.value.fault, refused.value.way_out) == (fault, way_out)
        assert fault in str(refused.value)


def test_damaged_image_error_keeps_decoder_message(tmp_path):
    (tmp_path / "a.jpg").write_bytes(saved("JPEG")[:-30])
    with pytest.raises(ImageError, match=r"it is a damaged JPEG file: (?i:.*truncated)") as refused:
        load_image(str(tmp_path / "a.jpg"))
    assert refused.value.fault == "it is a damaged JPEG file"
