"""An image may be a path or a data: URL; what cannot be read is named."""

from __future__ import annotations

import pytest
from PIL import Image

from stage2_trainer.data.images import image_url, load_image


@pytest.fixture
def png(tmp_path):
    path = tmp_path / "a.png"
    Image.new("RGBA", (4, 2), (255, 0, 0, 255)).save(path)
    return str(path)


def test_a_data_url_holds_the_same_pixels_as_its_file(png):
    url = image_url(png)
    assert url.startswith("data:image/png;base64,")
    assert load_image(url).tobytes() == load_image(png).tobytes() == load_image(f"file://{png}").tobytes()


def test_images_are_rgb(png):
    assert load_image(png).mode == "RGB"


def test_a_data_url_travels_unchanged():
    assert image_url("data:image/png;base64,AA==") == "data:image/png;base64,AA=="


@pytest.mark.parametrize("source", ["data:image/png;base64,%%", "data:image/png,AAAA", "data:image/png;base64,AAAA"])
def test_a_broken_data_url_is_named(source):
    with pytest.raises(ValueError, match="image data:image"):
        load_image(source)


def test_a_file_that_is_no_image_is_named(tmp_path):
    (tmp_path / "a.png").write_text("text")
    with pytest.raises(ValueError, match=r"a\.png"):
        load_image(str(tmp_path / "a.png"))
