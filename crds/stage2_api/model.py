"""`model`, `template` and `tuner`: the trained model, its prompts, and which of its weights are trained.

Source: semantics sections 2 and 3; key names as ms-swift has them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stage2_api.section import Name, Path, Positive, Section, Text


class Model(Section):
    """The model that is trained."""

    model: Path
    """Folder of the checkpoint, or its name on a hub, with the 1000 coordinate tokens already in its vocabulary. What
    comes from a hub lies in the cache (`HF_HOME`), which learner and servers share where they share that folder."""
    torch_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format in which weights are loaded; `auto` takes the checkpoint's own."""
    attn_impl: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """Attention kernel of the learner. `auto` attends within each sequence of a row: on a GPU by PyTorch's own flash
    kernel, elsewhere one after the other. `sdpa` masks the whole row, in memory that grows with its square. Without the
    flash-attn package `flash_attention_2` is `auto`; `flash_attention_3` needs its package and a GPU."""
    allow_pickled_weights: bool = False
    """Whether a folder may be loaded whose weights are pickled (`pytorch_model.bin`, `.pt`) and in no safetensors. A
    pickle may name any command; tensors alone are taken of it."""
    allow_remote_code: bool = False
    """Whether Python that the model folder brings (`auto_map` in its JSON files) runs in learner and servers, with all
    that they may do. A folder with such code is refused otherwise."""


class Template(Section):
    """How records become prompts."""

    template: Literal["qwen3_vl"] = "qwen3_vl"
    """Name of the chat template; the checkpoint's own is used."""
    system: Text | None = None
    """System turn of every prompt; null means none."""
    max_length: Positive | None = None
    """Longest sequence in tokens; also the length of packed rows unless `global_max_length` is set."""
    truncation_strategy: Literal["raise", "left", "right", "delete"] = "raise"
    """What happens to a prompt that is too long. Stage-2 training always refuses it, whatever stands here: a cut prompt
    would no longer be the one that was rolled out."""
    max_pixels: Positive | None = None
    """Most pixels of an image; larger ones are scaled down, on the servers as in the learner. Unset takes the
    checkpoint's own limit."""
    min_pixels: Positive | None = None
    """Fewest pixels of an image; smaller ones are scaled up. Unset takes the checkpoint's own limit."""


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
