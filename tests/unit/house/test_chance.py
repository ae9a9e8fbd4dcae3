"""No test fails by chance: what goes by the clock says why it may, as in `# by the clock: nobody answers`.

Without such a comment a test does not sleep outside a loop that looks for a condition, gives nothing less than ten
seconds to happen, sets no limit to seconds that it measured, and makes no error of warnings of every category: what
another test left behind is collected, and warned of, at any time.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
LEAST_S = 10.0
REASON = re.compile(r"# by the clock: \S")
DEADLINE = re.compile(r"timeout|deadline|within|patience|longest_s|limit_s|grace_s", re.IGNORECASE)
CLOCKS = {"time.monotonic", "time.perf_counter", "time.process_time", "time.time"}
FILTERS = {".filterwarnings", ".simplefilter"}
SLEEPS = {"time.sleep", "asyncio.sleep", "sleep"}
# calls whose deadline has no name: its place, and how many arguments there are then
PLACES = {
    **dict.fromkeys((".wait", ".join", ".result", ".settimeout", ".timeout", "patience", "Patience"), (0, 1)),
    "asyncio.wait_for": (1, 2),
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def called(node: ast.AST) -> str:
    """Return what a call calls: `name`, `object.name`, or `.name` of what a longer expression gives."""
    match node:
        case ast.Call(ast.Name(name)):
            return name
        case ast.Call(ast.Attribute(owner, name)):
            return f"{owner.id if isinstance(owner, ast.Name) else ''}.{name}"
    return ""


def deadlines(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the seconds within which something has to happen, as this node gives them."""
    match node:
        case ast.Call(args=args, keywords=keywords):
            yield from (one.value for one in keywords if DEADLINE.search(one.arg or ""))
            _, dot, name = called(node).rpartition(".")
            place, count = PLACES.get(called(node)) or PLACES.get(dot + name, (0, 0))
            if len(args) == count > 0:
                yield args[place]
            if name == "setattr" and isinstance(args[-2], ast.Constant) and DEADLINE.search(str(args[-2].value)):
                yield args[-1]
        case ast.Assign([target], value) | ast.AnnAssign(target, _, value):
            if value and DEADLINE.search(getattr(target, "id", "") or getattr(target, "attr", "")):
                yield value
        case ast.Dict(keys, values):
            keyed = [
                (key.value, value) for key, value in zip(keys, values, strict=True) if isinstance(key, ast.Constant)
            ]
            yield from (value for key, value in keyed if isinstance(key, str) and DEADLINE.search(key))
        case ast.BinOp(left, ast.Add(), right) if called(left) in CLOCKS:
            yield right
        case ast.arguments():
            last = [*node.posonlyargs, *node.args][::-1]
            named = [*zip(last, node.defaults[::-1], strict=False)]
            named += zip(node.kwonlyargs, node.kw_defaults, strict=True)
            yield from (default for one, default in named if default and DEADLINE.search(one.arg))


def seconds(node: ast.expr, constants: dict[str, ast.expr]) -> float | None:
    """Return the number that this expression is; None where a run decides it."""
    match node:
        case ast.Constant(int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.Name(name) if name in constants and not DEADLINE.search(name):  # those are reported where they stand
            return seconds(constants[name], constants)
        case ast.BinOp(left, ast.Mult() | ast.Div() as how, right):
            first, second = seconds(left, constants), seconds(right, constants)
            if first is not None and second is not None:
                return first * second if isinstance(how, ast.Mult) else first / second
    return None


def less(test: ast.AST) -> Iterator[ast.expr]:
    """Yield what a comparison wants to be less than something."""
    for node in ast.walk(test):
        if isinstance(node, ast.Compare):
            for left, how, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                if isinstance(how, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                    yield left if isinstance(how, ast.Lt | ast.LtE) else right


def looks(loop: ast.AST) -> bool:
    """Whether a loop ends with a condition, not with the clock or a count alone."""
    if any(isinstance(node, ast.Break | ast.Return) for node in ast.walk(loop)):
        return True
    by_clock = isinstance(loop, ast.While) and isinstance(loop.test, ast.Compare) and called(loop.test.left) in CLOCKS
    return isinstance(loop, ast.While) and not by_clock


def makes_every_warning_an_error(node: ast.AST) -> bool:
    """Whether a filter names no category: a mark's text, or a call of `warnings`."""
    _, dot, name = called(node).rpartition(".")
    if dot + name not in FILTERS:
        return False
    given = [one.value for one in node.args if isinstance(one, ast.Constant)]
    return "error" in given and len(node.args) == len(given) and not any(one.arg == "category" for one in node.keywords)


class Source:
    """A module of tests."""

    def __init__(self, text: str) -> None:
        self._text, self._tree = text, ast.parse(text)
        assigned = [one for one in self._tree.body if isinstance(one, ast.Assign)]
        self._constants = {one.targets[0].id: one.value for one in assigned if isinstance(one.targets[0], ast.Name)}

    def findings(self) -> list[tuple[int, str]]:
        """Return line and name of each wait without a reason, and of each reason without a wait."""
        reasons, found, used = self._reasons(), [], set[int]()
        for node, what in self._waits():
            here = reasons & set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            used |= here
            if not here:
                found.append((node.lineno, what))
        return sorted([*found, *((line, "nothing waits here") for line in reasons - used)])

    def _reasons(self) -> set[int]:
        if not REASON.search(self._text):
            return set()
        tokens = tokenize.generate_tokens(io.StringIO(self._text).readline)
        return {one.start[0] for one in tokens if one.type == tokenize.COMMENT and REASON.match(one.string)}

    def _waits(self) -> Iterator[tuple[ast.expr, str]]:
        for node in ast.walk(self._tree):
            if called(node) in SLEEPS and seconds(node.args[0], {}) != 0 and not self._polls(node):
                yield node, "sleep"
            for one in deadlines(node):
                if 0 < (seconds(one, self._constants) or 0) < LEAST_S and not self._polls(node):
                    yield one, "short deadline"
            if makes_every_warning_an_error(node):
                yield node, "warnings of every category"
            if isinstance(node, ast.Assert):
                limited = [one for one in less(node.test) if self._is_measured(one)]
                if limited and not self._polls(node):
                    yield node.test, "limit of measured seconds"

    def _is_measured(self, node: ast.expr) -> bool:
        """Whether these are seconds by a clock, here or where they were given their name."""
        match node:
            case ast.BinOp(left, ast.Sub(), right):
                return called(left) in CLOCKS or called(right) in CLOCKS
            case ast.Name(name):
                given = [one for one in ast.walk(self._function(node)) if isinstance(one, ast.Assign)]
                values = [one.value for one in given if ast.unparse(one.targets[0]) == name]
                return any(isinstance(one, ast.BinOp) and self._is_measured(one) for one in values)
        return False

    def _polls(self, node: ast.AST) -> bool:
        return any(isinstance(one, ast.While | ast.For) and looks(one) for one in self._around(node))

    def _function(self, node: ast.AST) -> ast.AST:
        return [node, *self._around(node)][-1]

    def _around(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self._parents and not isinstance(node, FUNCTIONS):
            node = self._parents[node]
            yield node

    @cached_property
    def _parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self._tree) for child in ast.iter_child_nodes(node)}


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ("time.sleep(1)", "sleep"),
        ("await asyncio.sleep(pause)", "sleep"),
        ("for one in many:\n    time.sleep(0.1)", "sleep"),
        ("while time.monotonic() < end:\n    time.sleep(0.1)", "sleep"),
        ("while not done():\n    def answer():\n        time.sleep(0.1)", "sleep"),
        ("ask(timeout=5)", "short deadline"),
        ("ask({'timeout_s': 5})", "short deadline"),
        ("SHORT = 2.0\nask(deadline_s=2 * SHORT)", "short deadline"),
        ("PATIENCE_S = 9.5\nask(timeout=PATIENCE_S)", "short deadline"),
        ("class Slow:\n    timeout_s: float = 1.0", "short deadline"),
        ("client.timeout_s = 3", "short deadline"),
        ("def ask(what, within_s=3): ...", "short deadline"),
        ("def ask(*, within_s=3): ...", "short deadline"),
        ("there.wait(3)", "short deadline"),
        ("await asyncio.wait_for(answer(), 3)", "short deadline"),
        ("Patience(3)", "short deadline"),
        ("end = time.monotonic() + 3", "short deadline"),
        ("monkeypatch.setattr(wire, 'ASK_TIMEOUT_S', 3)", "short deadline"),
        ("assert time.monotonic() - began < 60", "limit of measured seconds"),
        ("def test():\n    took = time.time() - began\n    assert limit >= took > 0", "limit of measured seconds"),
        ("@pytest.mark.filterwarnings('error')\ndef test(): ...", "warnings of every category"),
        ("warnings.simplefilter('error')", "warnings of every category"),
        ("ask(60)  # by the clock: an hour", "nothing waits here"),
    ],
)
def test_timing_dependent_code_is_found(wrong, what):
    assert [found for _, found in Source(wrong).findings()] == [what]


@pytest.mark.parametrize(
    "right",
    [
        "while not done():\n    time.sleep(0.1)",
        "for _ in range(9):\n    if done():\n        break\n    time.sleep(0.1)",
        "while not done():\n    thread.join(0.1)",
        "await asyncio.sleep(0)",
        "engine.sleep(2)",
        "time.sleep(1)  # by the clock: so long it holds the lock",
        "ask(\n    timeout=0.1,  # by the clock: nobody answers\n)",
        "ask(timeout=10)",
        "ask(timeout=None)",
        "ask(timeout=0)",
        "ask(timeout=2 * crowding())",
        "there.wait(60)",
        "', '.join(names)",
        "receiver.join(info, 1)",
        "assert time.monotonic() - began >= 0.3",
        "while not done():\n    assert time.monotonic() < end",
    ],
)
def test_timing_independent_code_is_not_reported(right):
    assert Source(right).findings() == []


def test_tests_depend_on_timing_only_with_stated_reason():
    found = [
        f"{module.relative_to(TESTS)}:{line}: {what}"
        for module in sorted(TESTS.rglob("*.py"))
        for line, what in Source(module.read_text(encoding="utf-8")).findings()
    ]
    assert found == [], "wait for a condition, give it ten seconds, or say `# by the clock: why`; see docs/testing.md"
