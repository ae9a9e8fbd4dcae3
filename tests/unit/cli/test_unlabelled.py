"""`stage2 data --unlabelled-by MODEL`: the share of objects without a label, as a sentence, JSON and a page."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from stage2_api.errors import ConfigError
from stage2_cli.data import check_imported, show_data
from stage2_cli.requests import DataRequest
from stage2_trainer.infer.model import Model
from tests.support.http_server import answering
from tests.unit.report.inspected import TINY_MODEL

CAT, DOG = ("cat", (100, 100, 400, 400)), ("dog", (600, 100, 900, 400))


def written(*objects: tuple[str, tuple[int, ...]]) -> dict[str, Any]:
    entries = [{"desc": desc, "bbox_2d": [f"<|coord_{one}|>" for one in box]} for desc, box in objects]
    return {f"object_{number}": one for number, one in enumerate(entries, 1)}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two images of 100 x 50 pixels, each with a label on the cat alone."""
    path = tmp_path / "train.jsonl"
    for name in ("a", "b"):
        Image.new("RGB", (100, 50), "white").save(tmp_path / f"{name}.png")
    records = [
        {"images": [f"{name}.png"], "objects": [*written(CAT).values()], "width": 100, "height": 50} for name in "ab"
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return path


def server(*objects: tuple[str, tuple[int, ...]]):
    """A server that answers each request with these objects, as often as is asked."""
    asked: list[dict[str, Any]] = []

    def reply(path: str, body: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "mine"}]}
        asked.append(body)
        choice = {"message": {"content": json.dumps(written(*objects))}, "finish_reason": "stop"}
        return 200, {"choices": [choice] * body["n"]}

    return answering(reply), asked


def test_boxes_without_label_are_listed_counted_and_drawn(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serving, asked = server(CAT, DOG)
    with serving as served:
        assert show_data(DataRequest(data, unlabelled_by=served.url, pictures=tmp_path / "page.png")) == 0
        told = capsys.readouterr().out
        assert show_data(DataRequest(data, unlabelled_by=served.url, as_json=True)) == 0
    assert "objects without a label: 50% [50%, 50%] (2 images, 2 of 4 sampled answers agree on 2 of 2 labels" in told
    assert json.loads(capsys.readouterr().out)["unlabelled"] == {
        "images": 2, "labels": 2, "labels_found": 2, "boxes_without_label": 2, "share": 0.5, "interval": [0.5, 0.5],
    }  # fmt: skip
    assert {(one["n"], one["temperature"]) for one in asked} == {(4, 1.0)}
    page = Image.open(tmp_path / "page.png").convert("RGB")
    assert (207, 34, 46) in {color for _, color in page.getcolors(1 << 20) or ()}, "the box without a label is red"


def test_boxes_without_label_become_labels_in_reading_order(data: Path, tmp_path: Path) -> None:
    bird = ("bird", (20, 100, 90, 400))
    serving, _ = server(DOG, CAT, bird)
    with serving as served:
        assert show_data(DataRequest(data, unlabelled_by=served.url, add_labels=tmp_path / "labelled.jsonl")) == 0
    before, after = ([json.loads(line) for line in path.open()] for path in (data, tmp_path / "labelled.jsonl"))
    assert [one["objects"] for one in after] == [[*written(bird, CAT, DOG).values()]] * 2
    assert [{**one, "objects": []} for one in after] == [{**one, "objects": []} for one in before]


def test_added_labels_use_units_of_record(data: Path, tmp_path: Path) -> None:
    label = {"desc": "cat", "bbox_2d": [10, 5, 40, 20]}
    record = {"images": ["a.png"], "objects": [label], "units": "pixels", "width": 100, "height": 50}
    data.write_text(json.dumps(record) + "\n", encoding="utf-8")
    serving, _ = server(CAT, DOG)
    with serving as served:
        assert show_data(DataRequest(data, unlabelled_by=served.url, add_labels=tmp_path / "labelled.jsonl")) == 0
    (_, dog) = json.loads((tmp_path / "labelled.jsonl").read_text())["objects"]
    assert dog == {"desc": "dog", "bbox_2d": [60, 5, 90, 20]}
    assert show_data(DataRequest(tmp_path / "labelled.jsonl")) == 0


def test_boxes_invalid_in_data_file_are_not_added(data: Path, tmp_path: Path) -> None:
    token = ("a <|coord_5|>", (20, 500, 90, 800))
    serving, _ = server(CAT, DOG, token)
    with serving as served:
        assert show_data(DataRequest(data, unlabelled_by=served.url, add_labels=tmp_path / "labelled.jsonl")) == 0
    assert all(
        [one["desc"] for one in json.loads(line)["objects"]] == ["cat", "dog"]
        for line in (tmp_path / "labelled.jsonl").open()
    )
    assert show_data(DataRequest(tmp_path / "labelled.jsonl")) == 0


def test_added_labels_are_refused_for_annotations(tmp_path: Path) -> None:
    coco = {"images": [], "annotations": [], "categories": []}
    (tmp_path / "x.json").write_text(json.dumps(coco), encoding="utf-8")
    with pytest.raises(ConfigError, match="run `stage2 import` first"):
        check_imported(DataRequest(tmp_path / "x.json", add_labels=tmp_path / "labelled.jsonl"))


def test_added_labels_keep_units_and_order_of_other_records(data: Path, tmp_path: Path) -> None:
    labels = [{"desc": "dog", "bbox_2d": [60, 5, 90, 20]}, {"desc": "cat", "bbox_2d": [10, 5, 40, 20]}]
    record = {"images": ["a.png"], "objects": labels, "units": "pixels", "width": 100, "height": 50}
    data.write_text(json.dumps(record) + "\n", encoding="utf-8")
    serving, _ = server(CAT, DOG)
    with serving as served:
        assert show_data(DataRequest(data, unlabelled_by=served.url, add_labels=tmp_path / "labelled.jsonl")) == 0
    assert json.loads((tmp_path / "labelled.jsonl").read_text()) == record


def test_added_labels_need_a_model_and_a_new_file_beside_the_data(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--add-labels: .*add --unlabelled-by MODEL"):
        show_data(DataRequest(data, add_labels=tmp_path / "labelled.jsonl"))
    with pytest.raises(ConfigError, match=r"--add-labels: .*must be a new file"):
        show_data(DataRequest(data, unlabelled_by="m", add_labels=data))
    with pytest.raises(ConfigError, match=r"--add-labels: .*must be in the folder"):
        show_data(DataRequest(data, unlabelled_by="m", add_labels=tmp_path / "other" / "labelled.jsonl"))


def test_share_of_unlabelled_objects_is_not_estimated_if_model_finds_no_label(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serving, _ = server(DOG)
    with serving as served:
        show_data(DataRequest(data, unlabelled_by=served.url))
    assert (
        "objects without a label: unknown (2 images, 2 of 4 sampled answers agree on no label; "
        "0 of 8 answers have no box: `stage2 infer --prompt` shows whether the prompt is right)"
    ) in capsys.readouterr().out


def test_answers_without_box_are_counted_if_model_finds_no_label(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serving, _ = server()
    with serving as served:
        show_data(DataRequest(data, unlabelled_by=served.url))
    assert "8 of 8 answers have no box" in capsys.readouterr().out


def test_file_without_readable_image_is_refused(data: Path) -> None:
    for image in data.parent.glob("*.png"):
        image.write_bytes(image.read_bytes()[:60])
    serving, _ = server(CAT)
    with serving as served, pytest.raises(ConfigError, match=r"FILE: .*no record whose image can be read"):
        show_data(DataRequest(data, unlabelled_by=served.url))


def test_sampled_answers_differ_from_each_other_and_are_reproducible(tmp_path: Path) -> None:
    Image.new("RGB", (96, 96), "white").save(tmp_path / "a.png")
    model = Model(TINY_MODEL, max_new_tokens=24)
    texts = [[one.text for one in model.samples(tmp_path / "a.png", 4)] for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
