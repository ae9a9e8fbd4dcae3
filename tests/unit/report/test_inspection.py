"""An inspected sample: frozen keys, the labels of training, and answers that cannot control the terminal."""

import io
import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from stage2_report.inspection import (
    LABEL_STYLES,
    Inspection,
    answer_text,
    document,
    dropped_table,
    missed_table,
    show,
    supervision_table,
)
from stage2_report.picture import write_picture
from stage2_trainer.data.records import Record
from stage2_trainer.matching import (
    GroundTruth,
    GTObject,
    MatchOptions,
    build_target,
    segment_meta,
    serialize_objects,
    supervision,
)
from stage2_trainer.matching.masks import IGNORED
from tests.unit.report.inspected import (
    ANSWERS,
    COMPLETE,
    GARBAGE,
    GREEN,
    NEAR_RED,
    NOWHERE,
    RED,
    SCENE,
    TRUNCATED,
    target_of,
    tiny_spelling,
)

KEYS = [
    "prefix_ids", "prefix_text", "truncated", "objects", "ground_truth", "matches", "following",
    "gating_rejections", "false_negatives", "appended", "append_text", "y_train_ids",
    "y_train_text", "labels", "coord_targets",
]  # fmt: skip


def inspected(answer):
    return document(target_of(answer))


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_json_document_has_fixed_keys(answer):
    found = inspected(answer)
    assert list(found) == KEYS
    assert json.loads(json.dumps(found)) == found
    for one in found["objects"]:
        assert list(one) == ["key", "valid", "reason", "desc", "type", "bins", "token_positions"]
    assert all(list(one) == ["desc", "type", "bins"] for one in found["ground_truth"])
    assert all(list(one) == ["pred", "gt", "iou", "cost"] for one in [*found["matches"], *found["following"]])


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_training_text_is_prefix_plus_tail_and_valid_json(answer):
    found = inspected(answer)
    assert found["y_train_text"] == found["prefix_text"] + found["append_text"]
    assert found["y_train_ids"][: len(found["prefix_ids"])] == found["prefix_ids"]
    assert isinstance(json.loads(found["y_train_text"]), dict)
    assert len(found["labels"]) == len(found["y_train_ids"])


@pytest.mark.parametrize(
    "options",
    [{}, {"unmatched_objects": "penalised"}, {"unmatched_objects": "dropped", "missed_desc_weight": 1.5}],
    ids=["defaults", "penalised", "dropped"],
)
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_shown_labels_match_training_masks(answer, options):
    target = target_of(answer, **options)
    ids = (0, *target.y_train_ids)  # a prompt of one token
    meta = segment_meta(target, ids[:1], encoded_len=len(ids), end_of_turn_len=0)
    masks = supervision(meta, ids, tiny_spelling().vocab)
    assert dict(zip((masks.coord_positions - 1).tolist(), masks.coord_targets.tolist(), strict=True)) == (
        target.coord_targets
    )
    learnt = masks.labels[1:] != IGNORED
    for i, label in enumerate(target.labels):
        assert label == ("coord" if i in target.coord_targets else "penalised" if i in target.penalised_pos else
                         "ce" if learnt[i] else "none")  # fmt: skip


def test_answer_with_removed_objects_is_shown_as_trained():
    target = target_of(TRUNCATED, unmatched_objects="dropped")
    found = document(target)
    assert found["prefix_text"] + found["append_text"] == found["y_train_text"]
    assert [one["desc"] for one in json.loads(found["y_train_text"]).values()] == [one.desc for one in SCENE]
    assert found["prefix_text"] in answer_text(target).plain


@pytest.mark.parametrize(
    ("weight", "appended", "stays"), [(0.0, "object_8", "yes, unsupervised"), (1.0, "object_2", "no")]
)
def test_tables_show_new_keys_of_renumbered_answer(weight, appended, stays):
    broken = ', "object_7": {"desc": "odd box", "bbox_2d": []}}'
    target = target_of(serialize_objects([NEAR_RED])[:-1] + broken, matched_text_weight=weight)
    assert cells(missed_table(target), "appended as")[0] == appended
    assert f'"{appended}": ' in target.append_text
    assert cells(dropped_table(target), "stays in the prefix") == [stays]
    assert ("object_7" in target.prefix_text) == (stays != "no")


def cells(table, header):
    return next(list(column.cells) for column in table.columns if column.header == header)


def test_boxes_and_polygons_are_typed_by_record_key():
    found = inspected(COMPLETE)
    assert [one["type"] for one in found["objects"]] == ["bbox_2d", "poly"]
    assert [one["type"] for one in found["ground_truth"]] == ["bbox_2d", "poly", "bbox_2d"]
    assert [(one["pred"], one["gt"]) for one in found["matches"]] == [("object_1", 0), ("object_2", 1)]
    assert found["false_negatives"] == [2]


def test_matched_coordinate_targets_true_bin_at_its_own_token():
    found = inspected(COMPLETE)
    positions = found["objects"][0]["token_positions"]
    assert [found["coord_targets"][str(i)] for i in positions] == list(SCENE[0].bins)
    assert {found["labels"][i] for i in positions} == {"coord"}


def test_coordinate_targets_match_coordinate_labels_in_order():
    found = inspected(COMPLETE)
    positions = list(map(int, found["coord_targets"]))
    assert positions == sorted(positions)
    assert positions == [i for i, label in enumerate(found["labels"]) if label == "coord"]


def test_truncated_answer_keeps_closed_objects_and_reports_dropped_ones():
    found = inspected(TRUNCATED)
    assert found["truncated"]
    assert [one["reason"] for one in found["objects"]] == [None, None, "wrong_number_of_coordinates", "cut_off"]
    assert found["append_text"].startswith(', "object_4": {"desc": "blue triangle"')
    unmatched, half = found["objects"][1], found["objects"][3]
    assert {found["labels"][i] for i in unmatched["token_positions"]} == {"none"}
    assert (half["type"], half["bins"], half["token_positions"]) == (None, [], [])


@pytest.mark.parametrize("name", ["garbage", "empty"])
def test_answer_without_json_is_trained_on_whole_scene(name):
    found = inspected(ANSWERS[name])
    assert found["prefix_text"] == "{"
    assert found["objects"] == found["matches"] == []
    assert found["false_negatives"] == [0, 1, 2]
    assert set(found["labels"]) == {"none", "ce", "coord"}


def inspection(answer):
    return Inspection("scene", "a test", target_of(answer), tiny_spelling().vocab, None)


def styled(text, style):
    """The parts of a rich text with this style."""
    return [text.plain[span.start : span.end] for span in text.spans if span.style == style]


def test_object_colour_shows_whether_it_matched():
    text = answer_text(target_of(TRUNCATED))
    assert [part[:10] for part in styled(text, "green")] == ['"object_1"']
    assert [part[:10] for part in styled(text, "yellow")] == ['"object_2"']
    assert [part[:10] for part in styled(text, "red")] == ['"object_3"', '"object_4"']
    assert styled(text, "dim strike") == [', "object_4": {"desc": "gre']
    assert "".join(styled(text, "bold cyan")) == target_of(TRUNCATED).append_text


def test_answer_without_json_is_struck_out():
    text = answer_text(target_of(GARBAGE))
    assert styled(text, "dim strike") == [GARBAGE]
    assert text.plain.startswith(GARBAGE + '\n{"object_1": ')


def printed(table):
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_each_run_of_equal_labels_is_table_row(answer):
    one = inspection(answer)
    table = supervision_table(one)
    labels = [label for label, _ in itertools.groupby(one.target.labels)]
    assert list(table.columns[1].cells) == labels
    assert [row.style for row in table.rows] == [LABEL_STYLES[label] for label in labels]
    shown = "".join(cell.plain for cell in table.columns[2].cells)
    assert re.sub("→[0-9]+", "", shown) == one.target.y_train_text


def test_coordinate_with_different_target_is_marked():
    assert "<|coord_110|>→100" in printed(supervision_table(inspection(TRUNCATED)))


def test_control_characters_are_shown_as_symbols():
    one = inspection('{"object_1": {"desc": "\x1b[2J\x07", "bbox_2d": []}')
    for text in (answer_text(one.target).plain, printed(supervision_table(one))):
        assert "␛[2J␇" in text
        assert "\x1b" not in text


FAR = GTObject("owl", "bbox", (700, 100, 900, 300))


def following(answered, truth, **options):
    vocab = tiny_spelling().vocab
    ids = vocab.encode(serialize_objects(answered))
    return build_target(ids, GroundTruth(tuple(truth)), vocab, MatchOptions(assignment="dynamic", **options))


def test_box_that_follows_true_object_is_not_match():
    target = following([FAR, RED], [RED, GREEN])
    found = document(target)
    assert [(one["pred"], one["gt"]) for one in found["matches"]] == [("object_2", 0)]
    assert found["following"] == [{"pred": "object_1", "gt": 1, "iou": 0.0, "cost": 1.0}]
    assert (found["false_negatives"], found["appended"]) == ([1], [])
    text = answer_text(target)
    assert [part[:10] for part in styled(text, "blue")] == ['"object_1"']
    assert [part[:10] for part in styled(text, "green")] == ['"object_2"']


def test_missed_objects_followed_by_box_are_still_shown_as_missed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    show(Inspection("scene", "a test", following([FAR, RED], [RED, GREEN]), tiny_spelling().vocab, None))
    lines = [" ".join(re.sub("[│┃]", " ", line).split()) for line in capsys.readouterr().out.splitlines()]
    assert any(
        line.startswith("answer: closed; 2 objects: 1 matched, 1 unmatched, 1 of them following") for line in lines
    )
    assert "ground truth: 2 objects, 1 missed, 1 of them followed" in lines
    assert "Boxes that follow a true one, and match nothing" in lines
    assert "object_1 1 0.0000 1.0000 owl green ellipse" in lines
    assert "object_2 0 1.0000 0.0000 red box red box" in lines
    assert "1 no, a box follows it bbox_2d 50 600 250 800 green ellipse" in lines


def test_missed_objects_are_listed_under_appended_keys():
    """Of a rewritten answer, too: its keys count from 1."""
    answered = [FAR, NOWHERE, replace(NOWHERE, desc="x")]
    target = build_target(
        tiny_spelling().vocab.encode(serialize_objects(answered)),
        GroundTruth((RED, GREEN)),
        tiny_spelling().vocab,
        MatchOptions(unmatched_objects="dropped"),
    )
    assert (
        list(missed_table(target).columns[1].cells) == list(json.loads(target.y_train_text)) == ["object_1", "object_2"]
    )


def colours_of(path):
    picture = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    return {f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in np.unique(picture, axis=0)}


@pytest.mark.parametrize(
    ("answered", "truth", "there", "absent"),
    [
        ([FAR], [RED], {"#8250df", "#bc4c00"}, {"#0969da", "#1a7f37", "#cf222e"}),
        ([RED], [RED], {"#0969da", "#1a7f37"}, {"#8250df", "#bc4c00", "#cf222e"}),
        ([RED, FAR], [RED], {"#0969da", "#1a7f37", "#cf222e"}, {"#8250df", "#bc4c00"}),
    ],
    ids=["follows", "found", "found, and one too many"],
)
def test_picture_colours_objects_by_match_result(answered, truth, there, absent, tmp_path):
    Image.new("RGB", (96, 96), "#dddddd").save(tmp_path / "scene.png")
    record = Record(0, "scene", (str(tmp_path / "scene.png"),), 96, 96, tuple(truth))
    write_picture(record, following(answered, truth), tmp_path / "out.png", answered=True)
    colours = colours_of(tmp_path / "out.png")
    assert (there - colours, absent & colours) == (set(), set())
