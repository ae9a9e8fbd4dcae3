"""The export of a checkpoint: written under a temporary name, verified by reading it back, then renamed; with its card.

As a model: the weights that servers are sent, with configuration, tokenizer, processor and chat template, as
transformers and vLLM load them without stage2. As an adapter: what PEFT loads on top of the base model.
"""

from __future__ import annotations

import filecmp
import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata as distribution
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from jinja2 import Environment, StrictUndefined
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoProcessor

from stage2_api.errors import refused
from stage2_trainer.data.files import new_folder
from stage2_trainer.data.question import Question
from stage2_trainer.export.checkpoint_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_NAME, TrainedCheckpoint
from stage2_trainer.export.trained_checkpoint import MergedStream, is_empty, skeleton
from stage2_trainer.matching.closing import SEQUENCE_BIAS, closing_bias, generation_fields
from stage2_trainer.model.checkpoints import COURSE
from stage2_trainer.process.activity import ACTIVITY
from stage2_trainer.sync.fleet.adapter import adapter_obstacle
from stage2_trainer.sync.tensors.announcement import TensorMeta, dtype_name
from stage2_trainer.sync.tensors.digest import Digests, differing
from stage2_trainer.sync.tensors.model_folder import INDEX, folder_digests

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
DTYPE_KEYS = ("dtype", "torch_dtype")
TIE = "tie_word_embeddings"
PARTS = ("text_config", "vision_config")
ROOM_TO_SPARE = 1.05
NAMED_TENSORS = 3

SHARD_BYTES = 2 * 10**9
METHODS = {
    "sft": "supervised training on ground truth (stage 1)",
    "rollout_matching_sft": "rollout-matching training (stage 2)",
    "grpo": "GRPO",
}

_ROLLOUTS = ("f1_class_iou50", "precision_class_iou50", "recall_class_iou50", "ap", "ap50", "desc_exact", "parse_rate")
SCORES = ("eval_reward", *(f"eval_rollout_{name}" for name in _ROLLOUTS))
"""The scores that a card shows, of those that the run has."""


class ExportError(RuntimeError):
    """The written export differs from the merged weights. None of it stays."""


@dataclass(frozen=True)
class Exported:
    """An exported model.

    bytes: of its weights. untied: whether the output head was tied to the embedding table, and no longer is. obstacle:
    why vLLM cannot serve an adapter; None where it can, and for a merged model.
    """

    folder: Path
    tensors: int
    bytes: int
    untied: bool = False
    obstacle: str | None = None


def export_model(
    checkpoint: TrainedCheckpoint,
    output: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    longer: float = 0.0,
) -> Exported:
    """Merge a checkpoint into a model folder. dtype: of all tensors; None = each one's own in the base model.

    longer: nats of the bias against closing the list that the generation configuration gets.

    Raises:
        ConfigError: the folder is not new or too small for it, base model and checkpoint do not fit, or there can be no
            such bias.
        ExportError: what was written is not what was merged.
    """
    tokenizer = _processor(checkpoint).tokenizer
    bias = closing_bias(lambda text: tokenizer.encode(text, add_special_tokens=False), longer)
    stream = MergedStream(checkpoint, dtype=dtype)
    metadata = stream.metadata()
    size = sum(one.nbytes for one in metadata)
    with new_folder("--output", output) as aside:
        _require_room(aside.parent, size)
        expected = write_shards(stream, metadata, aside, shard_bytes=shard_bytes)
        _write_config(checkpoint, aside, dtype=dtype, untied=stream.untied)
        _write_companions(checkpoint, aside, bias)
        _require_equal(aside, expected, [(one.name, dtype_name(one.dtype)) for one in metadata])
    return Exported(output, len(metadata), size, untied=stream.untied)


def export_adapter(checkpoint: TrainedCheckpoint, output: Path) -> Exported:
    """Save a checkpoint's adapter as PEFT loads it on top of the base model.

    Raises ConfigError if the checkpoint has no adapter, or the folder is not new.
    """
    if checkpoint.adapter is None:
        rule = "must be a checkpoint of an adapter, and the model was trained in full"
        raise refused("CHECKPOINT", str(checkpoint.folder), rule, "export without --adapter")
    trained = skeleton(checkpoint)
    tensors = {name for name, parameter in trained.named_parameters() if not is_empty(parameter)}
    size = (checkpoint.folder / ADAPTER_WEIGHTS).stat().st_size
    with new_folder("--output", output) as aside:
        _require_room(aside.parent, size)
        copied = shutil.copyfile(checkpoint.folder / ADAPTER_WEIGHTS, aside / ADAPTER_WEIGHTS)
        if not filecmp.cmp(checkpoint.folder / ADAPTER_WEIGHTS, copied, shallow=False):
            raise ExportError(f"what was written differs from {checkpoint.folder / ADAPTER_WEIGHTS}")
        _write_json(aside / ADAPTER_CONFIG, {**checkpoint.adapter, BASE_NAME: checkpoint.base_name})
        _write_companions(checkpoint, aside, {})
    return Exported(output, len(tensors), size, obstacle=adapter_obstacle(trained))


def _require_room(folder: Path, size: int) -> None:
    """Raise ConfigError where the disk of a folder is too small."""
    free = shutil.disk_usage(folder).free
    if free < size * ROOM_TO_SPARE:
        rule = f"must have {size * ROOM_TO_SPARE / 1e6:,.0f} MB of free space, and there are {free / 1e6:,.0f} MB"
        raise refused("--output", str(folder), rule, "free some space, or name a folder on another disk")


def _write_config(checkpoint: TrainedCheckpoint, folder: Path, *, dtype: torch.dtype | None, untied: bool) -> None:
    """Write the base model's configuration, with the exported dtype, and without the tie where it is gone."""
    config: dict[str, Any] = json.loads((checkpoint.base / CONFIG).read_text(encoding="utf-8"))
    for part in (config, *(config[name] for name in PARTS if name in config)):
        if dtype is not None:
            part.update({key: dtype_name(dtype) for key in DTYPE_KEYS if key in part})
        if untied and TIE in part:
            part[TIE] = False
    if untied:
        config[TIE] = False
    _write_json(folder / CONFIG, config)


def _processor(checkpoint: TrainedCheckpoint) -> Any:
    return AutoProcessor.from_pretrained(checkpoint.processor, local_files_only=True, trust_remote_code=False)


def _write_companions(checkpoint: TrainedCheckpoint, folder: Path, bias: Mapping[int, float]) -> None:
    """Write the rest of a model folder: tokenizer, image processor, chat template, defaults of generation, card."""
    processor = _processor(checkpoint)
    processor.save_pretrained(folder)
    _write_generation_config(checkpoint.base / GENERATION_CONFIG, folder, bias, processor.tokenizer.eos_token_id)
    if (checkpoint.folder / COURSE).is_file():
        shutil.copyfile(checkpoint.folder / COURSE, folder / COURSE)
    (folder / "README.md").write_text(model_card(checkpoint, merged=(folder / CONFIG).is_file()), encoding="utf-8")


def _write_generation_config(base: Path, folder: Path, bias: Mapping[int, float], end: int) -> None:
    """Write the defaults of generation of the base model with this bias; one that fits the base's weights is dropped.

    end: the id that ends an answer, for a base model without such a file.
    """
    if not base.is_file() and not bias:
        return
    fields = json.loads(base.read_text(encoding="utf-8")) if base.is_file() else {"eos_token_id": end}
    fields.pop(SEQUENCE_BIAS, None)
    _write_json(folder / GENERATION_CONFIG, fields | generation_fields(bias))


def _require_equal(folder: Path, expected: dict[str, str], tensors: list[tuple[str, str]]) -> None:
    """Read the folder again. Raises ExportError where it holds other tensors than were merged."""
    with ACTIVITY.doing(f"reading {len(tensors):,} tensors again, to verify them"):
        wrong = differing(expected, folder_digests(str(folder), tensors))
    if wrong:
        more = f" and {len(wrong) - NAMED_TENSORS} more" if len(wrong) > NAMED_TENSORS else ""
        named = ", ".join(wrong[:NAMED_TENSORS]) + more
        raise ExportError(f"what was written differs from what was merged in {named}: the disk may be failing")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_shards(
    tensors: Iterable[tuple[str, Tensor]], metadata: Sequence[TensorMeta], folder: Path, *, shard_bytes: int
) -> dict[str, str]:
    """Write a stream that yields what its metadata say, in that order; return the digest of each tensor."""
    empty = {one.name: torch.empty(one.shape, dtype=one.dtype, device="meta") for one in metadata}
    plan = split_torch_state_dict_into_shards(empty, max_shard_size=shard_bytes)
    digests, held = Digests(), defaultdict[str, dict[str, Tensor]](dict)
    with ACTIVITY.doing("merging and writing", len(metadata), "tensors") as writing:
        for name, tensor in tensors:
            digests.add(name, tensor)
            file = plan.tensor_to_filename[name]
            held[file][name] = tensor.contiguous()
            if len(held[file]) == len(plan.filename_to_tensors[file]):
                save_file(held.pop(file), folder / file, metadata={"format": "pt"})
            writing.advance()
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return digests.by_tensor()


def model_card(checkpoint: TrainedCheckpoint, *, merged: bool) -> str:
    """Return the card of a merged model, or of an adapter."""
    course, state = checkpoint.course, checkpoint.state
    variant = course.get("custom.trainer_variant", "")
    evaluations = [one for one in state.get("log_history", ()) if any(key.startswith("eval_") for key in one)]
    template = files("stage2_trainer.export").joinpath("model_card.md.j2").read_text(encoding="utf-8")
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, finalize=_cell
    )
    return environment.from_string(template).render(
        merged=merged,
        base_name=checkpoint.base_name,
        is_on_hub=not Path(checkpoint.base_name).is_dir(),  # the front matter names models of a hub alone
        method=METHODS.get(variant, variant or "not recorded"),
        tuner=_describe_tuner(checkpoint.adapter),
        created_by=f"stage2 {distribution.version('stage2')}, from {checkpoint.folder.name}",
        evaluation=evaluations[-1] if evaluations else None,
        scores=SCORES,
        state=state,
        course=course,
        **_usage(checkpoint, merged=merged),
    )


class _Code(str):
    """Text of a program, which a card shows as it is."""


def _usage(checkpoint: TrainedCheckpoint, *, merged: bool) -> dict[str, _Code | int]:
    """Return what the card's program asks, in Python's spelling."""
    question = Question.of_course(checkpoint.course)
    limits = "".join(f", {name}={limit}" for name, limit in question.pixel_limits().items())
    system = {"role": "system", "content": question.system}
    return {
        "base": _Code(repr("." if merged else checkpoint.base_name)),
        "prompt": _Code(repr(question.prompt)),
        "system": _Code(f"{system!r}, " if question.system else ""),
        "limits": _Code(limits),
        "max_new_tokens": question.max_new_tokens,
    }


def _describe_tuner(adapter: Mapping[str, Any] | None) -> str:
    if adapter is None:
        return "the weights themselves (full)"
    kind = "DoRA" if adapter.get("use_dora") else "rsLoRA" if adapter.get("use_rslora") else "LoRA"
    found = f"{kind}, rank {adapter.get('r')}, alpha {adapter.get('lora_alpha')}"
    if whole := adapter.get("modules_to_save"):
        found += f"; in full: {', '.join(whole)}"
    return f"{found}; rows of tokens" if adapter.get("trainable_token_indices") else found


def _cell(value: object) -> str:
    return value if isinstance(value, _Code) else str(value).replace("|", "\\|").replace("\n", "<br>")
