"""JSON of the API server: whatever anybody may store is read, and reads the same as by the standard library."""

import json
import sys

import pytest

from stage2_controller import store

DEEP = 5_000


@pytest.fixture
def deep_recursion():
    """The depth that `stage2_controller.loop.main` allows a process of its own."""
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(20 * DEEP)
    yield
    sys.setrecursionlimit(usual)


@pytest.mark.parametrize(
    "text",
    [
        '{"kind": "Pod", "metadata": {"labels": {}}, "spec": [1, 2.5, true, null, "x\\u00e9"]}',
        '{"metadata": {"name": "\\ud800"}}',  # half a pair
        '{"a": 1, "a": 2}',
    ],
)
def test_a_text_reads_as_the_standard_library_reads_it(text):
    assert store.read(text) == store.read(text.encode()) == json.loads(text)


@pytest.mark.usefixtures("deep_recursion")
def test_an_object_of_any_depth_is_read_and_written():
    text = '{"a":' * DEEP + "1" + "}" * DEEP
    assert store.write(store.read(text)).decode() == text


@pytest.mark.parametrize("made", [{"a": [1, "é", None, {"b": 0.1}]}, {"half": "\ud800"}, {"large": 2**70}])
def test_what_is_written_reads_as_it_was(made):
    assert json.loads(store.write(made)) == made


def test_what_is_no_json_is_a_value_error():
    with pytest.raises(ValueError, match="Expecting value"):
        store.read("<html>")
