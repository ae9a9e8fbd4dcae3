"""`stage2 import`: the summary of what it wrote, left out and changed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from stage2_cli.data import show_data
from stage2_trainer.prepare import record_writer, voc, yolo
from tests.unit.trainer.prepare import odd_sets
from tests.unit.trainer.prepare.odd_sets import voc_object


def stage2(*words: object) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "stage2"), "import", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_of_yolo(tmp_path: Path) -> None:
    labels = {"a.png": "0 0.5 0.25 0.2 0.1\n1 0.5 0.5 0.1 0.1\n0 1 2", "b.png": None, "c.png": "1 0.5 0.5 0.1 0.1"}
    data, output = odd_sets.yolo(tmp_path, labels), tmp_path / "x.jsonl"
    done = stage2("yolo", data, "--output", output, "--classes", "cat,horse", "--limit", 2)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"{output}: 2 records, 1 object",
        f"  left out: 1 object: {yolo.BROKEN_LINE} (images/train/a: 0 1 2)",
        f"  noted 1 time: {yolo.BACKGROUND} (images/train/b)",
        f"  noted 1 time: {record_writer.UNSEEN_CLASS} (horse)",
    ]
    assert [len(json.loads(line)["objects"]) for line in output.read_text().splitlines()] == [1, 0]


@pytest.mark.parametrize("classes", ["", " , "])
def test_classes_that_name_none_are_refused(tmp_path: Path, classes: str) -> None:
    """They kept all."""
    done = stage2("yolo", tmp_path, "--output", tmp_path / "x.jsonl", "--classes", classes)
    assert (done.returncode, "must name a category" in done.stderr) == (64, True)


def test_names_of_the_data_leave_the_terminal_alone(tmp_path: Path) -> None:
    source, output = odd_sets.yolo(tmp_path, {"a.png": "0 1 \x1b[31mred"}), tmp_path / "x.jsonl"
    done = stage2("yolo", source, "--output", output)
    assert (done.returncode, "\x1b" in done.stdout) == (0, False)
    assert "0 1 \\x1b[31mred" in done.stdout


def test_names_stand_there_letter_by_letter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rich makes a picture of `:cat:`, and takes `[bold]` away."""
    data = odd_sets.yolo(tmp_path / ":cat: [bold]", {"a.png": "9 0.5 0.5 0.2 0.2 :dog: [red]"})
    output = tmp_path / ":bird: [i]" / "x.jsonl"
    output_text = stage2("yolo", data, "--output", output).stdout
    assert output_text.startswith(f"{output}: 1 record, 0 objects")
    assert ":dog: [red]" in output_text
    show_data(output)
    assert f"{output}: 1 record, 0 objects" in capsys.readouterr().out


def test_of_voc(tmp_path: Path) -> None:
    objects = voc_object("cat", (11, 21, 60, 100)) + voc_object("dog", (1, 1, 9, 9), difficult=1)
    source, output = odd_sets.voc(tmp_path / "voc", {"a": objects}), tmp_path / "x.jsonl"
    done = stage2("voc", source, "--output", output, "--geometry", "poly")
    assert f"left out: 1 object: {voc.DIFFICULT} (a dog)" in done.stdout
    (record,) = map(json.loads, output.read_text().splitlines())
    assert [len(one["poly"]) for one in record["objects"]] == [8]
    output.unlink()
    kept = stage2("voc", source, "--output", output, "--difficult", "--order", "file")
    assert "1 record, 2 objects" in kept.stdout


def test_an_import_that_keeps_nothing_says_where_it_looked(tmp_path: Path) -> None:
    odd_sets.picture(tmp_path / "images" / "train" / "000017.png")
    image = {"id": 17, "file_name": "000017.png", "width": 100, "height": 200}
    document = {"images": [image], "annotations": [], "categories": [{"id": 1, "name": "cat"}]}
    (tmp_path / "x.json").write_text(json.dumps(document))
    output = tmp_path / "out.jsonl"
    done = stage2("coco", "--annotations", tmp_path / "x.json", "--images", tmp_path / "images", "--output", output)
    assert (done.returncode, output.exists()) == (65, False)
    assert f"looked for {tmp_path}/images/000017.png; there is {tmp_path}/images/train/000017.png" in done.stderr


def test_images_of_too_many_pixels_are_left_out_in_the_words_of_the_rule(tmp_path: Path) -> None:
    objects = voc_object("dog", (11, 21, 50, 100))
    source, output = odd_sets.voc(tmp_path / "voc", {"a": objects, "b": objects}), tmp_path / "x.jsonl"
    Image.new("1", (10_000, 10_000)).save(source / "JPEGImages" / "a.jpg", format="PNG")
    done = stage2("voc", source, "--output", output)
    assert (done.returncode, done.stderr) == (0, ""), "Pillow warns in words of its own"
    assert done.stdout.splitlines() == [
        f"{output}: 1 record, 1 object",
        f"  left out: 1 image: {record_writer.UNREADABLE} (a)",
    ]


def test_a_data_file_that_is_there_is_not_touched(tmp_path: Path) -> None:
    data, output = odd_sets.yolo(tmp_path, {"a.png": ""}), tmp_path / "x.jsonl"
    output.write_text("mine")
    done = stage2("yolo", data, "--output", output)
    assert done.returncode == 64
    assert "--output" in done.stderr
    assert output.read_text() == "mine"
