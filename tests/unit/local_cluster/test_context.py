"""What hack/local-cluster builds images from."""

import tomllib
from pathlib import Path

from local_cluster import context

PYPROJECT = (context.REPOSITORY / "pyproject.toml").read_text()


def test_image_pyproject_keeps_everything_but_developer_tables() -> None:
    whole, cut = tomllib.loads(PYPROJECT), tomllib.loads(context.without_developer_tables(PYPROJECT))
    assert cut["project"] == whole["project"]
    assert cut["build-system"] == whole["build-system"]
    assert cut["tool"] == {name: whole["tool"][name] for name in ("hatch", "uv")}


def test_developer_setting_change_does_not_change_image() -> None:
    changed = PYPROJECT.replace("dev = [\n", 'dev = [\n  "a-new-linter",\n') + '\n[tool.a-new-linter]\nline = "100"\n'
    assert changed != PYPROJECT
    assert context.without_developer_tables(changed) == context.without_developer_tables(PYPROJECT)


def test_build_context_is_read_from_ignore_file() -> None:
    assert context.admitted("# why\n*\n!pyproject.toml\n!crds/stage2_api\n**/__pycache__\n") == [
        "pyproject.toml",
        "crds/stage2_api",
    ]


def test_scratch_folder_starts_empty_after_killed_command(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "left").touch()
    with context.scratch(tmp_path, "export") as folder:
        assert list(folder.iterdir()) == []
    assert not folder.exists()
