"""A person's pod template over ours: what merges, what is replaced, what null removes."""

from typing import Any

import pytest

from stage2_controller.spec.objects import strategic_merge

CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("a new key is added", {"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
    ("a scalar is replaced", {"a": 1}, {"a": 2}, {"a": 2}),
    ("null removes a key", {"a": 1, "b": 2}, {"a": None}, {"b": 2}),
    ("mappings merge", {"m": {"a": 1}}, {"m": {"b": 2}}, {"m": {"a": 1, "b": 2}}),
    (
        "containers merge by name",
        {"containers": [{"name": "x", "image": "i"}]},
        {"containers": [{"name": "x", "tty": True}, {"name": "y"}]},
        {"containers": [{"name": "x", "image": "i", "tty": True}, {"name": "y"}]},
    ),
    (
        "environment variables merge by name",
        {"env": [{"name": "A", "value": "1"}]},
        {"env": [{"name": "A", "value": "2"}, {"name": "B", "value": "3"}]},
        {"env": [{"name": "A", "value": "2"}, {"name": "B", "value": "3"}]},
    ),
    ("a list without a merge key is replaced", {"args": ["a", "b"]}, {"args": ["c"]}, {"args": ["c"]}),
    (
        "mounts merge by path",
        {"volumeMounts": [{"mountPath": "/a", "name": "x"}]},
        {"volumeMounts": [{"mountPath": "/a", "readOnly": True}]},
        {"volumeMounts": [{"mountPath": "/a", "name": "x", "readOnly": True}]},
    ),
]


@pytest.mark.parametrize(("base", "patch", "merged"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_strategic_merge(base: dict[str, Any], patch: dict[str, Any], merged: dict[str, Any]) -> None:
    assert strategic_merge(base, patch) == merged


def test_neither_side_is_changed() -> None:
    base: dict[str, Any] = {"containers": [{"name": "x", "env": []}]}
    patch: dict[str, Any] = {"containers": [{"name": "x", "env": [{"name": "A"}]}]}
    merged = strategic_merge(base, patch)
    merged["containers"][0]["env"].append("changed")
    assert base == {"containers": [{"name": "x", "env": []}]}
    assert patch == {"containers": [{"name": "x", "env": [{"name": "A"}]}]}
