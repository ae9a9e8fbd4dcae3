"""What a model folder makes those do that load it: unpickle weights, run Python of its own. Each only when asked for.

Loaders are told the same (`trust_remote_code`, `use_safetensors`): what is looked for here gives the error its words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stage2_api.errors import ConfigError, Problem
from stage2_api.model import Model

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
CODE_KEY = "auto_map"
GENERATE = "custom_generate/generate.py"
MODEL_PATH = "model.model"
PICKLED = "has its weights in {0}, a pickle, and no safetensors: a pickle may name any command"
CODE = "has code of its own ({0}), which would run in learner and servers"
IN_SAFETENSORS = "save it again as safetensors, or give a checkpoint that has them"
WITHOUT_CODE = "give a checkpoint without it"


def model_problems(model: Model, folder: Path) -> list[Problem]:
    """Return what a run may not load of its model's folder, with the key that asks for it as the way out."""
    return [
        *(
            Problem(MODEL_PATH, str(folder), rule, f"{IN_SAFETENSORS}, or set model.allow_pickled_weights: true")
            for rule in ([] if model.allow_pickled_weights else _pickled(folder))
        ),
        *(
            Problem(
                MODEL_PATH,
                str(folder),
                rule,
                f"{WITHOUT_CODE}, or, where you have read the code, set model.allow_remote_code: true",
            )
            for rule in ([] if model.allow_remote_code else _code(folder))
        ),
    ]


def require_trusted(model: Model, folder: Path) -> None:
    """Raise ConfigError for what `model_problems` finds."""
    if problems := model_problems(model, folder):
        raise ConfigError(problems)


def require_plain(folder: Path, *, path: str, value: str) -> None:
    """Raise ConfigError where a folder has pickled weights alone, or code: no command of ours loads either.

    path, value: the argument that led to the folder.
    """
    problems = [Problem(path, value, rule, IN_SAFETENSORS) for rule in _pickled(folder)]
    problems += [Problem(path, value, rule, WITHOUT_CODE) for rule in _code(folder)]
    if problems:
        raise ConfigError(problems)


def _pickled(folder: Path) -> list[str]:
    """Return the rule that pickled weights break; nothing where there are safetensors, which loaders then take."""
    if any(folder.glob("*.safetensors")):
        return []
    found = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    return [PICKLED.format(found[0])] if found else []


def _code(folder: Path) -> list[str]:
    """Return the rules that code breaks, one for each file that names some."""
    found = [f"{CODE_KEY} in {file.name}" for file in sorted(folder.glob("*config*.json")) if _names_code(file)]
    found += [GENERATE] if (folder / GENERATE).exists() else []
    return [CODE.format(one) for one in found]


def _names_code(file: Path) -> bool:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):  # whoever loads it says so
        return False
    return any(CODE_KEY in one for one in _objects(content))


def _objects(content: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects of a JSON document."""
    left = [content]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            yield one
            left += one.values()
        elif isinstance(one, list):
            left += one
