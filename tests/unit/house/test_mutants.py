"""Each defect of tests/mutants.yaml can still be made: the code has what it replaces, once, and its tests exist."""

import shutil
from pathlib import Path

import pytest

from tests import mutants
from tests.mutants import ROOT, Mutant


@pytest.mark.parametrize("mutant", mutants.mutants(), ids=lambda one: one.name)
def test_the_code_has_what_a_defect_replaces(mutant: Mutant, tmp_path: Path) -> None:
    copy = tmp_path / mutant.file
    copy.parent.mkdir(parents=True)
    shutil.copy2(ROOT / mutant.file, copy)
    mutant.change(tmp_path)
    assert copy.read_text() != (ROOT / mutant.file).read_text()
    mutant.restore(tmp_path)
    assert copy.read_text() == (ROOT / mutant.file).read_text()
    for test in mutant.tests.split():
        file, _, name = test.partition("::")
        assert (ROOT / file).exists()
        assert f"def {name}" in (ROOT / file).read_text() if name else True
