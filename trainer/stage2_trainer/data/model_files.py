"""The files of a model folder, without reading its tensors: where they are, what they are, and whether to trust them.

Pickled weights, and Python of the model's own, are loaded only if a person asks for it. The loaders get the same
switches (`use_safetensors`, `trust_remote_code`); the checks here give an error that explains it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stage2_api.errors import ConfigError, Problem, kind_of, refused
from stage2_api.model import Model
from stage2_api.runconfig import HUB_NAME, RunConfig
from stage2_trainer.data.files import irregular_file, read_regular
from stage2_trainer.data.model_costs import flaw_of_costs

logger = logging.getLogger(__name__)

FETCHED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""Files of a hub's repository that a run needs: weights, configuration, tokenizer, chat template."""
WEIGHT_INDEX = "model.safetensors.index.json"
DESCRIPTIONS = ("*config.json", "tokenizer.json", "chat_template.json", WEIGHT_INDEX)
"""Files that hold a JSON object each, if they exist."""
SAMPLES = 16
SAMPLE_BYTES = 2**16
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
ADAPTER = "adapter_config.json"
LARGEST_DESCRIPTION = 256 << 20  # bytes; a large tokenizer.json has 20 million
CODE_KEY = "auto_map"
GENERATE = "custom_generate/generate.py"
MODEL_PATH = "model.model"
PICKLED = "has its weights in {0}, a pickle, and no safetensors: a pickle may name any command"
CODE = "has code of its own ({0}), which would run in learner and servers"
IN_SAFETENSORS = "save it again as safetensors, or give a checkpoint that has them"
INTACT = "copy or download the model again"
WITHOUT_CODE = "give a checkpoint without it"
FROM_STAGE_1 = (
    "train stage 1 first and export it to this folder (stage2 export RUN --output FOLDER), or correct the path"
)
FROM_STOCK = "let `stage2 prepare MODEL --output FOLDER` write it from a stock Qwen3-VL, or correct the path"


def model_path(model: str) -> Path:
    """Return the folder of a model: a path, or a hub's name whose files are in the cache. Raises OSError."""
    if os.path.isdir(model):
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (OSError, ValueError) as error:  # not in the cache, or not a valid name
        raise FileNotFoundError(f"{model} is no folder here, and no model in the cache") from error


def is_mixture(folder: Path) -> bool:
    """Whether a whole model folder is that of a mixture of experts."""
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type", "")
    return str(kind).endswith("_moe")


def with_local_model(config: RunConfig) -> RunConfig:
    """Return the configuration with its model's folder in place of a hub's name; see `fetched_model`.

    Raises ConfigError if there is no such folder, neither hub nor cache has it, or it must not be loaded as it is
    (`require_trusted`).
    """
    folder = fetched_model(config.model.model, origin=_origin(config))
    require_folder(config, folder)
    require_trusted(config.model, folder)
    if str(folder) == config.model.model:
        return config
    logger.info("model.model %s lies in %s", config.model.model, folder)
    return config.model_copy(update={"model": config.model.model_copy(update={"model": str(folder)})})


def require_folder(config: RunConfig, folder: Path) -> None:
    """Raise ConfigError for a folder without a model, such as that of an export which has not been made yet."""
    if not (folder / "config.json").is_file():
        rule = "holds no model: there is no config.json" if folder.is_dir() else "there is no such folder"
        raise refused(MODEL_PATH, config.model.model, rule, _origin(config))


def is_on_hub(model: str) -> bool:
    """Whether a model is to be fetched from a hub: it has a hub's name, and is no path that exists."""
    return not os.path.exists(model) and HUB_NAME.fullmatch(model) is not None


def _origin(config: RunConfig) -> str:
    """Return where the model of a run comes from."""
    return FROM_STOCK if config.is_supervised else FROM_STAGE_1


def fetched_model(model: str, *, path: str = "model.model", origin: str = "give the folder of a checkpoint") -> Path:
    """Return the folder of a model: a path as it is, or the newest version of a hub's name, which is fetched once.

    All processes that share a cache (`HF_HOME`) share the files. If the hub cannot be reached, the cached model is used
    if it is whole. path, origin: the key that names the model, and where a model folder comes from, for errors.

    Raises ConfigError if it is no folder, and neither hub nor cache has it.
    """
    if not is_on_hub(model):
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(FETCHED)))
    except Exception as error:  # the hub's library does not wrap the errors of its HTTP library
        cached = _whole_in_cache(model)
        if cached is None:
            rule = f"is no folder here, and no model on a hub that can be reached ({_first_line(error)})"
            way_out = f"{origin}; if it is a hub's name, check the network (HF_TOKEN, HF_HOME)"
            raise refused(path, model, rule, way_out) from error
        logger.warning("model.model %s: no hub can be reached (%s); using the cached copy", model, _first_line(error))
        return cached


def _whole_in_cache(model: str) -> Path | None:
    try:
        folder = model_path(model)
    except OSError:
        return None
    index = folder / WEIGHT_INDEX
    named = set(json.loads(index.read_bytes())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    return folder if all((folder / name).is_file() for name in {*named, "config.json"}) else None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def flaw_of_model(folder: Path) -> str | None:
    """Return what is wrong with the files of a model folder, as a rule; None if nothing is.

    It runs the chat template, within limits, before anything else does.
    """
    if (odd := irregular_file(folder)) is not None:
        return f"{odd.name} is not a regular file"
    if os.path.lexists(folder / ADAPTER):
        return f"has {ADAPTER}: it is an adapter, and loaders would take the base model that the file names"
    documents: dict[str, dict[str, Any]] = {}
    for file in sorted(file for pattern in DESCRIPTIONS for file in folder.glob(pattern)):
        try:
            found = json.loads(read_regular(file, LARGEST_DESCRIPTION))
        except (OSError, ValueError, RecursionError) as error:
            return f"its {file.name} must be a JSON object ({_first_line(error)})"
        if not isinstance(found, dict):
            return f"its {file.name} must be a JSON object (it is {kind_of(found)})"
        documents[file.name] = found
    return flaw_of_costs(folder, documents)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, by name."""
    return sorted(folder.glob("*.safetensors"))


def model_fingerprint(model: str) -> str:
    """Return a digest of a model: its config.json, and of each file of weights the size, header, and a few samples.

    It reads a few megabytes of 16 GB. Training changes nearly every number of a tensor, so samples distinguish models
    of the same shapes, unless they differ in a few numbers only.

    Raises OSError if there is no such folder, here or in the cache.
    """
    folder = model_path(model)
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            header = opened.read(8)
            (length,) = struct.unpack("<Q", header.ljust(8, b"\0"))
            digest.update(opened.read(min(length, size)))
            begin = 8 + min(length, size)
            for number in range(SAMPLES):
                opened.seek(begin + (size - begin) * number // SAMPLES, os.SEEK_SET)
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()


def model_problems(model: Model, folder: Path) -> list[Problem]:
    """Return what a run must not load from its model's folder, with the key that allows it as the way out."""
    pickled = f"{IN_SAFETENSORS}, or set model.allow_pickled_weights: true"
    code = f"{WITHOUT_CODE}, or, where you have read the code, set model.allow_remote_code: true"
    flaw = flaw_of_model(folder)
    rules = [(flaw, INTACT)] if flaw else []
    rules += [(rule, pickled) for rule in ([] if model.allow_pickled_weights else _pickled(folder))]
    rules += [(rule, code) for rule in ([] if model.allow_remote_code else _code(folder))]
    return [Problem(MODEL_PATH, str(folder), rule, way_out) for rule, way_out in rules]


def require_trusted(model: Model, folder: Path) -> None:
    """Raise ConfigError for what `model_problems` finds."""
    if problems := model_problems(model, folder):
        raise ConfigError(problems)


def require_plain(folder: Path, *, path: str, value: str) -> None:
    """Raise ConfigError if a folder has only pickled weights, or code: no command of stage2 loads either.

    path, value: the argument that names the folder.
    """
    rules = [(rule, IN_SAFETENSORS) for rule in _pickled(folder)] + [(rule, WITHOUT_CODE) for rule in _code(folder)]
    if rules:
        raise ConfigError([Problem(path, value, rule, way_out) for rule, way_out in rules])


def _pickled(folder: Path) -> list[str]:
    """Return the rule that pickled weights break; nothing if there are safetensors, which loaders prefer."""
    if any(folder.glob("*.safetensors")):
        return []
    found = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    return [PICKLED.format(found[0])] if found else []


def _code(folder: Path) -> list[str]:
    """Return the rules that code breaks, one for each file that names code."""
    found = [f"{CODE_KEY} in {file.name}" for file in sorted(folder.glob("*config*.json")) if _names_code(file)]
    found += [GENERATE] if (folder / GENERATE).exists() else []
    return [CODE.format(one) for one in found]


def _names_code(file: Path) -> bool:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):  # the loader reports it
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
