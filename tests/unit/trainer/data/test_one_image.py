"""Learner and server see the same pixels: what is sent of any file decodes in vLLM's own reader as it does here."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from stage2_trainer.data.images import image_url, load_image, read_header
from tests.unit.trainer.data.odd_images import FILES, SIDES, turned

ImageMediaIO = pytest.importorskip("vllm.multimodal.media.image").ImageMediaIO


def decoded_by_vllm(url):
    data = base64.b64decode(url.partition(",")[2])
    return np.asarray(ImageMediaIO().load_bytes(data).media)


@pytest.mark.parametrize("name", FILES)
def test_sent_image_decodes_in_vllm_to_pixels_of_learner(tmp_path, name):
    image, options = FILES[name]
    image.save(tmp_path / name, **options)
    path = str(tmp_path / name)
    seen = np.asarray(load_image(path))
    assert seen.shape[2] == 3
    assert np.array_equal(decoded_by_vllm(image_url(path)), seen)
    as_it_is = f"data:image/x;base64,{base64.b64encode((tmp_path / name).read_bytes()).decode()}"
    assert np.array_equal(decoded_by_vllm(image_url(as_it_is)), seen)
    assert np.array_equal(np.asarray(load_image(image_url(path))), seen)


@pytest.mark.parametrize("name", ["plain.png", "plain.jpg", "grey.png", "plain.webp"])
def test_plain_image_file_is_sent_unchanged(tmp_path, name):
    image, options = FILES[name]
    image.save(tmp_path / name, **options)
    assert base64.b64decode(image_url(str(tmp_path / name)).partition(",")[2]) == (tmp_path / name).read_bytes()


def test_orientation_transparency_and_depth_are_applied_on_loading(tmp_path):
    image, options = turned(6)
    image.save(tmp_path / "turned.png", **options)
    assert load_image(str(tmp_path / "turned.png")).size == SIDES[::-1]
    clear = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    clear.putpixel((1, 0), (10, 20, 30, 255))
    clear.save(tmp_path / "clear.png")
    assert load_image(str(tmp_path / "clear.png")).getpixel((0, 0)) == (255, 255, 255)
    Image.fromarray(np.full((1, 1), 0x8042, dtype=np.uint16)).save(tmp_path / "deep.png")
    assert load_image(str(tmp_path / "deep.png")).getpixel((0, 0)) == (0x80,) * 3


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_fully_transparent_alpha_channel_is_ignored(tmp_path, mode):
    colours = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    image = Image.fromarray(colours).convert({"P": "L"}.get(mode, mode))
    if mode == "P":
        image = image.convert("P")
        image.info["transparency"] = bytes(256)
    else:
        image.putalpha(0)
    image.save(tmp_path / "hidden.png")
    assert np.array_equal(np.asarray(load_image(str(tmp_path / "hidden.png")))[..., 0], colours)
    sent = load_image(image_url(str(tmp_path / "hidden.png")))
    assert np.array_equal(np.asarray(sent)[..., 0], colours)


def test_exif_orientation_after_pixels_is_applied(tmp_path):
    """PNG allows it, and some programs write it there."""
    image, options = turned(6)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", **options)
    encoded = buffer.getvalue()
    start = encoded.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(encoded[start : start + 4], "big")
    moved = encoded[:start] + encoded[end:-12] + encoded[start:end] + encoded[-12:]
    (tmp_path / "behind.png").write_bytes(moved)
    path = str(tmp_path / "behind.png")
    assert load_image(path).size == read_header(path).size == SIDES[::-1]
    assert np.array_equal(decoded_by_vllm(image_url(path)), np.asarray(load_image(path)))
