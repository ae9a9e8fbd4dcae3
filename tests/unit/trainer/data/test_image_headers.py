"""Sizes of images come from their headers, as the images are shown, and records with another size are reported."""

import base64
import io
import json

import pytest
from PIL import Image

from stage2_api.errors import ConfigError
from stage2_trainer.data import run_records
from stage2_trainer.data.images import ImageError, load_image, read_header
from stage2_trainer.data.messages import chat_messages, record_fault
from stage2_trainer.data.records import Record, load_records
from stage2_trainer.data.run_records import LOOKED_AT, other_size, size_fault, size_problems, spread

TURNED = 6


def exif(number):
    found = Image.Exif()
    found[274] = number
    return found


def saved(**options):
    encoded = io.BytesIO()
    Image.new("RGB", (40, 20)).save(encoded, **options)
    return encoded.getvalue()


IMAGES = {
    "png": (saved(format="PNG"), (40, 20)),
    "jpeg": (saved(format="JPEG"), (40, 20)),
    "turned jpeg": (saved(format="JPEG", exif=exif(TURNED)), (20, 40)),
    "mirrored jpeg": (saved(format="JPEG", exif=exif(2)), (40, 20)),
    "turned png": (saved(format="PNG", exif=exif(TURNED)), (20, 40)),
    "turned webp": (saved(format="WEBP", exif=exif(TURNED)), (20, 40)),
    "an orientation that there is not": (saved(format="JPEG", exif=exif(9)), (40, 20)),
    "gif": (saved(format="GIF"), (40, 20)),
}


@pytest.mark.parametrize("name", IMAGES)
def test_header_size_equals_size_of_displayed_image(tmp_path, name):
    encoded, size = IMAGES[name]
    (tmp_path / "x").write_bytes(encoded)
    url = f"data:image/png;base64,{base64.b64encode(encoded).decode()}"
    assert read_header(str(tmp_path / "x")).size == size
    assert read_header(f"file://{tmp_path / 'x'}").size == size
    assert read_header(url).size == size
    assert load_image(url).size == size


def test_reading_header_does_not_decode_pixels(tmp_path):
    cut = saved(format="PNG")
    (tmp_path / "x.png").write_bytes(cut[: cut.index(b"IDAT") + 8])
    assert read_header(str(tmp_path / "x.png")).size == (40, 20)
    with pytest.raises(ImageError):
        load_image(str(tmp_path / "x.png"))


@pytest.mark.parametrize("content", [b"", b"no image", saved(format="PNG")[:20], None])
def test_file_without_image_header_is_refused_with_its_name(tmp_path, content):
    if content is not None:
        (tmp_path / "x.png").write_bytes(content)
    with pytest.raises(ImageError, match=r"x\.png: cannot be read"):
        read_header(str(tmp_path / "x.png"))


def record(*images, size=(40, 20)):
    return Record(0, "one", tuple(map(str, images)), *size)


def test_record_size_is_compared_with_displayed_image(tmp_path):
    Image.new("RGB", (40, 20)).save(tmp_path / "a.jpg", exif=exif(TURNED))
    Image.new("RGB", (40, 20)).save(tmp_path / "b.jpg")
    a, b, lost = (tmp_path / name for name in ("a.jpg", "b.jpg", "lost.jpg"))
    assert size_fault(record(a, size=(20, 40))) is None
    assert other_size(record(a)) == (20, 40)
    assert size_fault(record(b)) is None
    assert size_fault(record(a, b)) is None, "of several images one has the size"
    assert size_fault(record(lost)) is None, "it is missing, which others say"
    assert size_fault(record(a, size=(0, 0))) is None, "a GRPO run reads no size"


def test_record_with_wrong_image_size_is_refused_for_training(tmp_path):
    Image.new("RGB", (40, 20)).save(tmp_path / "a.png")
    with pytest.raises(ImageError, match=r"a\.png: 40x20 as it is shown, where its record says 20x40"):
        chat_messages(record(tmp_path / "a.png", size=(20, 40)), "List.")
    assert "its record says 20x40" in str(record_fault(record(tmp_path / "a.png", size=(20, 40))))
    assert record_fault(record(tmp_path / "a.png")) is None
    assert chat_messages(record(tmp_path / "a.png"), "List.")


def write_records(folder, count, wrong):
    """Write records of one image; those at `wrong` say another size. A blank line stands first."""
    Image.new("RGB", (40, 20)).save(folder / "a.png")
    sizes = [(41 if number in wrong else 40, 20) for number in range(count)]
    written = [{"images": ["a.png"], "width": width, "height": height, "objects": []} for width, height in sizes]
    (folder / "x.jsonl").write_text("\n" + "\n".join(map(json.dumps, written)))
    return folder / "x.jsonl"


def test_wrong_image_sizes_are_reported_by_line_at_start_of_run(tmp_path):
    path = write_records(tmp_path, 5, wrong={1, 4})
    problems = size_problems(path, load_records(path))
    assert [one.path for one in problems] == [f"{path}:{number} width, height" for number in (3, 6)]
    assert all("its image has 40x20 as it is shown" in one.rule and one.way_out for one in problems)
    with pytest.raises(ConfigError, match="41x20"):
        raise ConfigError(problems)


def test_number_of_images_opened_at_start_of_run_is_bounded(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(run_records, "other_size", lambda one: opened.append(one.index))
    records = [record(tmp_path / "a.png")] * (LOOKED_AT * 5 + 3)
    assert size_problems(tmp_path / "x.jsonl", records) == []
    assert 0.8 * LOOKED_AT < len(opened) <= LOOKED_AT


@pytest.mark.parametrize(("count", "most"), [(0, 3), (1, 3), (3, 3), (4, 3), (10, 3), (1000, 7)])
def test_spread_sample_covers_whole_range(count, most):
    found = spread(range(count), most)
    assert len(found) <= most
    assert len(set(found)) == len(found)
    assert len(found) >= min(count, most) / 2
    assert not count or found[-1] >= (count - 1) / 2
