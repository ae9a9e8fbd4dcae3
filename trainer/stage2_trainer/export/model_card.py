"""The README of an exported model: what it was made of, by what, how far, and how well it did."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from stage2_trainer.export.trained_checkpoint import TrainedCheckpoint

DATA = "custom.train_jsonl"
MODEL = "model.model"
SCORES = "eval_"
METHODS = {
    "sft": "supervised training on ground truth (stage 1)",
    "rollout_matching_sft": "rollout-matching training (stage 2)",
    "grpo": "GRPO",
}


def model_card(checkpoint: TrainedCheckpoint, *, merged: bool) -> str:
    """Return the card of a merged model, or of an adapter."""
    parts = (_front(checkpoint, merged=merged), _head(checkpoint, merged=merged), _scores(checkpoint.state))
    return "\n".join((*parts, _configuration(checkpoint.course)))


def _front(checkpoint: TrainedCheckpoint, *, merged: bool) -> str:
    lines = ["---", f"library_name: {'transformers' if merged else 'peft'}", "pipeline_tag: image-text-to-text"]
    if not Path(checkpoint.base_name).is_dir():  # the front matter names models of a hub alone
        lines.append(f"base_model: {checkpoint.base_name}")
    return "\n".join((*lines, "tags: [stage2]", "---", ""))


def _head(checkpoint: TrainedCheckpoint, *, merged: bool) -> str:
    course, state = checkpoint.course, checkpoint.state
    variant = course.get("custom.trainer_variant", "")
    kind = "A Qwen3-VL that lists the objects of an image" if merged else "An adapter of a Qwen3-VL"
    rows = {
        "base model": checkpoint.base_name,
        "method": METHODS.get(variant, variant or "not said by the checkpoint"),
        "what trained": _trained(checkpoint.adapter),
        "steps": f"{state.get('global_step', '?')} of {state.get('max_steps', '?')}",
        "epochs": f"{state.get('epoch') or 0:.2f}",
        "training data": course.get(DATA, "not said by the checkpoint"),
        "base model's digest": course.get(MODEL, "not said by the checkpoint"),
        "made by": f"stage2 {metadata.version('stage2')}, from {checkpoint.folder.name}",
    }
    table = "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows.items())
    return f"{kind}, made with stage2.\n\n| | |\n| --- | --- |\n{table}\n"


def _trained(adapter: Mapping[str, Any] | None) -> str:
    if adapter is None:
        return "the weights themselves (full)"
    kind = "DoRA" if adapter.get("use_dora") else "rsLoRA" if adapter.get("use_rslora") else "LoRA"
    found = f"{kind}, rank {adapter.get('r')}, alpha {adapter.get('lora_alpha')}"
    if whole := adapter.get("modules_to_save"):
        found += f"; in full: {', '.join(whole)}"
    return f"{found}; rows of tokens" if adapter.get("trainable_token_indices") else found


def _scores(state: Mapping[str, Any]) -> str:
    """Return the last evaluation's figures."""
    found = [entry for entry in state.get("log_history", ()) if any(key.startswith(SCORES) for key in entry)]
    if not found:
        return "## Scores\n\nThe run has not been evaluated.\n"
    last = found[-1]
    rows = "\n".join(
        f"| `{key.removeprefix(SCORES)}` | {value:.4g} |"
        for key, value in last.items()
        if key.startswith(SCORES) and isinstance(value, (int, float))
    )
    title = f"The run's own held-out evaluation at step {last.get('step', '?')}:"
    return f"## Scores\n\n{title}\n\n| figure | value |\n| --- | --- |\n{rows}\n"


def _configuration(course: Mapping[str, Any]) -> str:
    if not course:
        return "## Configuration\n\nThe checkpoint does not say.\n"
    rows = "\n".join(f"| `{path}` | {_cell(value)} |" for path, value in sorted(course.items()))
    return f"## Configuration\n\nThe keys on which the weights depend.\n\n| key | value |\n| --- | --- |\n{rows}\n"


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")
