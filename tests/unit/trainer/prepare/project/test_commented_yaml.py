"""YAML with reasons beside values says the same as without them."""

import pytest
import yaml

from stage2_trainer.prepare.project_recipe import to_yaml
from stage2_trainer.prepare.project_sizes import Chosen

TREE = {
    "name": "job",
    "spec": {"gpus": Chosen(4, "what there is"), "rate": Chosen(2.0e-5, "small"), "empty": {}, "none": None},
    "volumes": [{"name": "a", "path": "/x y"}, {"name": "b", "path": "/ü"}],
    "trackers": Chosen(["tensorboard"], "a curve"),
}
PLAIN = {
    **TREE,
    "spec": {"gpus": 4, "rate": 2.0e-5, "empty": {}, "none": None},
    "trackers": ["tensorboard"],
}


def test_it_is_read_as_what_was_written():
    assert yaml.safe_load(to_yaml(TREE)) == PLAIN


@pytest.mark.parametrize(
    "value",
    ["", "yes", "# no comment", "a: b", "'", "line\nline", "a\x85b", "\u2028", "\x1b", "ü", True, [], {}, 1e-6, "1e-6"],
)
def test_any_value_comes_back(value):
    assert yaml.safe_load(to_yaml({"a": {"b": Chosen(value, "why")}, "c": value, "d": [value]})) == {
        "a": {"b": value},
        "c": value,
        "d": [value],
    }


def test_a_reason_stands_behind_its_value_or_where_it_is_too_long_above_it():
    long = "why " * 30
    lines = to_yaml({"a": {"b": Chosen(1, "few"), "c": Chosen(2, long)}}).splitlines()
    assert lines == ["a:", "  b: 1 # few", f"  # {long}", "  c: 2"]
