"""Whether a run can read DeepSpeed's state in a checkpoint: only one with the same kind of DeepSpeed can."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stage2_api.errors import ConfigError, Problem, refused, shortened
from stage2_api.runconfig import RunConfig
from stage2_trainer.model.checkpoints import DEEPSPEED_STATES
from stage2_trainer.model.deepspeed_config import DTYPES, deepspeed_options, zero_stage
from stage2_trainer.model.tensor_files import load_tensors, tensors_alone

_ALIKE = {2: 1}
"""Stages of ZeRO that read each other's state."""


def check_deepspeed_state(checkpoint: Path, config: RunConfig, *, path: str) -> None:
    """Refuse a checkpoint whose state was written with another DeepSpeed than the run has, or without one.

    It holds where a person allows changes, too (`training.resume`): nothing would read the state. path: of the key that
    led to the checkpoint.

    Raises:
        ConfigError: the run cannot resume from it; names the keys.
    """
    options = deepspeed_options(config)
    states = sorted(checkpoint.glob(f"{DEEPSPEED_STATES}/*model_states.pt"))
    if options is None and states:
        rule = f"DeepSpeed wrote {checkpoint}, and only DeepSpeed reads its state"
        raise refused("deepspeed", config.deepspeed, rule, _way_out("deepspeed", path))
    if options is not None and not states:
        rule = (
            "DeepSpeed resumes with its own state, which this checkpoint lacks: training.save_only_model leaves it out,"
            " and a run without DeepSpeed has none"
        )
        way_out = f"leave deepspeed out, with training.resume: allow-changes, or {_otherwise(path)}"
        raise refused(path, str(checkpoint), rule, way_out)
    if options is not None:
        with tensors_alone(deepspeed=True):
            state = load_tensors(states[0], path=path, map_location="meta", mmap=True)
        asked = {dtype: getattr(config.training, dtype) for dtype in DTYPES}
        _compare(_kind(options, asked), _kind(state["ds_config"], {}), checkpoint, path)


def _compare(now: Mapping[str, Any], then: Mapping[str, Any], checkpoint: Path, path: str) -> None:
    rule = "DeepSpeed wrote {} with {}, and does not read its state with another"
    problems = [
        Problem(key, now[key], rule.format(checkpoint, shortened(then[key])), _way_out(key, path))
        for key in now
        if _reader(now[key]) != _reader(then[key])
    ]
    if problems:
        raise ConfigError(problems)


def _reader(value: Any) -> Any:
    """Return what two values have in common if the one reads the other's state: DeepSpeed knows `AdamW` as `adamw`."""
    return value.lower() if isinstance(value, str) else _ALIKE.get(value, value)


def _kind(options: Mapping[str, Any], asked: Mapping[str, bool]) -> dict[str, Any]:
    """Return what DeepSpeed's state depends on, by key. asked: for a precision that the options leave to it."""
    found: dict[str, Any] = {"deepspeed.zero_optimization.stage": zero_stage(options)}
    for part in ("optimizer", "scheduler"):
        found[f"deepspeed.{part}.type"] = options.get(part, {}).get("type")
    for dtype in DTYPES:
        enabled = options.get(dtype, {}).get("enabled", False)
        found[f"training.{dtype}"] = asked.get(dtype, False) if enabled == "auto" else enabled
    return found


def _way_out(key: str, path: str) -> str:
    return f"set {key} back, or {_otherwise(path)}"


def _otherwise(path: str) -> str:
    """Return how a run parts with the checkpoint to which this key led: --overwrite spares one that a person named."""
    return "start over with --overwrite" if path == "training.output_dir" else f"leave out {path}"
