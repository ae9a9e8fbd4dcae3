"""`tuner`: which weights are trained, and in what form.

Source: semantics sections 2 and 3; key names as ms-swift has them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stage2_api.section import Section
from stage2_api.value_types import Name, Positive, Text


class Tuner(Section):
    """Which weights are trained, and in what form."""

    train_type: Literal["full", "lora"] = "lora"
    """Form of training: `full` changes weights themselves, `lora` trains low-rank adapters beside them."""
    use_dora: bool = False
    """Whether adapters also learn a magnitude for each output row (DoRA). vLLM cannot load such adapters, so they
    travel merged."""
    use_swift_lora: Literal[False] = False
    """Adapter implementation of ms-swift; PEFT is used always."""
    lora_rank: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rank of the adapters."""
    lora_alpha: Positive = 32
    """Scale of the adapters: their product is multiplied by alpha / rank."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the adapters' inputs dropped in training."""
    lora_bias: Literal["none"] = "none"
    """Bias terms trained beside the adapters: none."""
    target_modules: list[Name] = Field(default=["all-linear"], min_length=1, max_length=256)
    """List of modules that get adapters, by the end of their names; `all-linear` means all linear layers that are not
    frozen."""
    target_regex: Text | None = None
    """Regular expression that a module's whole name must match to get an adapter; null leaves the choice to
    `target_modules`."""
    modules_to_save: list[Name] = Field(default=[], max_length=256)
    """List of modules that are trained whole beside the adapters, by the end of their names."""
    train_coord_rows: bool = False
    """Whether the rows of the coordinate tokens in the tables of input and output are trained beside the adapters; the
    other rows stay as they are, and tied tables stay tied. A model whose rows are new needs it in stage 1."""
    freeze_llm: bool = False
    """Whether the language model is left as it is."""
    freeze_vit: bool = True
    """Whether the image encoder is left as it is."""
    freeze_aligner: bool = True
    """Whether the aligner (the mergers between image encoder and language model) is left as it is."""
