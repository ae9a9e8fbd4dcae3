"""A reward of a package that is wrong is refused: when it is loaded, or where it first scores.

Every message has the reward's own file and line, and what to write instead.
"""

import re
import signal

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.data.records import Record
from stage2_trainer.grpo.loaded_rewards import load_rewards
from stage2_trainer.grpo.rewards import Sample
from stage2_trainer.matching import GTObject
from stage2_trainer.process.interrupt import Interrupt, Interrupted
from tests.unit.trainer.grpo.reward_package import install

CODE = """\
import asyncio
import functools
import sys
from collections import deque
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch


def plain(sample):
    return 0.5


def none(sample):
    if sample.text == "never":
        return 1.0


def text(sample):
    return "0.5"


def octets(sample):
    return b"0.5"


def not_finite(sample):
    return float("nan")


def infinite(sample):
    return np.float32("inf")


def huge(sample):
    return 10**400


def signalling(sample):
    return Decimal("sNaN")


def several(sample):
    return [0.5, 0.25]


def one_in_a_list(sample):
    return [0.5]


def array(sample):
    return np.array([0.5])


def mapping(sample):
    return {"score": 0.5}


def imaginary(sample):
    return 0.5j


def coroutine(sample):
    async def score():
        return 0.5

    return score()


def ended(sample):
    sys.exit(3)


def cancelled(sample):
    raise asyncio.CancelledError


def stopped(sample):
    raise StopIteration


def divides(sample):
    return (
        1 / (len(sample.answer.objects) * 0)
    )


def helper(values):
    return values["nope"]


def looks_up(sample):
    return helper(sample.metadata)


def changes(sample):
    sample.metadata["seen"] = True
    return 0.5


def changes_below(sample):
    sample.metadata["tags"].append("seen")
    return 0.5


def replaces(sample):
    sample.metadata["tags"] = np.array([1, 2])
    return 0.5


def overwrites(sample):
    sample.scored.iou[:] = 0
    return 0.5


def lazy(sample):
    import package_that_nobody_has
    return 0.5


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError


def unprintable(sample):
    raise Unprintable


class Odd:
    def __repr__(self):
        raise RuntimeError


def odd(sample):
    return Odd()


def logged(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper


@logged
def decorated(sample):
    raise ValueError("in the decorated function")


class Callable:
    def __call__(self, sample):
        raise ValueError("in an object")


called = Callable()
bound = functools.partial(lambda scale, sample: 1 / 0, 2.0)


@functools.cache
def remembered(sample):
    return 1.0



two = lambda sample, extra: 1.0


def no_parameter():
    return 1.0


def by_keyword(*, sample):
    return 1.0


def needs_keyword(sample, *, scale):
    return 1.0


def of_trl(completions, solution, **kwargs):
    return [1.0 for _ in completions]


async def later(sample):
    return 1.0


async def yields_later(sample):
    yield 1.0


def yields(sample):
    yield 1.0


class LaterObject:
    async def __call__(self, sample):
        return 1.0


later_object = LaterObject()
later_bound = functools.partial(later)
bound_away = functools.partial(plain, None)


class Reward:
    def __call__(self, sample):
        return 1.0


number = 0.5
unset = None
"""
FILE = r"/their_rewards\.py:{line}"


def line_of(text: str) -> int:
    """The number of the first line of the package that contains a text."""
    return next(number for number, line in enumerate(CODE.splitlines(), 1) if text in line)


RECORD = Record(6, "train.jsonl:7", (), 96, 96, (GTObject("a", "bbox", (0, 0, 9, 9)),), metadata={"tags": []})
ANSWER = '{"object_1": {"desc": "a", "bbox_2d": ["<|coord_0|>", "<|coord_0|>", "<|coord_9|>", "<|coord_9|>"]}}'


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    """A function that installs the package and loads one of its rewards."""

    def load(name):
        install(tmp_path, monkeypatch, CODE, [name])
        (reward,) = load_rewards([f"theirs.{name.partition('=')[0]}"], [1.0])
        return reward

    return load


CALLS = [
    ("none", "None", "def none", r"returns None", r"end every path .* with `return` and a number"),
    ("text", "'0.5'", "def text", r"returns text", r"return the number itself: float\("),
    ("octets", "b'0.5'", "def octets", r"returns text", r"float\("),
    ("not_finite", "nan", "def not_finite", r"finite", r"instead of nan"),
    ("infinite", "inf", "def infinite", r"finite", r"instead of inf"),
    ("huge", "", "def huge", r"finite", r"return"),
    ("signalling", "", "def signalling", r"finite", r"return"),
    (
        "several",
        "list: [0.5, 0.25]",
        "def several",
        r"returns a value of type list",
        r"one number.* once for each answer",
    ),
    ("one_in_a_list", "list: [0.5]", "def one_in_a_list", r"returns a value of type list", r"one number"),
    ("array", "ndarray", "def array", r"returns a value of type ndarray", r"one number"),
    ("mapping", "dict", "def mapping", r"returns a value of type dict", r"one number"),
    ("imaginary", "0.5j", "def imaginary", r"returns a value of type complex", r"one number"),
    ("coroutine", "coroutine", "def coroutine", r"returns a coroutine", r"asyncio\.run"),
    ("odd", "Odd", "def odd", r"returns a value of type Odd", r"one number"),
    ("ended", "SystemExit: 3", "sys.exit(3)", r"ends the process", r"return a number, or raise"),
    ("cancelled", "CancelledError", "raise asyncio.CancelledError", r"failed", r"correct"),
    ("stopped", "StopIteration", "raise StopIteration", r"failed", r"correct"),
    ("divides", "ZeroDivisionError: division by zero", "1 / (len", r"failed", r"correct"),
    ("looks_up", "KeyError: 'nope'", 'values["nope"]', r"failed", r"correct"),
    ("unprintable", "Unprintable", "raise Unprintable", r"failed", r"correct"),
    ("decorated", "ValueError: in the decorated function", 'raise ValueError("in the dec', r"failed", r"correct"),
    ("called", "ValueError: in an object", 'raise ValueError("in an', r"failed", r"correct"),
    ("bound", "ZeroDivisionError", "bound = functools", r"failed", r"correct"),
    ("remembered", "unhashable type: 'dict'", "@functools.cache", r"failed", r"correct"),
    ("lazy", "package_that_nobody_has", "import package_that", r"failed", r"install package_that_nobody_has"),
    ("changes", "", "def changes", r"changes the record's metadata", r"copy\.deepcopy\(sample\.metadata\)"),
    ("changes_below", "", "def changes_below", r"changes the record's metadata", r"copy\.deepcopy"),
    ("replaces", "", "def replaces", r"changes the record's metadata", r"copy\.deepcopy"),
    ("overwrites", "read-only", "sample.scored.iou[:]", r"failed", r"correct"),
]


@pytest.mark.filterwarnings("error::RuntimeWarning")  # of a coroutine that nobody awaits
@pytest.mark.parametrize(("name", "value", "place", "rule", "way_out"), CALLS, ids=[case[0] for case in CALLS])
def test_failing_reward_error_names_its_line_and_fix(loaded, name, value, place, rule, way_out):
    reward = loaded(name)
    sample = Sample(ANSWER, Record(**{**vars(RECORD), "metadata": {"tags": []}}))
    with pytest.raises(ConfigError) as failed:
        reward(sample)
    (problem,) = failed.value.problems
    assert problem.path == f"reward theirs.{name}, record train.jsonl:7"
    assert value in str(problem.shown_value)
    assert re.search(FILE.format(line=line_of(place)) + r"\b", problem.rule), problem.rule
    assert re.search(rule, problem.rule), problem.rule
    assert re.search(way_out, problem.way_out), problem.way_out
    assert f"the answer is {ANSWER[:20]!r}"[:-1] in problem.rule
    assert "`stage2 inspect CONFIG --rewards" in problem.way_out


LOADS = [
    ("two", "two = lambda", r"\(sample, extra\)", r"def two\(sample: Sample\) -> float"),
    ("no_parameter", "def no_parameter", r"one argument, a Sample.*\(\)", r"def no_parameter\(sample: Sample\)"),
    ("by_keyword", "def by_keyword", r"\(\*, sample\)", r"def by_keyword\(sample: Sample\)"),
    ("needs_keyword", "def needs_keyword", r"missing a required.*'scale'", r"functools\.partial"),
    ("of_trl", "def of_trl", r"'solution'", r"def of_trl\(sample: Sample\)"),
    ("bound_away", "def plain", r"too many positional", r"def bound_away\(sample: Sample\)"),
    ("later", "async def later", r"async def", r"def later\(sample: Sample\) -> float.*asyncio\.run"),
    ("yields_later", "async def yields_later", r"async def", r"asyncio\.run"),
    ("later_object", "async def __call__", r"async def", r"asyncio\.run"),
    ("later_bound", "async def later", r"async def", r"asyncio\.run"),
    ("yields", "def yields(", r"`yield`", r"`return`"),
    ("Reward", "class Reward", r"a class", r"reward = Reward\(\)"),
    ("number", None, r"a float.*not a function", r"def number\(sample: Sample\) -> float"),
    ("unset", None, r"a NoneType.*not a function", r"def unset\(sample: Sample\) -> float"),
    ("whole=their_rewards", None, r"a module.*not a function", r"their_rewards:NAME"),
    ("gone", None, r"their_rewards has no `gone`", r"def gone\(sample: Sample\) -> float"),
    ("near=their_rewards:plan", None, r"their_rewards has no `plan`", r"did you mean `plain`\?"),
    ("elsewhere=nobody_has_this:f", None, r"no module nobody_has_this", r"install"),
    ("odd=their rewards:plain", None, r"'their rewards:plain'", r"MODULE:FUNCTION"),
]


@pytest.mark.parametrize(("name", "place", "rule", "way_out"), LOADS, ids=[case[0] for case in LOADS])
def test_uncallable_reward_is_refused_on_loading(loaded, name, place, rule, way_out):
    with pytest.raises(ConfigError) as refused:
        loaded(name)
    (problem,) = refused.value.problems
    assert (problem.path, problem.value) == ("rlhf.reward_funcs[0]", f"theirs.{name.partition('=')[0]}")
    if place is not None:
        assert re.search(FILE.format(line=line_of(place)) + r"\b", problem.rule), problem.rule
    assert re.search(rule, problem.rule), problem.rule
    assert re.search(way_out, problem.way_out), problem.way_out


BROKEN = [
    ("def f(sample:\n    return 1\n", r":1\b.*'\(' was never closed|:1\b.*invalid syntax", r"correct"),
    ("import numpy\n\nimport package_that_nobody_has\n", r":3\b.*needs package_that_nobody_has", r"pip install"),
    ("from numpy import nothing_there\n", r":1\b.*cannot import name 'nothing_there'", r"correct"),
    ("x = 1\ny = x / 0\n", r":2\b.*ZeroDivisionError: division by zero", r"correct"),
    ("import sys\nsys.exit('no licence')\n", r":2\b.*SystemExit: no licence", r"correct"),
    ("import their_rewards_of_a_circle as one\n", r":1\b.*needs their_rewards_of_a_circle", r"pip install"),
]


@pytest.mark.parametrize(("code", "rule", "way_out"), BROKEN)
def test_unimportable_reward_package_is_refused_with_failing_line(tmp_path, monkeypatch, code, rule, way_out):
    install(tmp_path, monkeypatch, code, ["f"])
    with pytest.raises(ConfigError) as refused:
        load_rewards(["theirs.f"], [1.0])
    (problem,) = refused.value.problems
    assert re.search(r"/their_rewards\.py" + rule, problem.rule), problem.rule
    assert re.search(way_out, problem.way_out), problem.way_out


def test_wrong_rewards_are_all_reported_at_once(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, CODE, ["two", "plain", "later"])
    with pytest.raises(ConfigError) as refused:
        load_rewards(["theirs.two", "theirs.plain", "theirs.later", "objects.fone"], [1.0] * 4, root="spec.config.")
    found = [problem.path for problem in refused.value.problems]
    assert sorted(found) == [f"spec.config.rlhf.reward_funcs[{index}]" for index in (0, 2, 3)]


def test_two_packages_with_same_reward_name_are_refused(tmp_path, monkeypatch):
    for module in ("their_rewards", "other_rewards"):
        install(tmp_path, monkeypatch, CODE, ["plain"], module)
    with pytest.raises(ConfigError, match=r"theirs\.plain.*other_rewards:plain.*their_rewards:plain"):
        load_rewards(["theirs.plain"], [1.0])


def test_reward_file_without_function_name_is_refused_with_advice():
    with pytest.raises(ConfigError) as refused:
        load_rewards(["rewards.py"], [1.0])
    (problem,) = refused.value.problems
    assert "a reward in a file is named with its function" in problem.rule
    assert problem.way_out == "write rewards.py:FUNCTION"


NUMBERS = """\
from decimal import Decimal
from fractions import Fraction
import functools
import numpy as np
import torch
true = lambda sample: True
whole = lambda sample: 2
decimal = lambda sample: Decimal("0.5")
fraction = lambda sample: Fraction(1, 2)
float32 = lambda sample: np.float32(0.5)
int8 = lambda sample: np.int8(3)
truth = lambda sample: np.bool_(True)
array = lambda sample: np.array(0.5)
tensor = lambda sample: torch.tensor(0.5)
gradient = lambda sample: torch.tensor(0.5, requires_grad=True)
half = lambda sample: torch.tensor(0.5, dtype=torch.bfloat16)
bound = functools.partial(lambda scale, sample: scale * 0.5, 3.0)
default = lambda sample, extra=0.25: extra
anything = lambda *args, **kwargs: len(args) + len(kwargs)
class Scaled:
    def __init__(self, by): self.by = by
    def __call__(self, sample, /): return 0.5 * self.by
    def score(self, sample): return 0.25 * self.by
    @staticmethod
    def fixed(sample): return 0.125
class Static:
    @staticmethod
    def __call__(sample): return 0.625
class OfClass:
    @classmethod
    def __call__(cls, sample): return 0.375
scaled = Scaled(3)
method = scaled.score
static, of_class = Static(), OfClass()
"""
SCORES = {
    "true": 1.0, "whole": 2.0, "decimal": 0.5, "fraction": 0.5, "float32": 0.5, "int8": 3.0, "truth": 1.0,
    "array": 0.5, "tensor": 0.5, "gradient": 0.5, "half": 0.5, "bound": 1.5, "default": 0.25, "anything": 1.0,
    "scaled": 1.5, "method": 0.75, "fixed=their_rewards:Scaled.fixed": 0.125,
    "static": 0.625, "of_class": 0.375,
}  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
def test_numeric_score_of_any_type_is_accepted(tmp_path, monkeypatch, name):
    install(tmp_path, monkeypatch, NUMBERS, [name])
    (reward,) = load_rewards([f"theirs.{name.partition('=')[0]}"], [1.0])
    score = reward(Sample(ANSWER, RECORD))
    assert (type(score), score) == (float, SCORES[name])


def test_reward_prints_go_to_standard_error(tmp_path, monkeypatch, capsys):
    install(tmp_path, monkeypatch, "print('loads')\ndef f(sample):\n    print('scores', end='')\n    return 1\n", ["f"])
    (reward,) = load_rewards(["theirs.f"], [1.0])
    assert reward(Sample(ANSWER, RECORD)) == 1.0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "loads\nscores"


def test_ctrl_c_within_reward_is_not_reported_as_reward_error(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "def f(sample):\n    raise KeyboardInterrupt\n", ["f"])
    (reward,) = load_rewards(["theirs.f"], [1.0])
    with pytest.raises(KeyboardInterrupt):
        reward(Sample(ANSWER, RECORD))


def test_stop_signal_within_reward_is_not_reported_as_reward_error(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "import signal\ndef f(sample):\n    signal.raise_signal(signal.SIGTERM)\n", ["f"])
    (reward,) = load_rewards(["theirs.f"], [1.0])
    interrupt, before = Interrupt(), signal.getsignal(signal.SIGTERM)
    interrupt.listen()
    try:
        with interrupt.stoppable(), pytest.raises(Interrupted):
            reward(Sample(ANSWER, RECORD))
    finally:
        signal.signal(signal.SIGTERM, before)
