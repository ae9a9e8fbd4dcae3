"""Files of tests that share what starts slowly run in one process of pytest-xdist, all others by file."""

from pathlib import Path

import pytest
from xdist.remote import Producer

from tests.support.together import TOGETHER, pytest_xdist_make_scheduler

ROOT = Path(__file__).parents[3]


def test_files_that_share_resource_run_in_one_worker(pytester: pytest.Pytester) -> None:
    config = pytester.parseconfig("--tx=2*popen", "--dist=loadfile")
    scheduler = pytest_xdist_make_scheduler(config, Producer("test"))
    assert scheduler is not None
    scopes = {file: scheduler._split_scope(f"{file}::test_a[b::c]") for file in (*TOGETHER, "tests/test_else.py")}
    assert scopes == {**TOGETHER, "tests/test_else.py": "tests/test_else.py"}


def test_scheduler_of_xdist_is_used_without_loadfile(pytester: pytest.Pytester) -> None:
    assert pytest_xdist_make_scheduler(pytester.parseconfig("--tx=2*popen", "--dist=load"), Producer("test")) is None


def test_files_that_share_resource_exist() -> None:
    assert [file for file in TOGETHER if not (ROOT / file).is_file()] == []
