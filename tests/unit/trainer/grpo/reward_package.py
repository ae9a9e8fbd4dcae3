"""Installs a package with rewards, as pip would: a module, and metadata with its entry points."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from stage2_trainer.grpo.loaded_rewards import ENTRY_POINTS


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, names: Iterable[str], module: str = "their_rewards"
) -> Path:
    """Install `code` as a module; return its file.

    names: of the rewards, `NAME` (which is `theirs.NAME`, and `module:NAME`) or `NAME=MODULE:FUNCTION`.
    """
    file = folder / f"{module}.py"
    file.write_text(code, encoding="utf-8")
    distribution = module.replace("_", "-")
    information = folder / f"{distribution}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "\n".join([f"[{ENTRY_POINTS}]", *(_entry(name, module) for name in names), ""]), encoding="utf-8"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, module, raising=False)  # of another test
    return file


def _entry(name: str, module: str) -> str:
    name, _, target = name.partition("=")
    return f"{name if '.' in name else f'theirs.{name}'} = {target or f'{module}:{name}'}"
