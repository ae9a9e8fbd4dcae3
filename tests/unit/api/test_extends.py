"""`extends`: files that build on others."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from stage2_api.errors import ConfigError
from stage2_api.parsing import resolve_extends

Files = dict[str, dict[str, Any]]


def reader(root: Path, files: Files) -> Callable[[Path], Mapping[str, Any]]:
    by_path = {(root / name).resolve(): content for name, content in files.items()}
    return lambda path: by_path[path.resolve()]


def resolved(root: Path, files: Files, name: str = "run.yaml") -> dict[str, Any]:
    return resolve_extends(root / name, reader(root, files))


def test_mappings_merge_and_everything_else_is_replaced(tmp_path: Path) -> None:
    base = {"training": {"seed": 1, "report_to": ["a", "b"]}, "model": {"model": "m"}}
    own = {"extends": "base.yaml", "training": {"seed": 2, "report_to": ["c"]}, "model": None}
    assert resolved(tmp_path, {"base.yaml": base, "run.yaml": own}) == {
        "training": {"seed": 2, "report_to": ["c"]},
        "model": None,
    }


def test_earlier_bases_lose_against_later_ones(tmp_path: Path) -> None:
    files: Files = {"a.yaml": {"x": "a", "y": "a"}, "b.yaml": {"x": "b"}, "run.yaml": {"extends": ["a.yaml", "b.yaml"]}}
    assert resolved(tmp_path, files) == {"x": "b", "y": "a"}


def test_paths_are_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    files: Files = {
        "base.yaml": {"x": 1},
        "sub/middle.yaml": {"extends": "../base.yaml", "y": 2},
        "run.yaml": {"extends": "sub/middle.yaml"},
    }
    assert resolved(tmp_path, files) == {"x": 1, "y": 2}


def test_a_circle_is_an_error_that_shows_the_way_round(tmp_path: Path) -> None:
    files: Files = {"a.yaml": {"extends": "b.yaml"}, "b.yaml": {"extends": "a.yaml"}}
    with pytest.raises(ConfigError, match=r"a\.yaml → b\.yaml → a\.yaml"):
        resolved(tmp_path, files, "a.yaml")


def test_a_base_that_two_files_share_is_no_circle(tmp_path: Path) -> None:
    files: Files = {
        "base.yaml": {"x": 1},
        "a.yaml": {"extends": "base.yaml", "a": 1},
        "b.yaml": {"extends": "base.yaml", "b": 1},
        "run.yaml": {"extends": ["a.yaml", "b.yaml"]},
    }
    assert resolved(tmp_path, files) == {"x": 1, "a": 1, "b": 1}


@pytest.mark.parametrize("extends", [5, {"a": 1}, ["a.yaml", 5], [""]])
def test_anything_but_paths_is_refused(tmp_path: Path, extends: object) -> None:
    with pytest.raises(ConfigError, match="relative to this file"):
        resolved(tmp_path, {"run.yaml": {"extends": extends}})


@pytest.mark.parametrize("base", ["../base.yaml", "/etc/shadow", "shadow", "sub/../../base.yaml", "outside.yaml"])
def test_a_base_elsewhere_is_refused_unread(tmp_path: Path, base: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "outside.yaml").symlink_to(tmp_path / "base.yaml")
    files: Files = {"run/run.yaml": {"extends": base}}
    with pytest.raises(ConfigError, match=r"extends: '.*'; must be a YAML file .* in the folder of the first file"):
        resolved(tmp_path, files, "run/run.yaml")


def test_a_file_that_many_build_on_is_read_once(tmp_path: Path) -> None:
    files: Files = {f"{level}.yaml": {"extends": [f"{level + 1}.yaml"] * 10, "y": level} for level in range(40)}
    files["40.yaml"] = {"x": 1}
    read: list[Path] = []

    def reading(path: Path) -> Mapping[str, Any]:
        read.append(path)
        return reader(tmp_path, files)(path)

    assert resolve_extends(tmp_path / "0.yaml", reading) == {"x": 1, "y": 0}
    assert len(read) == 41
