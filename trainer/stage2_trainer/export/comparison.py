"""The comparison of an exported model with the learner's: log-probabilities of one prompt with its true answer.

Both compute in float32, one after the other, so what differs is what the cast to the exported dtype has cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from stage2_api.custom import Custom
from stage2_api.errors import ConfigError, Problem
from stage2_trainer.data.encode import Encoder
from stage2_trainer.data.messages import Prompts, record_fault
from stage2_trainer.data.records import RecordRules, load_record, units_by
from stage2_trainer.export.trained_checkpoint import TrainedCheckpoint, with_adapter
from stage2_trainer.matching.ground_truth import GTObject, serialize_objects
from stage2_trainer.sync.fleet.proof import (
    BF16_TOLERANCE,
    FLOAT32_TOLERANCE,
    Gap,
    learner_logprobs,
    sample_probe,
    text_tokens,
)
from stage2_trainer.sync.tensors.model_folder import ModelFolder

FIXED = (
    GTObject("red box", "bbox", (100, 200, 300, 400)),
    GTObject("blue disc", "poly", (500, 500, 700, 500, 700, 700, 500, 700)),
)
DEFAULT_PROMPT: str = Custom.model_fields["user_prompt"].default


@dataclass(frozen=True)
class Comparison:
    """The distance between learner and exported model, and the largest mean that the exported dtype explains."""

    gap: Gap
    tolerance: float

    @property
    def exceeds(self) -> bool:
        """Whether the distance is more than rounding explains."""
        return self.gap.exceeds(self.tolerance)

    def __str__(self) -> str:
        return f"log-probabilities differ by {self.gap}; {self.tolerance:g} in the mean is allowed"


def compare(checkpoint: TrainedCheckpoint, exported: Path, records: Path | None) -> Comparison:
    """Compare on the first record of a data file with its ground truth, or on a fixed prompt without an image.

    Raises ConfigError if the data file has no readable first record.
    """
    inputs = _inputs(checkpoint, exported, records)
    text = text_tokens(inputs["mm_token_type_ids"])
    learner = learner_logprobs(learner_model(checkpoint), inputs)[text]
    ours = learner_logprobs(_load(exported), inputs)[text]
    folder = ModelFolder(str(exported))
    narrow = folder.tensor("model.language_model.embed_tokens.weight").dtype != torch.float32
    return Comparison(Gap.between(ours, learner), BF16_TOLERANCE if narrow else FLOAT32_TOLERANCE)


def learner_model(checkpoint: TrainedCheckpoint) -> Any:
    """Return the model as the learner has it, in float32 and in memory as a whole."""
    model = _load(checkpoint.values)
    return model if checkpoint.adapter is None else with_adapter(model, checkpoint).eval()


def _load(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
    ).eval()


def _inputs(checkpoint: TrainedCheckpoint, exported: Path, records: Path | None) -> Mapping[str, Tensor]:
    encoder = Encoder(AutoProcessor.from_pretrained(exported, local_files_only=True, trust_remote_code=False))
    course = checkpoint.course
    prompts = Prompts(course.get("custom.user_prompt", DEFAULT_PROMPT), course.get("template.system"))
    if records is None:
        chat: list[dict[str, Any]] = [{"role": "user", "content": prompts.user}]
        return sample_probe(encoder, chat, serialize_objects(FIXED)).inputs
    rules = RecordRules(units=units_by(course.get("custom.coord_tokens.skip_bbox_norm")))
    record = load_record(records, 0, rules=rules)
    if fault := record_fault(record):
        rule = f"the first record must have images that can be used ({fault})"
        raise ConfigError([Problem(f"{records} images", list(record.images), rule, "correct it, or name another file")])
    return sample_probe(encoder, prompts.chat(record), serialize_objects(record.objects)).inputs
