"""No message shows Python's None: what is null or missing in a file has a name there."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from stage2_api.errors import ConfigError, shortened
from stage2_api.parsing import parse_job
from stage2_trainer.data.records import AS_DECLARED, load_record
from tests.unit.api.wrong_jobs import good_job

Document = Any
RECORD = {
    "images": ["a.png"],
    "width": 10,
    "height": 10,
    "units": "bins",
    "objects": [{"desc": "x", "bbox_2d": [1, 2, 3, 4]}, {"desc": "y", "poly": [1, 2, 3, 4, 5, 6]}],
}


def holed(document: Document) -> Iterator[Document]:
    """Yield the document with null in each place in turn, as a list of null, and without it."""
    for place in places(document):
        for change in ([None], None, ...):
            changed = copy.deepcopy(document)
            here = changed
            for key in place[:-1]:
                here = here[key]
            if change is ...:
                del here[place[-1]]
            else:
                here[place[-1]] = change
            yield changed


def places(document: Document) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each value."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items if isinstance(document, (dict, list)) else ():
        yield (key,)
        yield from ((key, *rest) for rest in (places(value) if isinstance(value, (dict, list)) else ()))


def messages(read: Callable[[Document], object], document: Document) -> set[str]:
    """Return all that a reader's errors of such documents print."""
    found: set[str] = set()
    for changed in holed(document):
        try:
            read(changed)
        except ConfigError as error:
            found |= {str(one) for one in error.problems}
    return found


def test_nested_null_values_are_shown_as_null() -> None:
    """A list of null was shown as [None]."""
    value = {"a": [None, {"b": None}], "c": (None,), None: "None"}
    assert shortened(value) == "{'a': [null, {'b': null}], 'c': (null,), null: 'None'}"
    for depth in (200, 900):
        deep: object = None
        for _ in range(depth):
            deep = [deep]
        assert shortened(deep) == "[" * 119 + "…"


def test_job_errors_never_show_none() -> None:
    assert [line for line in messages(parse_job, good_job()) if "None" in line] == []


def test_record_errors_never_show_none(tmp_path: Path) -> None:
    Image.new("RGB", (10, 10)).save(tmp_path / "a.png")

    def read(record: Document) -> None:
        (tmp_path / "x.jsonl").write_text(json.dumps(record) + "\n")
        load_record(tmp_path / "x.jsonl", 0, rules=AS_DECLARED)

    read(RECORD)
    assert [line for line in messages(read, RECORD) if "None" in line] == []


@pytest.mark.parametrize("text", ["null", "~", "--- ~\n--- ~", ""])
def test_errors_about_whole_files_never_show_none(tmp_path: Path, text: str) -> None:
    from stage2_cli.config_files import load
    from stage2_trainer.prepare.yolo import _layout

    (tmp_path / "x.yaml").write_text(text)
    for read in (load, lambda path: _layout(path, "auto")):
        with pytest.raises(ConfigError) as refused:
            read(tmp_path / "x.yaml")
        assert "None" not in str(refused.value)
