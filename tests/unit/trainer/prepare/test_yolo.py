"""Data sets in YOLO's layout become records, each oddity by its rule."""

from pathlib import Path

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.data.records import load_records
from stage2_trainer.matching.ground_truth import holds_token
from stage2_trainer.prepare import annotations, record_writer, yolo
from stage2_trainer.prepare.yolo import read_yolo
from tests.unit.trainer.prepare.odd_sets import Imported, import_yolo
from tests.unit.trainer.prepare.odd_sets import yolo as written
from tiny_model.tokenizer import build_tokenizer

BOX = "0 0.5 0.25 0.2 0.1"  # centre and size
BINS = [400, 200, 600, 300]


def test_boxes_are_read_as_normalized_centre_width_height(tmp_path):
    found = import_yolo(tmp_path, written(tmp_path, {"a.png": f"{BOX}\n1 0.5 0.5 1 1\n"}), order="file")
    assert found.objects == [("cat", BINS), ("dog", [0, 0, 999, 999])]
    assert found.counts == {}
    (record,) = found.records
    assert (record["sample_id"], record["images"]) == ("images/train/a", ["../images/train/a.png"])
    assert (record["width"], record["height"]) == (100, 200)


def test_segments_become_polygons_or_boxes(tmp_path):
    data = written(tmp_path, {"a.png": "1 0.1 0.1 0.5 0.1 0.5 0.9\n"})
    assert import_yolo(tmp_path, data, geometry="poly").objects == [("dog", [100, 100, 500, 100, 500, 900])]
    (tmp_path / "out" / "x.jsonl").unlink()
    assert import_yolo(tmp_path, data).objects == [("dog", [100, 100, 500, 900])]


LABELS = {
    "a background": ("", [], {}),
    "no label file": (None, [], {yolo.BACKGROUND: 1}),
    "a line twice": (f"{BOX}\n{BOX}  \n", [("cat", BINS)], {yolo.REPEATED: 1}),
    "a class that there is not": (f"7 0.5 0.5 0.1 0.1\n{BOX}", [("cat", BINS)], {annotations.NO_CATEGORY: 1}),
    "a class with a fraction": (f"0.5 0.5 0.5 0.1 0.1\n{BOX}", [("cat", BINS)], {yolo.BROKEN_LINE: 1}),
    "a class written as 0.0": ("0.0 0.5 0.25 0.2 0.1", [("cat", BINS)], {}),
    "a confidence behind the box": (f"0 0.5 0.5 0.1 0.1 0.9\n{BOX}", [("cat", BINS)], {yolo.CONFIDENCE: 1}),
    "an angle behind the box": (f"0 0.5 0.5 0.1 0.1 45\n{BOX}", [("cat", BINS)], {yolo.CONFIDENCE: 1}),
    "a confidence and an angle": (f"0 0.5 0.5 0.1 0.1 0.9 45\n{BOX}", [("cat", BINS)], {yolo.CONFIDENCE: 1}),
    "three points": ("0 0.1 0.1 0.9 0.1 0.5 0.5", [("cat", [100, 100, 900, 500])], {yolo.THREE_POINTS: 1}),
    "four corners": (
        "0 0.5 0.1 0.9 0.3 0.5 0.5 0.1 0.3",
        [("cat", [100, 100, 900, 500])],
        {yolo.FOUR_POINTS: 1},
    ),
    "three numbers": (f"0 0.5 0.5 0.1\n{BOX}", [("cat", BINS)], {yolo.BROKEN_LINE: 1}),
    "words": (f"cat 0.5 0.5 0.1 0.1\n{BOX}", [("cat", BINS)], {yolo.BROKEN_LINE: 1}),
    "not a number": (f"0 nan 0.5 0.1 0.1\n{BOX}", [("cat", BINS)], {yolo.BROKEN_LINE: 1}),
    "pixels": (f"0 50 50 20 20\n{BOX}", [("cat", BINS)], {annotations.NOT_SHARES: 1}),
    "negative": (f"0 -0.5 0.5 0.1 0.1\n{BOX}", [("cat", BINS)], {annotations.NOT_SHARES: 1}),
    "rounded out of the image": (
        "0 -0.0009 0.25 0.2 0.1\n0 1.0009 0.25 0.2 0.1",
        [("cat", [0, 200, 99, 300]), ("cat", [901, 200, 999, 300])],
        {record_writer.CLIPPED: 2},
    ),
    "farther out than rounding": (
        f"0 -0.0011 0.25 0.2 0.1\n0 1.0011 0.25 0.2 0.1\n{BOX}",
        [("cat", BINS)],
        {annotations.NOT_SHARES: 2},
    ),
    "no area": (f"0 0.5 0.5 0 0.1\n{BOX}", [("cat", BINS)], {record_writer.NO_AREA: 1}),
    "a box that reaches out": ("0 0.05 0.25 0.2 0.1", [("cat", [0, 200, 150, 300])], {record_writer.CLIPPED: 1}),
}


@pytest.mark.parametrize("case", LABELS)
def test_odd_label_file_is_read_as_listed(tmp_path, case):
    labels, objects, counts = LABELS[case]
    found = import_yolo(tmp_path, written(tmp_path, {"a.png": labels, "b.png": BOX}))
    assert (found.objects, found.counts) == ([*objects, ("cat", BINS)], counts)
    assert len(found.records) == 2


def test_duplicate_class_names_and_sample_ids_are_counted(tmp_path):
    data = written(tmp_path, {"a.png": BOX}, images=["a.png", "a.bmp"], names=["cat", "dog", "cat"])
    found = import_yolo(tmp_path, data)
    assert len(found.records) == 2
    assert found.counts == {record_writer.SAME_ID: 1, annotations.SAME_NAME: 1}


def test_image_with_undecodable_label_file_is_left_out(tmp_path):
    found = import_yolo(tmp_path, written(tmp_path, {"a.png": b"\xff\xfe\0", "b.png": BOX}))
    assert [record["sample_id"] for record in found.records] == ["images/train/b"]
    assert found.counts == {yolo.BROKEN_LABELS: 1}


def test_labels_without_image_are_counted(tmp_path):
    found = import_yolo(tmp_path, written(tmp_path, {"a.png": BOX, "lost.png": BOX}, images=["a.png"]))
    assert (len(found.records), found.counts) == (1, {yolo.NO_IMAGE: 1})


def test_pose_label_keeps_box_and_counts_keypoints(tmp_path):
    data = written(tmp_path, {"a.png": f"{BOX} 0.1 0.1 2 0.2 0.2 2"}, kpt_shape=[2, 3])
    found = import_yolo(tmp_path, data)
    assert (found.objects, found.counts) == ([("cat", BINS)], {annotations.KEYPOINTS: 1})


@pytest.mark.parametrize("numbers", ["0.9", "0.1 0.1 2 0.2 0.2", "0.1 0.1 2 0.2 0.2 2 0.9"])
def test_wrong_number_of_keypoint_values_is_counted(tmp_path, numbers):
    data = written(tmp_path, {"a.png": f"{BOX} {numbers}\n{BOX}"}, kpt_shape=[2, 3])
    found = import_yolo(tmp_path, data)
    assert (found.objects, found.counts) == ([("cat", BINS)], {yolo.KEYPOINT_NUMBERS: 1})


@pytest.mark.parametrize("shape", [17, [17], ["a", "b"], [17, -3]])
def test_invalid_keypoint_shape_is_refused(tmp_path, shape):
    with pytest.raises(ConfigError, match=r"kpt_shape: .*numbers of points and of values"):
        import_yolo(tmp_path, written(tmp_path, {"a.png": f"{BOX} 0.1 0.1"}, kpt_shape=shape))


@pytest.mark.parametrize("train", ["../images/train", ["images/train"], "list.txt", "images"])
def test_split_may_be_folder_several_folders_or_image_list(tmp_path, train):
    data = written(tmp_path, {"a.png": BOX}, train=train, path=None)
    (tmp_path / "list.txt").write_text("./images/train/a.png\n")
    assert import_yolo(tmp_path, data).objects == [("cat", BINS)]


def test_dataset_may_be_given_as_folder_with_class_names_as_list(tmp_path):
    written(tmp_path, {"a.png": BOX}, names=["cat"], nc=1)
    assert import_yolo(tmp_path, tmp_path).objects == [("cat", BINS)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": None}, "names: must list the classes"),
        ({"names": {0: ""}}, r"names\.0: ''; must be a number in decimal digits"),
        ({"names": {"a": "b"}}, r"names\.a"),
        ({"names": {True: "a"}}, r"names\.true"),
        ({"names": {1.5: "a"}}, r"names\.1\.5"),
        ({"names": {-1: "a"}}, r"names\.-1"),
        ({"names": [["a", "b"]]}, r"names\.0: \['a', 'b'\]; must be a number in decimal digits"),
        ({"path": [10]}, r"path: \['10'\]; must be the path of a folder"),
        ({"train": 3}, "train: '3'; is not under"),
        ({"train": "images\\train"}, r"train: .*; is not under .*; write / for"),
        ({"train": {"a": "images/train"}}, "train: .*; must be the path of a folder or a list"),
        ({"nc": 3}, "nc: '3'; must be the number of names, 2"),
        ({"train": None, "val": "images/train"}, "--split: 'train'; .* has val"),
        ({"train": "lost"}, "is not under"),
        ({"train": "labels"}, "has no images"),
        ({"train": "images/train/a.png"}, "must be a folder, or a list"),
    ],
)
def test_invalid_data_yaml_is_refused_and_writes_nothing(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        import_yolo(tmp_path, written(tmp_path, {"a.png": BOX}, **changes))
    assert not (tmp_path / "out").exists()


WRITTEN = ["010", "1:30", "0x1F", "1e3", "2024-01-31", "no", "null", "~", "1_000", "=", "<<", ".inf", "!!int 7"]


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("form", ["names: [{}, dog]", "names:\n  0: {}\n  1: dog", "names:\n- {}\n- dog"])
def test_class_names_are_read_as_literal_text(tmp_path, name, form):
    data = written(tmp_path, {"a.png": BOX})
    data.write_text(f"nc: 2\ntrain: images/train\n{form.format(name)}\n")
    assert import_yolo(tmp_path, data).objects == [(name.removeprefix("!!int "), BINS)]


@pytest.mark.parametrize(
    "names",
    [
        "!!omap [0: cat]",
        "!!set {cat}",
        "!!pairs [0: cat]",
        "{010: cat}",
        "{0x1: cat}",
        "{0: }",
        "[!!seq [a]]",
        "{1:30: a}",
    ],
)
def test_invalid_class_names_are_refused(tmp_path, names):
    data = written(tmp_path, {"a.png": BOX})
    data.write_text(f"train: images/train\nnames: {names}\n")
    with pytest.raises(ConfigError, match="names"):
        import_yolo(tmp_path, data)


def test_yaml_merge_key_is_not_applied(tmp_path):
    data = written(tmp_path, {"a.png": BOX})
    data.write_text("base: &base {names: {0: cat}}\n<<: *base\ntrain: images/train\n")
    with pytest.raises(ConfigError, match="names: must list the classes"):
        import_yolo(tmp_path, data)


NESTED = b"names: " + b"[" * 3000 + b"]" * 3000
MULTIPLIED = b"a0: &a0 [x, x]\n" + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (n, n, n - 1, n - 1) for n in range(1, 40))


@pytest.mark.parametrize("content", [b"{", b"- 1", b"\xff", NESTED, MULTIPLIED, b"names: [a]\n---\nnames: [b]\n"])
def test_data_yaml_that_is_not_mapping_is_refused(tmp_path, content):
    (tmp_path / "data.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"data\.yaml: "):
        import_yolo(tmp_path, tmp_path)


def test_symlinked_folders_are_read_and_link_cycles_end(tmp_path):
    data = written(tmp_path / "set", {"a.png": BOX})
    there = written(tmp_path / "more", {"b.png": BOX, "c.png": None}, images=["b.png"]).parent
    for kind in ("images", "labels"):
        (tmp_path / "set" / kind / "train" / "linked").symlink_to(there / kind / "train")
        (tmp_path / "set" / kind / "train" / "circle").symlink_to(tmp_path / "set" / kind)
    (there / "labels" / "train" / "c.txt").write_text(BOX)
    found = import_yolo(tmp_path, data)
    assert [record["sample_id"] for record in found.records] == ["images/train/a", "images/train/linked/b"]
    assert found.counts == {yolo.NO_IMAGE: 1}
    assert len(found.objects) == 2


def test_output_file_created_during_import_is_not_overwritten(tmp_path):
    data, output = written(tmp_path / "set", {"a.png": BOX}), tmp_path / "out" / "x.jsonl"

    def slowly(tally):
        yield from read_yolo(data, "train", tally)
        output.write_text("mine")

    with pytest.raises(ConfigError, match=r"--output: .*must be a new file"):
        Imported(output, slowly)
    assert output.read_text() == "mine"
    assert [path.name for path in output.parent.iterdir()] == ["x.jsonl"]


def test_import_does_not_depend_on_working_directory(tmp_path, monkeypatch):
    data = written(tmp_path / "set", {"a.png": BOX}, path=None, train="train")
    data.rename(tmp_path / "set" / "images" / "data.yaml")
    monkeypatch.chdir(tmp_path / "set" / "images")
    found = import_yolo(tmp_path, Path("data.yaml"))
    assert (len(found.objects), found.counts) == (1, {})


@pytest.mark.parametrize("name", ["a<|coord_5|>b", "cat<|im_end|>", "<|image_pad|>"])
def test_object_with_special_token_in_name_is_left_out_and_counted(tmp_path, name):
    labels = {"a.png": "0 0.35 0.3 0.5 0.4\n1 0.5 0.5 0.5 0.5"}
    found = import_yolo(tmp_path, written(tmp_path, labels, names=[name, "dog"]))
    assert [desc for desc, _ in found.objects] == ["dog"]
    assert found.counts == {record_writer.TOKEN_IN_DESC: 1}
    assert len(load_records(found.output)[0].objects) == 1


def test_every_special_token_of_stock_vocabulary_is_recognised():
    tokenizer = build_tokenizer(7, plain=False)
    special = [one.content for one in tokenizer.added_tokens_decoder.values() if one.special]
    assert {"<|im_end|>", "<|image_pad|>"} <= {*special}
    assert all(holds_token(f"a{token}b") for token in special)


@pytest.mark.parametrize("name", ["a < b | c > d", "<|>", "<| |>", "<cat>", "a|b", "|coord_5|"])
def test_names_with_similar_characters_are_not_special_tokens(name):
    assert not holds_token(name)
