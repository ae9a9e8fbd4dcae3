"""The page of the plan: a step that is taken too early does not type-check."""

import ast
import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage2_controller.plan import page
from stage2_controller.plan.job_pass import JobPass

SOURCE = Path(str(page.__file__)).read_text(encoding="utf-8")
CHECK = (sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=skip", "--ignore-missing-imports")


def body(tree: ast.Module) -> list[ast.stmt]:
    """Return the statements of `plan`."""
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "plan")
    return function.body


def written(step: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(step) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def read(step: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(step) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


STEPS = body(ast.parse(SOURCE))
RESULTS = set().union(*map(written, STEPS))


def too_early() -> Iterator[tuple[str, str]]:
    """Yield each step that reads a result, moved before the step that has it: a name and the source of the page."""
    for later, step in enumerate(STEPS):
        for earlier, source in enumerate(STEPS[:later]):
            for name in sorted(written(source) & read(step)):
                tree = ast.parse(SOURCE)
                steps = body(tree)
                steps.insert(earlier, steps.pop(later))
                yield f"step_of_line_{step.lineno}_before_{name}", ast.unparse(tree)


def test_planning_step_used_before_its_inputs_does_not_type_check(tmp_path: Path) -> None:
    """A place that was chosen before the question of quota once passed all checks: no quota meant none is needed."""
    variants = dict(too_early())
    assert any(name.endswith("_before_admission") for name in variants)
    assert len(variants) >= 10
    for name, text in {**variants, "unchanged": SOURCE}.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    command = (*CHECK, f"--cache-dir={tmp_path / 'cache'}", *map(str, sorted(tmp_path.glob("*.py"))))
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    refused = {Path(line.split(":")[0]).stem for line in printed.splitlines() if "[used-before-def]" in line}
    assert refused == set(variants), printed


def passed_on() -> set[tuple[str, str]]:
    """Return the functions to which `plan` passes results, each with the parameter that takes one."""
    calls = [node for step in STEPS for node in ast.walk(step) if isinstance(node, ast.Call)]
    found = {
        (ast.unparse(call.func), keyword.arg)
        for call in calls
        for keyword in call.keywords
        if keyword.arg and read(ast.Expr(keyword.value)) & (RESULTS - {"job"})
    }
    return {one for one in found if one[0] != "Plan"}


@pytest.mark.parametrize(("function", "parameter"), sorted(passed_on()))
def test_planning_step_requires_each_result_as_keyword(function: str, parameter: str) -> None:
    found = inspect.signature(eval(function, vars(page))).parameters[parameter]
    assert (found.kind, found.default) == (found.KEYWORD_ONLY, found.empty)


def test_job_pass_inputs_are_required_and_frozen() -> None:
    assert [field.name for field in dataclasses.fields(JobPass) if field.default is not dataclasses.MISSING] == []
    with pytest.raises(dataclasses.FrozenInstanceError):
        JobPass.__setattr__(object.__new__(JobPass), "observed", None)
