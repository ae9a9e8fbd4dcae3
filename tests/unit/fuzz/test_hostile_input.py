"""Hostile input: every reader accepts it or refuses it with its own exception, and never with another one.

The test runs use fixed examples; `make fuzz` draws more, and new ones each time. A failure that it finds becomes a case
in the reader's own tests.
"""

from __future__ import annotations

import copy
import io
import json
import os
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
from stage2_trainer.data.records import AS_DECLARED, Line, Record
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
