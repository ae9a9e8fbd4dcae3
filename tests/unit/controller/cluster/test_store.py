"""The store of what the watches have seen: the newest state wins, and whatever JSON anybody stores is read."""

import json
import sys
from typing import Any

import pytest

from stage2_controller.job import names
from stage2_controller.job.names import Key
from stage2_controller.state import store
from stage2_controller.state.store import Store, key_of

KEY = Key("team-a", "job-3v1")


def seen(kind: str, name: str, version: int, *, uid: str = "1", owner: str | None = "job-3v1") -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "namespace": "team-a", "uid": uid, "resourceVersion": str(version)}
    if kind != names.KIND and owner:
        metadata["annotations"] = {names.ANNOTATION_JOB: owner}
    return {"metadata": metadata}


def version(store: Store, kind: str, name: str) -> str | None:
    found = store.one(kind, KEY, name)
    return found["metadata"]["resourceVersion"] if found else None


def test_job_of_child_is_named_by_annotation() -> None:
    assert key_of("Pod", seen("Pod", "p", 1)) == KEY
    assert key_of(names.KIND, seen(names.KIND, "job-3v1", 1)) == KEY
    assert key_of("Pod", seen("Pod", "p", 1, owner=None)) is None


def test_older_state_never_replaces_newer_one() -> None:
    store = Store()
    store.put("Job", seen("Job", "j", 9))
    store.put("Job", seen("Job", "j", 10))
    store.put("Job", seen("Job", "j", 9))
    assert version(store, "Job", "j") == "10"


def test_deletion_of_old_object_keeps_its_successor() -> None:
    store = Store()
    store.put("Job", seen("Job", "j", 10, uid="new"))
    store.remove("Job", seen("Job", "j", 9, uid="old"))
    assert version(store, "Job", "j") == "10"
    store.remove("Job", seen("Job", "j", 11, uid="new"))
    assert version(store, "Job", "j") is None


def test_objects_of_other_jobs_are_not_returned() -> None:
    store = Store()
    store.put("Pod", seen("Pod", "mine", 1))
    store.put("Pod", seen("Pod", "theirs", 2, owner="another"))
    assert [pod["metadata"]["name"] for pod in store.all("Pod", KEY)] == ["mine"]


def test_managed_fields_are_not_stored() -> None:
    store = Store()
    body = seen("Pod", "p", 1)
    body["metadata"]["managedFields"] = [{"manager": "x"}]
    store.put("Pod", body)
    (kept,) = store.all("Pod", KEY)
    assert "managedFields" not in kept["metadata"]


def test_only_needed_fields_of_pod_spec_are_stored() -> None:
    store = Store()
    store.put("Pod", {**seen("Pod", "p", 1), "spec": {"nodeName": "node-a", "containers": [{"name": "server-0"}]}})
    assert [item["spec"] for item in store.all("Pod", KEY)] == [{"nodeName": "node-a"}]


def test_list_reveals_objects_watch_has_not_delivered() -> None:
    store = Store()
    store.put("Pod", seen("Pod", "same", 1, uid="a"))
    store.put("Pod", seen("Pod", "older", 2, uid="b"))
    listed = [seen("Pod", "same", 1, uid="a"), seen("Pod", "older", 5, uid="b"), seen("Pod", "unknown", 4, uid="c")]
    assert [store.knows("Pod", body) for body in listed] == [True, False, False]


def test_list_reveals_deleted_objects_but_not_later_ones() -> None:
    store = Store()
    store.put("Pod", seen("Pod", "gone", 3, uid="a"))
    store.put("Pod", seen("Pod", "younger-than-the-list", 30, uid="b"))
    for namespace in (None, "team-a"):
        assert [body["metadata"]["name"] for body in store.vanished("Pod", namespace, (), 20)] == ["gone"]
    assert store.vanished("Pod", "team-b", (), 20) == []


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
def test_json_is_parsed_like_standard_library(text):
    assert store.read(text) == store.read(text.encode()) == json.loads(text)


@pytest.mark.skipif((3, 12) <= sys.version_info < (3, 12, 3), reason="this Python's json reads 1,500 levels at most")
@pytest.mark.usefixtures("deep_recursion")
def test_deeply_nested_object_is_read_and_written():
    text = '{"a":' * DEEP + "1" + "}" * DEEP
    assert store.write(store.read(text)).decode() == text


@pytest.mark.parametrize("made", [{"a": [1, "é", None, {"b": 0.1}]}, {"half": "\ud800"}, {"large": 2**70}])
def test_written_json_reads_back_unchanged(made):
    assert json.loads(store.write(made)) == made


def test_invalid_json_raises_value_error():
    with pytest.raises(ValueError, match="Expecting value"):
        store.read("<html>")


def test_pod_without_its_annotation_still_belongs_to_its_job() -> None:
    """Its changes were lost, and so was its end: the status went on with what it had last been."""
    store = Store()
    store.put("Pod", seen("Pod", "p", 1))
    store.put("Pod", seen("Pod", "p", 2, owner=None))
    assert version(store, "Pod", "p") == "2"
    assert store.key("Pod", seen("Pod", "p", 2, owner=None)) == KEY
    assert not store.knows("Pod", seen("Pod", "p", 3, owner=None))
    store.remove("Pod", seen("Pod", "p", 3, owner=None))
    assert version(store, "Pod", "p") is None
    assert store.key("Pod", seen("Pod", "p", 3, owner=None)) is None


def test_unowned_object_is_known_but_not_stored() -> None:
    store = Store()
    store.put("Pod", seen("Pod", "p", 1, owner=None))
    assert store.knows("Pod", seen("Pod", "p", 1, owner=None))
    assert version(store, "Pod", "p") is None


def test_pod_annotated_for_another_job_moves_to_it() -> None:
    store = Store()
    store.put("Pod", seen("Pod", "p", 1))
    store.put("Pod", seen("Pod", "p", 2, owner="another"))
    assert store.all("Pod", KEY) == ()
    assert len(store.all("Pod", Key("team-a", "another"))) == 1
