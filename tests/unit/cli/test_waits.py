"""What a person sees who waits: `stage2 run` without a terminal, and the lines of commands on standard error."""

import ast
import json
import subprocess
import sys
import time
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest

from stage2_cli import run
from stage2_cli.run import Watcher, console
from stage2_trainer.process.activity import Activity
from tests.support.patience import Patience


@pytest.fixture(autouse=True)
def captured():
    """The console prints to where pytest looks."""
    console.cache_clear()
    yield
    console.cache_clear()


@pytest.fixture
def quick(monkeypatch):
    """The process's activity has lines in quick succession."""
    monkeypatch.setattr(run, "ACTIVITY", Activity(every_s=0.2))


def shown(capsys, report, *, lines=0):
    """Return what a person sees of a learner that gives this report: of one look, or until there are so many lines."""
    out, patience = "", Patience(60)
    with closing(Watcher(progress=lambda: report and json.dumps(report).encode())) as watcher:
        while True:
            watcher.refresh()
            out += capsys.readouterr().out
            if out.count("\n") >= lines:
                return out
            assert not patience.ended(), out
            time.sleep(0.02)


def test_loading_learner_is_shown_with_activity_repeatedly(quick, capsys):
    doing = "first evaluation, before training; generating: 37 of 200 answers"
    first, *again = shown(capsys, {"phase": "rollout", "message": f"{doing} (40 s)"}, lines=3).splitlines()
    assert first == f"learner: rollout: {doing}"
    assert {line.rpartition(" (")[0] for line in again} == {first}


def test_step_activity_is_shown_only_once_it_lasts(capsys):
    short = {"phase": "training", "step": 3, "maxSteps": 60}
    assert shown(capsys, short) == ""
    lasts = shown(capsys, {**short, "message": "step 4 of 60 (20 s)"})
    assert lasts == "learner: training, step 3 of 60: step 4 of 60\n"


def test_silent_learner_is_shown_as_not_reporting(quick, capsys):
    assert "learner: starting; it does not report (" in shown(capsys, None, lines=1)


def test_failure_reason_is_left_to_log(capsys):
    assert shown(capsys, {"phase": "failed", "message": "line\nof\nerror"}) == "learner: failed\n"


def test_long_command_reports_activity_on_stderr(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
import stage2_cli.main as main
from stage2_trainer.process.activity import ACTIVITY
main.FIRST_LINE_S = 0.2
def program():
    with ACTIVITY.doing("reading headers", 7, "images"):
        while not Path(sys.argv[1]).read_text():
            time.sleep(0.01)
    print("result")
main.call(program)
"""
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-c", code, str(errors)], stdout=subprocess.PIPE, stderr=file, check=True
        )
    assert done.stdout == b"result\n"
    assert errors.read_text().startswith("reading headers: 0 of 7 images (")


ROOT = Path(__file__).parents[3]
HOMES = {"api": "crds", "trainer": "trainer", "report": "report", "cli": "cli"}
HEAVY = ("torch", "transformers", "peft")


def named_modules(node: ast.AST) -> list[str]:
    """Return the modules that a statement imports, and what it takes from them."""
    if isinstance(node, ast.Import):
        return [one.name for one in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
    return []


@cache
def is_heavy(module: str) -> bool:
    """Whether importing a module imports PyTorch or transformers."""
    package, *parts = module.split(".")
    if package in HEAVY:
        return True
    home = HOMES.get(package.removeprefix("stage2_"))
    file = ROOT.joinpath(home, package, *parts).with_suffix(".py") if home else Path("lost")
    return file.is_file() and any(is_heavy(name) for node in parsed(file).body for name in named_modules(node))


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def unnamed_imports(file: Path) -> list[str]:
    """Return the heavy imports in a file's functions that no `ACTIVITY.doing` names."""
    tree = parsed(file)
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.With))
    naming = (block for block in blocks if any("ACTIVITY.doing" in ast.unparse(item) for item in block.items))
    named = {id(part) for block in naming for part in ast.walk(block)}
    inner = (
        node for function in ast.walk(tree) if isinstance(function, ast.FunctionDef) for node in ast.walk(function)
    )
    return [
        f"{file.name}:{node.lineno}"
        for node in inner
        if isinstance(node, ast.Import | ast.ImportFrom)
        and id(node) not in named
        and any(map(is_heavy, named_modules(node)))
    ]


def test_commands_name_the_import_of_heavy_libraries() -> None:
    """`stage2 init` said nothing for 43 seconds on a busy machine."""
    files = [*ROOT.glob("cli/stage2_cli/*.py"), *ROOT.glob("report/stage2_report/*.py")]
    files += ROOT.glob("trainer/stage2_trainer/infer/*.py")
    assert is_heavy("stage2_trainer.learner.build")
    assert [line for file in sorted(files) for line in unnamed_imports(file)] == []
