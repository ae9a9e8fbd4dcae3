"""An image may be a path or a data: URL; what cannot be read is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from stage2_trainer.data import images
from stage2_trainer.data.images import ImageError, blank_image, image_url, load_image, read_header


@pytest.fixture
def png(tmp_path):
    path = tmp_path / "a.png"
    Image.new("RGBA", (4, 2), (255, 0, 0, 255)).save(path)
    return str(path)


def test_data_url_holds_same_pixels_as_its_file(png):
    url = image_url(png)
    assert url.startswith("data:image/png;base64,")
    assert load_image(url).tobytes() == load_image(png).tobytes() == load_image(f"file://{png}").tobytes()


def test_loaded_image_is_rgb(png):
    assert load_image(png).mode == "RGB"


def test_data_url_is_sent_unchanged():
    assert image_url(blank_image()) == blank_image()


@pytest.mark.parametrize("source", ["data:image/png;base64,%%", "data:image/png,AAAA", "data:image/png;base64,AAAA"])
def test_broken_data_url_is_refused_with_its_beginning(source):
    with pytest.raises(ValueError, match="image data:image"):
        load_image(source)


def test_missing_image_is_refused_with_its_name(tmp_path):
    with pytest.raises(ImageError, match=r"image .*gone\.png: cannot be read \(No such file"):
        image_url(str(tmp_path / "gone.png"))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_decompression_bomb_is_refused(tmp_path):
    path = tmp_path / "bomb.png"
    Image.new("1", (10_000, 10_000)).save(path)
    assert path.stat().st_size < 20_000
    for use in (load_image, image_url, read_header):
        with pytest.raises(
            ImageError, match=r"bomb\.png: cannot be read \(it has more than 90,000,000 pixels: 10000 x"
        ):
            use(str(path))


@pytest.mark.parametrize("size", [(201, 1), (1, 201), (200, 1), (401, 2), (400, 2)])
def test_image_with_extreme_aspect_ratio_is_refused_as_by_model_processor(tmp_path, size):
    path = tmp_path / "thin.png"
    Image.new("L", size).save(path)
    try:
        smart_resize(size[1], size[0])
    except ValueError:
        for use in (load_image, image_url, read_header):
            with pytest.raises(ImageError, match=r"thin\.png: cannot be read \(one side is more than 200 times"):
                use(str(path))
    else:
        assert load_image(str(path)).size == size


def test_image_file_above_size_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "MOST_BYTES", 1 << 20)
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ImageError, match=r"a\.png: the file is larger than 1048576 bytes"):
        load_image(str(tmp_path / "a.png"))


@pytest.mark.parametrize("use", [load_image, image_url, read_header])
def test_fifo_device_or_folder_is_refused_as_image(tmp_path, use):
    os.mkfifo(tmp_path / "a.png")
    for path in (tmp_path / "a.png", Path("/dev/zero"), tmp_path):
        with pytest.raises(ImageError, match="Not a regular file"):
            use(str(path))


def test_error_shortens_long_data_url():
    with pytest.raises(ImageError) as caught:
        load_image("data:image/png;base64," + "A" * 100_000)
    assert len(str(caught.value)) < 250
