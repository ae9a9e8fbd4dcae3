"""Each defect of tests/mutants.yaml can still be made: the code has what it replaces, once, and its tests exist."""

import shutil
from pathlib import Path

from tests.support import mutants
from tests.support.mutants import ROOT, Mutant


def flaw(mutant: Mutant, folder: Path) -> str:
    """What keeps a defect from being made, or its tests from being run; empty if nothing does."""
    source, copy = ROOT / mutant.file, folder / mutant.file
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, copy)
    try:
        mutant.change(folder)
    except ValueError as error:
        return f"{error}"
    changed = copy.read_text() != source.read_text()
    mutant.restore(folder)
    restored = copy.read_text() == source.read_text()
    missing = [test for test in mutant.tests.split() if not exists(test)]
    return "" if changed and restored and not missing else f"{changed=} {restored=} {missing=}"


def exists(test: str) -> bool:
    file, _, name = test.partition("::")
    return (ROOT / file).exists() and (not name or f"def {name}" in (ROOT / file).read_text())


def test_mutants_apply_to_current_code(tmp_path: Path) -> None:
    found = [(one.name, flaw(one, tmp_path)) for one in mutants.mutants()]
    assert [each for each in found if each[1]] == []
