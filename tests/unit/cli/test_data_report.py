"""`stage2 data`: text, JSON and a page of pictures of a data file."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from stage2_api.errors import ConfigError
from stage2_cli.data import show_data
from stage2_cli.requests import DataRequest
from stage2_trainer.data.images import load_image
from stage2_trainer.matching import serialize_objects
from tests.unit.cli.test_light_start import HEAVY, stage2
from tests.unit.report.inspected import SCENE, TINY_MODEL, tiny_spelling, write_records
from tiny_model.tokenizer import build_tokenizer


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    return write_records(tmp_path, image=True)


def test_text_report_describes_data_file(scenes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show_data(DataRequest(scenes)) == 0
    shown = capsys.readouterr().out
    assert f"{scenes}: 2 records, 3 objects" in shown
    assert "coordinates, by record: no objects 1, coordinate tokens 1" in shown
    assert "geometry: bbox_2d 2, poly 1" in shown
    assert "small (below 32 x 32 pixels) 3, medium (below 96 x 96) 0, large (above) 0" in shown
    assert "--model DIR counts tokens" in shown
    assert "blue triangle" in shown
    assert "suspicious: an image that another record has, too: 1 (line 2, records.jsonl:2)" in shown


def test_json_report_has_same_figures(scenes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show_data(DataRequest(scenes, as_json=True)) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["records"], found["objects"], found["kinds"]) == (2, 3, {"bbox_2d": 2, "poly": 1})
    assert found["classes"] == {"red box": 1, "blue triangle": 1, "green ellipse": 1}
    assert found["answer_characters"]["most"] == len(serialize_objects(SCENE))
    assert found["suspicious"]["an image that another record has, too"]["count"] == 1


def test_token_counts_of_model_match_training(scenes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show_data(DataRequest(scenes, model=TINY_MODEL, as_json=True)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["answer_tokens"]["most"] == len(tiny_spelling().vocab.encode(serialize_objects(SCENE)))
    with pytest.raises(ConfigError, match="--model"):
        show_data(DataRequest(scenes, model=scenes.parent))


def test_tokenizer_without_coordinate_tokens_is_refused(scenes: Path, tmp_path: Path) -> None:
    build_tokenizer(7, plain=True).save_pretrained(tmp_path / "stock")
    with pytest.raises(ConfigError, match=r"--model: .*must have the coordinate tokens.*stage2 prepare"):
        show_data(DataRequest(scenes, model=tmp_path / "stock"))


def test_picture_page_draws_objects_where_they_are(scenes: Path, tmp_path: Path) -> None:
    assert show_data(DataRequest(scenes, pictures=tmp_path / "page.png")) == 0
    page = Image.open(tmp_path / "page.png").convert("RGB")
    colors = {color for _, color in page.getcolors(2**20) or ()}
    assert {(0xCF, 0x22, 0x2E), (0x09, 0x69, 0xDA), (0x1A, 0x7F, 0x37)} <= colors
    with pytest.raises(ConfigError, match=r"--pictures: .*must be a new file"):
        show_data(DataRequest(scenes, pictures=tmp_path / "page.png"))


def test_picture_page_of_odd_sized_images_stays_within_its_cells(tmp_path: Path) -> None:
    lines = []
    for number, size in enumerate([(7, 1000), (1000, 7), (300, 200), (20, 30), (500, 500)]):
        Image.new("RGB", size).save(tmp_path / f"{number}.png")
        name = "a very long description that reaches out of the image"
        one = {"desc": name, "bbox_2d": ["<|coord_900|>", "<|coord_0|>", "<|coord_999|>", "<|coord_999|>"]}
        lines.append({"images": [f"{number}.png"], "width": size[0], "height": size[1], "objects": [one]})
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert show_data(DataRequest(tmp_path / "x.jsonl", pictures=tmp_path / "page.png")) == 0
    width, height = load_image(str(tmp_path / "page.png")).size
    assert width <= 4 * 350
    assert height <= 2 * 430


def shelf(tmp_path: Path, **changes: Any) -> Path:
    """A file of eighty records whose three boxes stand in a row, listed by their exact tops."""
    boxes = [("c", [500, 100, 600, 300]), ("a", [10, 101, 110, 300]), ("ß", [250, 102, 350, 300])]
    line = {"images": ["a.png"], "width": 1000, "height": 500, "units": "bins", "metadata": {"town": "Köln"}}
    line |= {"objects": [{"bbox_2d": box, "desc": desc} for desc, box in boxes], **changes}
    (tmp_path / "x.jsonl").write_text(80 * (json.dumps(line, ensure_ascii=False) + "\n"), encoding="utf-8")
    return tmp_path / "x.jsonl"


def test_file_sorted_by_exact_tops_is_reported_and_resorted_in_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_data(DataRequest(shelf(tmp_path), ordered=tmp_path / "sorted.jsonl")) == 0
    shown = capsys.readouterr().out
    assert "order of the objects: by exact tops (100% of neighbours; 100% are ties or near ties)" in shown
    assert "advice: sort the objects in rows with `stage2 data --sorted`" in shown
    before, after = (json.loads((tmp_path / name).read_text().splitlines()[7]) for name in ("x.jsonl", "sorted.jsonl"))
    assert [one["desc"] for one in after["objects"]] == ["a", "ß", "c"]
    assert sorted(map(str, before["objects"])) == sorted(map(str, after["objects"]))
    assert {**before, "objects": None} == {**after, "objects": None}
    assert show_data(DataRequest(tmp_path / "sorted.jsonl", as_json=True)) == 0
    order = json.loads(capsys.readouterr().out)["order"]
    assert order == {"name": "in rows", "share": 1.0, "ambiguous": 0.0, "ambiguous_in_rows": 0.0}


def test_sorted_output_must_be_new_file_in_folder_of_data(tmp_path: Path) -> None:
    path = shelf(tmp_path)
    for place, words in ((tmp_path / "there" / "y.jsonl", "must be in the folder of .*x.jsonl"), (path, "new file")):
        with pytest.raises(ConfigError, match=f"--sorted: .*{words}"):
            show_data(DataRequest(path, ordered=place))
    assert show_data(DataRequest(shelf(tmp_path, units="feet"), ordered=tmp_path / "y.jsonl")) == 64
    assert [file.name for file in tmp_path.iterdir()] == ["x.jsonl"]


def test_picture_page_without_records_is_refused(tmp_path: Path) -> None:
    path = write_records(tmp_path)
    with pytest.raises(ConfigError, match="a page needs records"):
        show_data(DataRequest(path, pictures=tmp_path / "page.png"))


def test_numbers_without_units_are_reported_unless_units_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"images": ["a.png"], "width": 9, "height": 9, "objects": [{"desc": "a", "bbox_2d": [1, 2, 3, 4]}]}
    (tmp_path / "x.jsonl").write_text(json.dumps(line))
    assert show_data(DataRequest(tmp_path / "x.jsonl", pictures=tmp_path / "page.png")) == 64
    shown = capsys.readouterr()
    assert "0 records, 0 objects, 1 broken line" in shown.out
    assert "x.jsonl:1 objects[0].bbox_2d" in shown.err
    assert not (tmp_path / "page.png").exists()
    assert show_data(DataRequest(tmp_path / "x.jsonl", units="pixels")) == 0


def test_file_without_valid_records_prints_no_zero_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_text('{"images": ["a.png"], "width": 0, "height": 9, "objects": []}\n')
    assert show_data(DataRequest(tmp_path / "x.jsonl")) == 64
    assert capsys.readouterr().out == f"{tmp_path}/x.jsonl: 0 records, 0 objects, 1 broken line\n"


def test_file_of_another_tool_is_reported_without_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_text('{"filename": "a.png", "detection": {"instances": []}}\n' * 30)
    with pytest.raises(ConfigError, match="has the form of ODVG, of Grounding DINO"):
        show_data(DataRequest(tmp_path / "x.jsonl"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("desc", ["[/red] sign", "\x1b[31mred", "sign [old]"])
def test_descriptions_are_shown_literally(tmp_path: Path, capsys: pytest.CaptureFixture[str], desc: str) -> None:
    tokens = [f"<|coord_{k}|>" for k in (1, 2, 30, 40)]
    line = {"images": ["a.png"], "width": 9, "height": 9, "objects": [{"desc": desc, "bbox_2d": tokens}]}
    (tmp_path / "x.jsonl").write_text(json.dumps({**line, "sample_id": "9" * 5000}))
    assert show_data(DataRequest(tmp_path / "x.jsonl")) == 0
    assert (desc if desc.isprintable() else repr(desc)) in capsys.readouterr().out


def test_data_command_imports_nothing_heavy(scenes: Path) -> None:
    words = ("data", str(scenes), "--model", str(TINY_MODEL), "--pictures", "page.png")
    done, modules = stage2(scenes.parent, *words)
    assert done.returncode == 0, done.stderr
    assert HEAVY & modules == set()
