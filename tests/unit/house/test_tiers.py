"""The runner of the tiers runs pytest as a person would, and reads what came of it."""

import os
import sys
from pathlib import Path

import pytest

from tests import prerequisites, tiers

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


def test_what_a_machine_lacks_is_said_before_anything_runs(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(tiers, "run_stage", lambda names: pytest.fail("a tier ran"))
    assert tiers.main(["unit", "cluster"]) == prerequisites.EXIT_MISSING
    said = capsys.readouterr().err
    assert [word for word in ("root", "Debian", "Go 1.24") if word not in said] == []


def test_a_cluster_of_ones_own_needs_neither_root_nor_go(monkeypatch):
    monkeypatch.setenv("KUBECONFIG", "/some/where")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert prerequisites.missing({"cluster", "alone", "jobs"}) == []


def test_every_test_of_the_cluster_belongs_to_one_of_its_two_tiers():
    marks = {name: tiers.ARGUMENTS[name][tiers.ARGUMENTS[name].index("-m") + 1] for name in ("cluster", "alone")}
    assert marks == {"cluster": "not alone", "alone": "alone"}
