"""The runner of the tiers runs pytest as a person would, and checks first what a tier needs."""

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


def test_a_tier_that_fails_ends_the_run_with_its_exit_code(tmp_path, monkeypatch, capsys):
    (tmp_path / "test_two.py").write_text(TESTS)
    monkeypatch.setattr(tiers, "OUT", tmp_path)
    monkeypatch.setitem(tiers.ARGUMENTS, "two", ("-p", "no:cacheprovider", str(tmp_path / "test_two.py")))
    outside = [one for one in os.environ["PATH"].split(":") if one != str(Path(sys.executable).parent)]
    monkeypatch.setenv("PATH", ":".join(outside))  # the virtual environment is not active
    assert tiers.main(["two", "unit"]) == 1
    assert tiers.progress("two") == "two 2 tests, 1 failed"
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 failed, 1 passed in")


def test_missing_prerequisites_are_reported_before_anything_runs(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(tiers, "run_stage", lambda names: pytest.fail("a tier ran"))
    assert tiers.main(["unit", "cluster"]) == prerequisites.EXIT_MISSING
    message = capsys.readouterr().err
    assert [word for word in ("root", "Debian", "Go 1.24") if word not in message] == []


def test_a_named_cluster_needs_neither_root_nor_go(monkeypatch):
    monkeypatch.setenv("KUBECONFIG", "/some/where")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert prerequisites.missing({"cluster", "alone", "jobs"}) == []
