"""Hostile input: every reader accepts it or refuses it with its own exception, and never with another one.

The test runs use fixed examples; `make fuzz` draws more, and new ones each time. A failure that it finds becomes a case
in the reader's own tests.
"""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from stage2_api.errors import ConfigError
from stage2_api.parsing import parse_job
from stage2_api.pod.report import LearnerReport, read_report
from stage2_cli.config_files import load_documents
from stage2_controller.job import template_rules
from stage2_trainer.data.images import ImageError, load_image
from stage2_trainer.data.records import AS_DECLARED, Line, Record, load_records
from stage2_trainer.prepare import chat, coco, label_studio, labelme
from stage2_trainer.prepare.annotations import AnnotatedSet, Tally
from stage2_trainer.prepare.formats import import_words
from stage2_trainer.prepare.record_writer import NothingKept, RecordChoice, write_records
from stage2_trainer.wire.chat import Answer, read_answer
from stage2_trainer.wire.client import read_object
from tests.unit.api.wrong_jobs import good_job

RECORD: dict[str, Any] = {
    "images": ["data:image/png;base64,AAAA"],
    "objects": [{"desc": "cat", "bbox_2d": [1, 2, 30, 40]}, {"desc": "dog", "poly": [[1, 2], [30, 2], [30, 40]]}],
    "width": 64,
    "height": 48,
    "units": "pixels",
    "metadata": {"a": [1]},
}
ANSWER = {
    "object": "chat.completion",
    "prompt_token_ids": [1, 2],
    "choices": [{"message": {"content": "{}"}, "token_ids": [3], "finish_reason": "stop"}],
}
BOX = {"x": 10, "y": 10, "width": 50, "height": 40, "rotation": 5, "rectanglelabels": ["cat"]}
ANNOTATIONS: dict[str, Any] = {
    "coco": {
        "images": [{"id": 1, "file_name": "a.png", "coco_url": "http://x/y/a.png", "neg_category_ids": [1]}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 30, 40]}],
        "categories": [{"id": 1, "name": "cat"}],
    },
    "labelme": {
        "imagePath": "a.png",
        "imageData": "AAAA",
        "imageWidth": 64,
        "shapes": [{"label": "cat", "shape_type": "circle", "group_id": 1, "points": [[1, 2], [30, 40]]}],
    },
    "labelstudio": [
        {
            "id": 1,
            "data": {"image": "/data/upload/1/0a1b2c3d-a.png", "more": ["b.png"]},
            "annotations": [
                {"updated_at": "2025", "result": [{"id": "r", "to_name": "image", "original_width": 64, "value": BOX}]}
            ],
        },
        {"id": 2, "image": "a.png", "annotator": 1, "label": [BOX]},
    ],
    "chat": [
        {
            "messages": [{"role": "user", "content": "<ref-object>"}, {"role": "assistant", "content": "<bbox>"}],
            "images": ["a.png"],
            "objects": {"ref": ["cat"], "bbox": [[1, 2, 30, 40]], "bbox_type": "real", "image_id": [0]},
        },
        {
            "image": "a.png",
            "width": 64,
            "conversations": [{"from": "gpt", "value": '```json\n[{"bbox_2d": [1, 2, 3, 4], "label": "cat"}]'}],
        },
    ],
}
READERS: dict[str, Callable[[Path, Tally], AnnotatedSet]] = {
    "coco": lambda file, tally: coco.read_coco(file, file.parent, tally, outlines=True),
    "labelme": lambda file, tally: labelme.read_labelme(file.parent, tally),
    "labelstudio": lambda file, tally: label_studio.read_label_studio(file, file.parent, tally),
    "chat": lambda file, tally: chat.read_chat(file, file.parent, tally, units="pixels"),
}
REPORT = LearnerReport(phase="loading", loss=1.0, message="x").document()

EXAMPLES = os.environ.get("STAGE2_FUZZ_EXAMPLES")
hostile = settings(
    max_examples=int(EXAMPLES or 60),
    derandomize=EXAMPLES is None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)

odd_numbers = st.one_of(
    st.integers(), st.floats(), st.sampled_from([10**400, -(2**63), 2**64, 1e308, -0.0, float("nan"), float("inf")])
)
odd_texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["\x00", "\ud800", "\n{}", "\x1b[2J", "../..", "/dev/zero", "<|coord_5|>", "é" * 300, "${HOME}", ""]
    ),
)
leaves = st.one_of(st.none(), st.booleans(), odd_numbers, odd_texts)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(odd_texts, inner, max_size=4), max_leaves=12
)


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the place of each value inside a value, from the outermost in."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(place for key, inner in items for place in places(inner, (*here, key)))]


@st.composite
def damaged(draw: st.DrawFn, whole: Any) -> Any:
    """A value with one to three parts replaced, taken out or added to."""
    made = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        *above, last = draw(st.sampled_from(places(made)[1:] or [(None,)]))
        if last is None:
            return draw(values)
        parent = made
        for key in above:
            parent = parent[key]
        match draw(st.sampled_from(["replace", "remove", "add"])):
            case "remove":
                del parent[last]
            case "add" if isinstance(parent, dict):
                parent[draw(odd_texts)] = draw(values)
            case _:
                parent[last] = draw(values)
    return made


@st.composite
def cut_and_turned(draw: st.DrawFn, whole: bytes) -> bytes:
    """Bytes of which a few are changed, and the end may be missing."""
    made = bytearray(whole[: draw(st.integers(0, len(whole)))] if draw(st.booleans()) else whole)
    for _ in range(draw(st.integers(0, 6)) if made else 0):
        made[draw(st.integers(0, len(made) - 1))] = draw(st.integers(0, 255))
    return bytes(made)


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def outcome(read: Callable[[], Any], refusal: type[Exception]) -> Any:
    """Return what a reader makes of something: what it returns, or the text of the refusal that it has."""
    try:
        return read()
    except refusal as error:
        return str(error)


@hostile
@given(damaged(good_job()))
def test_hostile_job_is_accepted_or_refused(raw: Any) -> None:
    assert outcome(lambda: template_rules.check(parse_job(raw)), ConfigError) != ""


pieces = st.sampled_from(
    [*"[]{}:,-?&*!|>'\"%@`#", "\n", "  ", "a", "- ", ": ", "&a ", "*a ", "<<: ", "!!", "0x", "1:1"]
)


@hostile
@given(st.binary(max_size=200) | st.lists(pieces, max_size=60).map(lambda parts: "".join(parts).encode()))
def test_hostile_yaml_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    found = outcome(lambda: load_documents(path), ConfigError)
    if isinstance(found, str):
        assert str(path) in found
        assert len(found) < 2000
    else:
        assert {type(document) for document in found} == {dict}


@hostile
@given(damaged(RECORD).map(as_json) | cut_and_turned(as_json(RECORD)))
def test_hostile_record_is_read_or_refused(tmp_path: Path, text: bytes) -> None:
    line = Line(tmp_path / "a.jsonl", 0, 1, text)
    found = outcome(lambda: line.record(AS_DECLARED), ConfigError)
    assert isinstance(found, Record) or str(tmp_path / "a.jsonl:1") in found


@cache
def encoded(form: str) -> bytes:
    """Return a small picture as a file of one form."""
    file = io.BytesIO()
    picture = Image.linear_gradient("L").resize((24, 16)).convert("RGB")
    picture.save(file, format=form, **({"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0"} if form == "JPEG" else {}))
    return file.getvalue()


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of a TIFF that is broken
@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"])
@hostile
@given(data=st.data())
def test_hostile_image_is_read_or_refused(tmp_path: Path, form: str, data: st.DataObject) -> None:
    path = tmp_path / "image"
    path.write_bytes(data.draw(cut_and_turned(encoded(form))))
    found = outcome(lambda: load_image(str(path)), ImageError)
    assert str(path) in found if isinstance(found, str) else found.mode == "RGB"


@pytest.mark.parametrize(("read", "kind"), [(read_answer, Answer), (read_object, dict)])
@hostile
@given(body=damaged(ANSWER).map(as_json) | cut_and_turned(as_json(ANSWER)))
def test_hostile_server_answer_is_read_or_refused(read: Callable[[bytes], Any], kind: type, body: bytes) -> None:
    found = outcome(lambda: read(body), ValueError)
    assert isinstance(found, kind) or found


@hostile
@given(damaged(REPORT))
def test_hostile_learner_report_is_read_or_ignored(document: Any) -> None:
    report = read_report(document)
    assert report is None or isinstance(report, LearnerReport)


@pytest.mark.parametrize("form", READERS)
@hostile
@given(data=st.data())
def test_hostile_annotations_are_imported_counted_or_refused(tmp_path: Path, form: str, data: st.DataObject) -> None:
    """Every image and object of them is written or counted, and no other exception ends an import."""
    whole = ANNOTATIONS[form]
    file, output = tmp_path / "x.json", tmp_path / "out" / "x.jsonl"
    Image.new("RGB", (64, 48)).save(tmp_path / "a.png")
    file.write_bytes(data.draw(damaged(whole).map(as_json) | cut_and_turned(as_json(whole))))
    outcome(lambda: import_words(file), ConfigError)
    tally = Tally()
    shutil.rmtree(output.parent, ignore_errors=True)
    try:
        choice = RecordChoice(geometry=data.draw(st.sampled_from(["bbox", "poly"])))
        write_records(READERS[form](file, tally), output, choice, tally)
    except (NothingKept, ConfigError):
        assert not output.exists()
    else:
        assert len(load_records(output)) == tally.records > 0
