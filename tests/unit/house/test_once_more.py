"""Tests that fail run once more: with real runs of pytest on small files."""

from datetime import date
from pathlib import Path

import pytest

from tests.support.once_more import MOST_FLAKY, again, report, run
from tests.support.turns import TODAY

pytestmark = pytest.mark.in_turns(3, apart=True)

PASSES = "def test_passes():\n    pass\n"
FLAKY = """
import pathlib
def test_flaky_{number}():
    seen = pathlib.Path(__file__).with_suffix(".{number}")
    before, _ = seen.exists(), seen.write_text("")
    assert before
"""
IN_TURNS = """
import pytest
@pytest.mark.in_turns({days})
@pytest.mark.parametrize("number", range(4))
def test_in_turns(number):
    assert False, number
"""
FAILS = "def test_fails():\n    assert False\n"


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the plugin that a tier names: the others take seconds to import."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def tier(folder: Path, *texts: str, later: bool = False) -> int:
    """Run a tier of one file, as tests in two processes do."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_file.py").write_text("\n".join(texts))
    (folder / "out").mkdir(exist_ok=True)
    plugins = ["-p", "xdist", "-p", "tests.support.turns"]
    arguments = ["-q", *plugins, "-n", "2", "--rootdir", str(folder), str(folder)]
    return run("tier", arguments, folder / "out", later=later)


def flaky(count: int) -> list[str]:
    return [FLAKY.format(number=number) for number in range(count)]


def test_passing_tier_runs_once_and_is_not_flaky(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert tier(tmp_path, PASSES) == 0
    assert report(tmp_path / "out") == 0
    assert "flaky" not in capfd.readouterr().out


def test_failed_test_that_passes_alone_is_reported_as_flaky(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert tier(tmp_path, PASSES, *flaky(1)) == 0
    capfd.readouterr()
    assert report(tmp_path / "out") == 0
    assert capfd.readouterr().out == "flaky: test_file.py::test_flaky_0 failed, and passed when it ran alone\n"


def test_tier_fails_when_test_fails_twice(tmp_path: Path) -> None:
    assert tier(tmp_path, FAILS, *flaky(1)) == 1
    assert report(tmp_path / "out") == 0


def test_too_many_failures_are_not_rerun(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert tier(tmp_path, *flaky(MOST_FLAKY + 1)) == 1
    assert "once more" not in capfd.readouterr().out


def test_flaky_tests_of_all_tiers_are_counted_together(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, count in {"one": MOST_FLAKY, "other": 1}.items():
        (tmp_path / f"{name}.flaky").write_text("a test\n" * count)
    assert report(tmp_path) == 1
    assert "3 tests are flaky; at most 2 may be" in capfd.readouterr().out


def test_flaky_test_of_earlier_run_is_forgotten(tmp_path: Path) -> None:
    assert tier(tmp_path, *flaky(1)) == 0
    assert tier(tmp_path, PASSES) == 0
    assert not (tmp_path / "out/tier.flaky").exists()


def test_tier_that_cannot_run_keeps_pytest_exit_code(tmp_path: Path) -> None:
    assert tier(tmp_path, "import nothing_of_this_name\n") == 2


def test_tier_that_leaves_failures_for_later_passes_and_again_runs_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert tier(tmp_path, PASSES, *flaky(1), later=True) == 0
    assert not (tmp_path / "out/tier.flaky").exists()
    assert again(tmp_path / "out") == 0
    assert capfd.readouterr().out.endswith("flaky: test_file.py::test_flaky_0 failed, and passed when it ran alone\n")


def test_run_fails_if_deferred_failure_fails_again(tmp_path: Path) -> None:
    assert tier(tmp_path, FAILS, later=True) == 0
    assert again(tmp_path / "out") == 1


def test_failure_of_test_whose_day_it_is_runs_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for the first test of its file, which has another day, and pytest found nothing to run."""
    monkeypatch.setenv(TODAY, str(date.fromordinal(1)))
    assert tier(tmp_path, IN_TURNS.format(days=4), later=True) == 0
    assert "test_in_turns[3]" in capfd.readouterr().out
    assert again(tmp_path / "out") == 1
    assert "AssertionError: 3" in capfd.readouterr().out
