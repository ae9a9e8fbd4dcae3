"""Reading YAML files: mistakes of form are refused with the file's name."""

from pathlib import Path

import pytest

from stage2_api.errors import ConfigError
from stage2_cli.config_files import load_documents, load_yaml


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("a: 1\nb: 2\na: 3\n")
    with pytest.raises(ConfigError, match="given twice"):
        load_yaml(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_yaml(tmp_path / "nowhere.yaml")


def test_a_list_at_the_top_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n")
    with pytest.raises(ConfigError, match="mapping"):
        load_documents(path)


def test_merge_keys_still_work(tmp_path: Path) -> None:
    path = tmp_path / "merge.yaml"
    path.write_text("base: &b {x: 1}\nother:\n  <<: *b\n  y: 2\n")
    assert load_yaml(path)["other"] == {"x": 1, "y": 2}
