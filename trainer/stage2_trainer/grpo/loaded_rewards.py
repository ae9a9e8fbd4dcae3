"""The rewards of a run by name: loaded, checked, and called.

Packages add rewards under the entry point `stage2.rewards`, and a configuration names those of its files, as
`FILE.py:FUNCTION`. That is code of the user, so each mistake in it is reported with its own file and line, and with
what to write instead.
"""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import linecache
import math
import numbers
import reprlib
import symtable
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from decimal import Decimal
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType, ModuleType
from typing import Any

from stage2_api.errors import ConfigError, Problem
from stage2_api.grpo import reward_file
from stage2_trainer.grpo.rewards import Function, Sample, known_rewards
from stage2_trainer.process.activity import ACTIVITY
from stage2_trainer.process.interrupt import Interrupted

ENTRY_POINTS = "stage2.rewards"
SIGNATURE = "(sample: Sample) -> float"
ANSWER_CHARACTERS = 200
_NO_FILES: Mapping[str, str] = MappingProxyType({})
_ONE_NUMBER = "return one number: stage2 calls a reward once for each answer"
_AWAITED = "stage2 does not await it; write `def {name}" + SIGNATURE + "`, which may call asyncio.run"


class RewardError(ConfigError):
    """A reward failed. All processes of the learner raise it."""


@dataclass(frozen=True)
class Reward:
    """A reward with its name and weight. `function` is pure.

    source: the entry point's MODULE:FUNCTION, or FILE.py:FUNCTION; None for a reward of stage2.
    """

    name: str
    weight: float
    function: Function
    source: str | None = None

    def __call__(self, sample: Sample) -> float:
        """Return the score of one sample, without the weight. Raises RewardError if there is none."""
        before = None if self.source is None else copy.deepcopy(sample.metadata)
        try:
            where = f"reward {self.name}, record {sample.record.sample_id}"
            # standard output has the records of a run, and the results of commands
            with ACTIVITY.doing(where), redirect_stdout(sys.stderr):
                value: object = self.function(sample)
        except (ConfigError, Interrupted, KeyboardInterrupt):
            raise
        except BaseException as error:  # a reward may also raise SystemExit or CancelledError
            raise self._failure(sample, error) from error
        score = _number(value)
        if score is None:
            returned, way_out = _not_a_number(value, self._function_name)
            raise self._error(sample, value, f"must return a number, and {self._place} returns {returned}", way_out)
        if not math.isfinite(score):
            way_out = f"return a number instead of {score}, such as 0.0, where there is nothing to divide by"
            raise self._error(sample, score, f"must return a finite number, and {self._place} returns {score}", way_out)
        if before is not None and not _equal(sample.metadata, before):
            rule = f"must not change its sample, and {self._place} changes the record's metadata"
            raise self._error(sample, sample.metadata, rule, "change a copy: copy.deepcopy(sample.metadata)")
        return score

    @property
    def _function_name(self) -> str:
        named = self.source or str(getattr(self.function, "__name__", self.name))
        return named.rpartition(":")[2].rpartition(".")[2]

    @property
    def _place(self) -> str:
        return f"`{self._function_name}` ({_defined_at(self.function) or self.source})"

    def _failure(self, sample: Sample, error: BaseException) -> RewardError:
        place = _own_line(error, self._module, self.function) or self._place
        way_out = "correct it"
        if isinstance(error, SystemExit):
            return self._error(sample, error, f"ends the process at {place}", "return a number, or raise an exception")
        if isinstance(error, ModuleNotFoundError):
            way_out = _install(error)
        return self._error(sample, error, f"failed at {place}", way_out)

    @property
    def _module(self) -> str:
        return self.source.partition(":")[0] if self.source else str(_definition(self.function).__module__)

    def _error(self, sample: Sample, value: object, rule: str, way_out: str) -> RewardError:
        tries = "`stage2 inspect CONFIG --rewards --sample N --response-file FILE` tries it on an answer"
        where = f"reward {self.name}, record {sample.record.sample_id}"
        answer = sample.text[:ANSWER_CHARACTERS]
        return RewardError([Problem(where, _shown(value), f"{rule}; the answer is {answer!r}", f"{way_out}; {tries}")])


def load_rewards(
    names: Sequence[str],
    weights: Sequence[float],
    root: str = "",
    *,
    files: Mapping[str, str] = _NO_FILES,
    runs_files: bool = True,
) -> list[Reward]:
    """Return the rewards of a run.

    root: path of the configuration in its file. files: texts of files with rewards. runs_files: whether to run these
    texts, which may be a stranger's; else rewards in them are read and left out.

    Raises ConfigError for all names that do not exist, that two packages have, or whose function cannot be called.
    """
    own = known_rewards()
    added: dict[str, list[EntryPoint]] = {}
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.value):
        added.setdefault(entry.name, []).append(entry)
    problems = [
        Problem(f"entry point {ENTRY_POINTS}", name, f"names a reward of stage2 ({added[name][0].value})", "rename it")
        for name in sorted(own.keys() & added.keys())
    ]
    rewards = []
    for index, (name, weight) in enumerate(zip(names, weights, strict=True)):
        try:
            if (file := reward_file(name)) is None:
                rewards.append(_load(name, weight, own, added))
            elif runs_files:
                rewards.append(Reward(name, weight, _from_file(name, file, files[file]), name))
            else:
                _check_text(name, file, files[file])
        except _WrongReward as wrong:
            problems.append(Problem(f"{root}rlhf.reward_funcs[{index}]", name, wrong.rule, wrong.way_out))
    if problems:
        raise ConfigError(problems)
    return rewards


class _WrongReward(Exception):
    """A reward that cannot be used: the rule that it breaks, and the way out."""

    def __init__(self, rule: str, way_out: str) -> None:
        super().__init__(rule)
        self.rule = rule
        self.way_out = way_out


def _load(name: str, weight: float, own: dict[str, Function], added: dict[str, list[EntryPoint]]) -> Reward:
    if name in own:
        return Reward(name, weight, own[name])
    if name not in added:
        raise _unknown(name, sorted({*own, *added}))
    entry, *others = added[name]
    if others:
        values = ", ".join(one.value for one in added[name])
        raise _WrongReward(f"{len(added[name])} packages add a reward of this name: {values}", "uninstall all but one")
    with redirect_stdout(sys.stderr):
        function = _imported(entry)
    _check_callable(function, entry)
    return Reward(name, weight, function, entry.value)


def _unknown(name: str, known: Sequence[str]) -> _WrongReward:
    rule = f"must be one of {', '.join(known)}"
    if name.endswith(".py"):
        return _WrongReward(f"a reward in a file is named with its function; it {rule}", f"write {name}:FUNCTION")
    near = difflib.get_close_matches(name, known, n=1)
    way_out = f"did you mean {near[0]}? Otherwise install" if near else "install"
    return _WrongReward(rule, f"{way_out} the package that adds {name} under the entry point {ENTRY_POINTS}")


def _imported(entry: EntryPoint) -> Any:
    """Return what an entry point names. Raises _WrongReward with the line of the package."""
    module = entry.value.partition(":")[0].strip()
    if not all(part.isidentifier() for part in module.split(".")):
        raise _WrongReward(f"its entry point is {entry.value!r}", "write MODULE:FUNCTION there, as in docs/grpo.md")
    with _wrong_code(module, _package(entry)):
        try:
            __import__(module)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{module}.".startswith(f"{error.name}."):
                rule = f"its entry point is {entry.value}, and there is no module {error.name}"
                raise _WrongReward(rule, f"install {_package(entry)} again, or correct its entry point") from error
            raise
    return _member(entry, sys.modules[module])


@contextmanager
def _wrong_code(module: str, whose: str) -> Iterator[None]:
    """Raise _WrongReward with the line of a module that cannot be imported. whose: code it is, for the way out."""
    try:
        yield
    except (KeyboardInterrupt, _WrongReward):
        raise
    except ModuleNotFoundError as error:
        rule = f"{_own_line(error, module) or module} needs {error.name}, which is not installed"
        raise _WrongReward(rule, _install(error)) from error
    except SyntaxError as error:
        rule = f"{error.filename}:{error.lineno} is no valid Python: {error.msg}"
        raise _WrongReward(rule, f"correct {whose}") from error
    except BaseException as error:  # a module may also call sys.exit
        rule = f"importing {module} failed at {_own_line(error, module) or module}: {_shown(error)}"
        raise _WrongReward(rule, f"correct {whose}") from error


def _check_text(name: str, file: str, text: str) -> None:
    """Raise _WrongReward for a text that is no Python, or defines nothing of the reward's name."""
    with _wrong_code(file, "it"):
        symbols = symtable.symtable(text, file, "exec").get_symbols()
    defined = [one.get_name() for one in symbols if one.is_assigned() or one.is_imported()]
    function = name.partition(":")[2]
    if function not in defined:
        raise _undefined(function, defined, f"{file} has no `{function}`", file)


def _from_file(name: str, file: str, text: str) -> Any:
    """Return the function that FILE.py:FUNCTION names. Raises _WrongReward."""
    entry = EntryPoint(name, name, ENTRY_POINTS)
    with redirect_stdout(sys.stderr), _wrong_code(file, "it"):
        module = _module(file, text)
    function = _member(entry, module)
    _check_callable(function, entry)
    return function


@functools.lru_cache(maxsize=64)
def _module(file: str, text: str) -> ModuleType:
    """Run the text of a file as a module. Its name, which no import can name, hides no other module."""
    module = ModuleType(file)
    module.__file__ = file
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # for tracebacks
    sys.modules[file] = module  # dataclasses look theirs up
    exec(compile(text, file, "exec"), module.__dict__)
    return module


def _undefined(name: str, known: Iterable[str], rule: str, file: str | None) -> _WrongReward:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean `{near[0]}`? Otherwise define" if near else "define"
    return _WrongReward(rule, f"{hint} `def {name}{SIGNATURE}` in {file}")


def _member(entry: EntryPoint, module: ModuleType) -> Any:
    """Return the part of a module that an entry point names; the module if it names none."""
    found: Any = module
    for name in entry.value.partition(":")[2].split("[")[0].strip().split("."):
        if not name:
            continue
        try:
            found = getattr(found, name)
        except AttributeError as error:
            named = "" if entry.value == entry.name else ", which its entry point names"
            rule = f"{module.__name__} has no `{name}`{named}"
            raise _undefined(name, dir(found), rule, module.__file__) from error
    return found


def _check_callable(function: Any, entry: EntryPoint) -> None:
    """Raise _WrongReward for what cannot be called with a sample, or does not return a number then."""
    name = entry.value.rpartition(":")[2].rpartition(".")[2]
    place = f"{entry.value} ({at})" if (at := _defined_at(function)) else entry.value
    written, definition = f"`def {name}{SIGNATURE}`", _definition(function)
    if isinstance(function, ModuleType):
        raise _WrongReward(f"{place} is a module, and not a function", f"write the entry point as {entry.value}:NAME")
    if isinstance(function, type):
        way_out = f"name an object of it, which `{name.lower()} = {name}()` creates in the module, or write {written}"
        raise _WrongReward(f"{place} is a class, and not a function", way_out)
    if not callable(function):
        raise _WrongReward(f"{place} is a {type(function).__name__}, and not a function", f"write {written}")
    if inspect.iscoroutinefunction(definition) or inspect.isasyncgenfunction(definition):
        raise _WrongReward(f"{place} is an `async def`", _AWAITED.format(name=name))
    if inspect.isgeneratorfunction(definition):
        raise _WrongReward(f"{place} has `yield`, so it returns no number", f"write {written} with `return`")
    if problem := _signature_problem(function):
        rule = f"is called with one argument, a Sample, and {place} takes {problem}"
        raise _WrongReward(rule, f"write {written}; functools.partial can set further arguments")


def _signature_problem(function: Callable[..., Any]) -> str | None:
    """Return the signature of a function that does not take one sample, and why not; None if it may."""
    own = inspect.getattr_static(type(function), "__call__", None)
    # inspect takes the first parameter of any `__call__` for the object
    called: Any = own.__get__(function, type(function)) if isinstance(own, (staticmethod, classmethod)) else function
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # of a function that is written in C
        return None
    try:
        signature.bind(None)
    except TypeError as error:
        return f"{signature} ({error})"
    return None


def _definition(function: Any) -> Any:
    """Return the function within wrappers, partial functions and objects with `__call__`."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    if not inspect.isroutine(function) and not isinstance(function, (type, ModuleType)) and callable(function):
        return inspect.unwrap(type(function).__call__)
    return function


def _defined_at(function: Any) -> str | None:
    """Return the file and line where a function, or a class, is defined; None if Python does not know."""
    found = _definition(function)
    if (code := getattr(found, "__code__", None)) is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    with suppress(TypeError, OSError):
        return f"{inspect.getsourcefile(found)}:{inspect.getsourcelines(found)[1]}" if inspect.isclass(found) else None
    return None


def _own_line(error: BaseException, module: str, function: Any = None) -> str | None:
    """Return the file and line of the reward's package where an error came up, not of a library that it calls.

    None where it came up in none. module: of the package. function: the reward, which may be defined elsewhere.
    """
    frames = [
        (frame.f_globals.get("__name__", ""), f"{frame.f_code.co_filename}:{line}", frame.f_code.co_filename)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    package = module.partition(".")[0]
    file = getattr(getattr(_definition(function), "__code__", None), "co_filename", None)
    own = [line for name, line, at in frames if name.partition(".")[0] == package or at == file]
    return own[-1] if own else None


def _equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except ValueError:  # an array has been put in, which compares by element
        return False


def _number(value: Any) -> float | None:
    """Return a value as a float; None if it is no number. NumPy's and PyTorch's scalars are numbers, text is not."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (numbers.Real, Decimal)):
        return None
    try:
        return float(value)
    except (OverflowError, ValueError):  # an integer beyond floats, and a signalling NaN
        return math.nan


def _not_a_number(value: object, name: str) -> tuple[str, str]:
    """Return what a reward returned instead of a number, and what to write."""
    if value is None:
        return "None", "end every path through it with `return` and a number"
    if isinstance(value, (str, bytes, bytearray)):
        return "text", "return the number itself: float(...)"
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()  # or Python warns that nobody has awaited it
        return f"a {type(value).__name__}", _AWAITED.format(name=name)
    return f"a value of type {type(value).__name__}", _ONE_NUMBER


def _install(error: ModuleNotFoundError) -> str:
    package = (error.name or "").partition(".")[0]
    return f"pip install {package} here and where the learner runs, on a cluster in spec.image"


def _package(entry: EntryPoint) -> str:
    return f"the package {entry.dist.name}" if entry.dist is not None else "its package"


def _shown(value: object) -> object:
    """Return a value for a message, even if its own text fails."""
    if value is None or isinstance(value, (str, bytes, float)):
        return value
    text = ""
    with suppress(Exception):
        text = str(value) if isinstance(value, BaseException) else reprlib.repr(value)
    return f"{type(value).__name__}: {text}".removesuffix(": ")
