"""A file of another tool is named by its form, once, with what to do; a record of ours keeps its own messages."""

import json

import pytest
from PIL import Image

from stage2_api.errors import ConfigError
from stage2_trainer.data import record_forms
from stage2_trainer.data.profile import profile, survey
from stage2_trainer.data.records import AS_DECLARED, RecordRules, load_record, load_records

BOX = {"desc": "cat", "bbox_2d": [1, 2, 3, 4]}
OURS = {"images": ["a.png"], "width": 10, "height": 10, "units": "pixels", "objects": [BOX]}
MESSAGES = [{"role": "user", "content": "<image>find"}, {"role": "assistant", "content": "<ref-object><bbox>"}]
COCO = {"images": [{"id": 1, "file_name": "a.png"}], "annotations": [], "categories": []}
OTHERS = {
    "ms-swift": (
        {"messages": MESSAGES, "images": ["a.png"], "objects": {"ref": ["a"], "bbox": [[1, 2, 3, 4]]}},
        "chat messages, as ms-swift, TRL and OpenAI write them",
    ),
    "ms-swift with sizes": (
        {**OURS, "messages": MESSAGES, "objects": {"ref": ["a"], "bbox": [[1, 2, 3, 4]]}},
        "chat messages",
    ),
    "messages alone": ({"messages": MESSAGES}, "chat messages"),
    "Qwen": ({"image": "a.png", "conversations": [{"from": "human", "value": "<image>"}]}, "Qwen-VL's and LLaVA's"),
    "detection": ({"filename": "a.png", "height": 1, "width": 1, "detection": {"instances": []}}, "ODVG"),
    "grounding": ({"filename": "a.png", "height": 1, "width": 1, "grounding": {"caption": ""}}, "ODVG"),
    "COCO": (COCO, "COCO's annotations"),
    "an annotation of COCO": ({"id": 1, "image_id": 1, "bbox": [1, 2, 3, 4]}, "COCO's annotations, one a line"),
    "a result of COCO": ({"image_id": 1, "bbox": [1, 2, 3, 4], "score": 0.5}, "COCO's results"),
    "an image folder": ({"file_name": "a.png", "objects": {"bbox": [], "categories": []}}, "metadata.jsonl"),
    "PaliGemma": ({"image": "a.png", "prefix": "detect cat", "suffix": "<loc0001> cat"}, "PaliGemma"),
    "LabelMe": ({"shapes": [], "imagePath": "a.png", "imageHeight": 1}, "LabelMe"),
    "Label Studio": ({"data": {"image": "a.png"}, "annotations": []}, "Label Studio"),
    "Create ML": ({"image": "a.png", "annotations": []}, "Create ML"),
    "answers": ({"sample_id": "1", "text": "{}"}, "answers of a model"),
    "a log": ({"event": "rollout", "sample_id": "1"}, "a log of stage2"),
}


def written(folder, *lines):
    Image.new("RGB", (10, 10)).save(folder / "a.png")
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    (folder / "x.jsonl").write_text(text)
    return folder / "x.jsonl"


READERS = {
    "load_records": load_records,
    "load_record": lambda path: load_record(path, 0),
    "survey": lambda path: survey(path, AS_DECLARED),
    "profile": lambda path: profile(path, RecordRules(), lambda texts: [len(text) for text in texts]),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("case", OTHERS)
def test_file_of_another_tool_is_reported_once_with_its_format(tmp_path, case, reader):
    record, form = OTHERS[case]
    with pytest.raises(ConfigError) as refused:
        READERS[reader](written(tmp_path, *[record] * 30))
    (problem,) = refused.value.problems
    assert problem.path == f"{tmp_path}/x.jsonl:1"
    assert f"must be a record of stage2, and has the form of {form}" in problem.rule
    assert next(iter(record)) in str(problem.value)
    assert "docs/data.md" in problem.way_out or "stage2 " in problem.way_out


@pytest.mark.parametrize(
    ("line", "rule", "way_out"),
    [
        ([OURS], "is a list", record_forms.ONE_A_LINE),
        ([OTHERS["a result of COCO"][0]], "is a list of COCO's results", record_forms.AS_ANSWERS),
        ([], "is a list", record_forms.ONE_A_LINE),
        (None, "is null", record_forms.ONE_A_LINE),
        ('{\n "images": []\n}', "opens one of several lines", record_forms.ONE_A_LINE),
        ("[\n {}\n]", "opens one of several lines", record_forms.AS_COCO),
    ],
)
def test_file_that_is_not_json_lines_is_reported_once(tmp_path, line, rule, way_out):
    with pytest.raises(ConfigError) as refused:
        load_records(written(tmp_path, line))
    (problem,) = refused.value.problems
    assert rule in problem.rule
    assert way_out in problem.way_out


@pytest.mark.parametrize(
    "further", [{"messages": []}, {"conversations": []}, {"text": "x", "sample_id": "7"}, {"event": 1}]
)
def test_stage2_record_may_have_keys_of_other_tools(tmp_path, further):
    assert len(load_records(written(tmp_path, OURS | further))) == 1


def test_line_in_format_of_another_tool_counts_as_one_broken_line(tmp_path):
    found = survey(written(tmp_path, OURS, OTHERS["Qwen"][0], OURS, OTHERS["ms-swift"][0]), AS_DECLARED)
    assert (found.records, [problem.path[-2:] for problem in found.problems]) == (2, [":2", ":4"])


def test_run_without_objects_accepts_chat_messages(tmp_path):
    path = written(tmp_path, {"images": ["a.png"], "messages": MESSAGES, "summary": "x"})
    assert load_records(path, rules=RecordRules(reads_objects=False))[0].summary == "x"


@pytest.mark.parametrize("key", ["width", "height"])
def test_stage2_record_without_size_key_is_refused_with_that_key(tmp_path, key):
    with pytest.raises(ConfigError, match=rf"{key}: is required, as a positive integer"):
        load_records(written(tmp_path, {name: value for name, value in OURS.items() if name != key}))


def test_data_file_may_begin_with_byte_order_mark(tmp_path):
    assert len(load_records(written(tmp_path, "\ufeff" + json.dumps(OURS), OURS))) == 2
    assert profile(tmp_path / "x.jsonl", RecordRules(), lambda texts: [1 for _ in texts]).records == 2


OBJECTS = {
    "label for desc": ({"label": "cat", "bbox_2d": [1, 2, 3, 4]}, "rename its key label to desc"),
    "category for desc": ({"category": "cat", "bbox_2d": [1, 2, 3, 4]}, "rename its key category to desc"),
    "Qwen3-VL's edge": ({"desc": "cat", "bbox_2d": [0, 0, 500, 1000]}, "Qwen3-VL's 1000 becomes 999"),
    "shares": ({"desc": "cat", "bbox_2d": [0.1, 0.2, 0.5, 1]}, "multiply them by 1000 for bins"),
    "shares of an outline": ({"desc": "cat", "poly": [[0, 0.5], [1, 0], [1, 1]]}, "multiply them by 1000 for bins"),
}


@pytest.mark.parametrize("case", OBJECTS)
def test_object_with_keys_of_another_tool_gets_advice(tmp_path, case):
    value, way_out = OBJECTS[case]
    with pytest.raises(ConfigError) as refused:
        load_records(written(tmp_path, OURS | {"units": "bins", "objects": [value]}))
    (problem,) = refused.value.problems
    assert way_out in problem.way_out


@pytest.mark.parametrize("units", ["bins", "pixels"])
def test_box_of_one_pixel_is_not_taken_for_fractions(tmp_path, units):
    record = OURS | {"units": units, "objects": [{"desc": "dot", "bbox_2d": [0, 0, 1, 1]}]}
    assert len(load_records(written(tmp_path, record))) == 1
