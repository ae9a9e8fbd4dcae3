"""The checkpoint on disk, as transformers and vLLM read it."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from tiny_model.foreign import Model, Processor


def save(folder: Path, model: Model, processor: Processor) -> None:
    """Write weights in bfloat16, configuration, tokenizer, processor and chat template; `model` stays as it is."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)
    # safetensors makes files that only their owner can read; a container runs as someone else.
    for file in folder.iterdir():
        file.chmod(0o644)
