"""The runner of the tiers runs pytest as a person would, and reads what came of it."""

import os
import sys
from pathlib import Path

import pytest

from tests import tiers

TESTS = """
import shutil, sys
from pathlib import Path

def test_python_is_that_of_the_runner():
    assert Path(shutil.which("python")).parent == Path(sys.executable).parent

def test_that_fails():
    assert False
"""


@pytest.fixture
def tier(tmp_path, monkeypatch):
    """A tier of two tests, one of which fails, run without the virtual environment on PATH."""
    (tmp_path / "test_two.py").write_text(TESTS)
    monkeypatch.setattr(tiers, "OUT", tmp_path)
    monkeypatch.setitem(tiers.ARGUMENTS, "two", ("-p", "no:cacheprovider", str(tmp_path / "test_two.py")))
    folder = str(Path(sys.executable).parent)
    path = [one for one in os.environ["PATH"].split(":") if one != folder]
    monkeypatch.setenv("PATH", ":".join(path))
    return tiers.Tier("two")


def test_a_tier_is_counted_and_its_failure_is_its_exit_code(tier):
    tier.run()
    assert tier.exit_code == 1
    assert (tier.counts["passed"], tier.counts["failures"]) == (1, 1)
    assert tier.progress() == "two 2 tests, 1 failed"
    assert "| two | 1 | 1 | 0 |" in tiers.table([tier])


def test_tiers_that_a_plus_joins_are_one_run():
    assert tiers.arguments("cluster+jobs") == ["tests/cluster", "tests/jobs"]
