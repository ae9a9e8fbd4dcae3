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
    """Folder of the checkpoint, or its name on a hub, with the 1000 coordinate tokens already in its vocabulary. Hub
    downloads go into the cache (`HF_HOME`), which learner and servers should share."""
    torch_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format of the loaded weights; `auto` keeps the checkpoint's."""
    attn_impl: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """Attention kernel of the learner. `auto` attends within each sequence of a packed row, on a GPU with PyTorch's
    flash kernel. `sdpa` masks the whole row, which takes memory quadratic in its length. `flash_attention_2` falls back
    to `auto` without the flash-attn package; `flash_attention_3` needs its package and a GPU."""
    allow_pickled_weights: bool = False
    """Whether to load a folder that has pickled weights (`pytorch_model.bin`, `.pt`) and no safetensors. A pickle may
    contain any command; only its tensors are loaded."""
    allow_remote_code: bool = False
    """Whether learner and servers run Python code from the model folder (`auto_map` in its JSON files), with all their
    rights. A folder with such code is refused otherwise."""


class Template(Section):
    """How records become prompts."""

    template: Literal["qwen3_vl"] = "qwen3_vl"
    """Name of the chat template, which comes with the checkpoint."""
    system: Text | None = None
    """System message of every prompt; null means none."""
    max_length: Positive | None = None
    """Maximum sequence length in tokens, and length of packed rows, unless `global_max_length` is set."""
    truncation_strategy: Literal["raise", "left", "right", "delete"] = "raise"
    """Treatment of a prompt that is too long. Ignored: stage 2 always refuses it, because a cut prompt would not be the
    one that was rolled out."""
    max_pixels: Positive | None = None
    """Maximum number of pixels of an image; servers and learner scale larger images down. Unset keeps the checkpoint's
    limit."""
    min_pixels: Positive | None = None
    """Minimum number of pixels of an image; smaller images are scaled up. Unset keeps the checkpoint's limit."""

    def pixel_limits(self) -> dict[str, int]:
        """Return the limits of an image's pixels; empty for the checkpoint's own."""
        limits = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return {name: value for name, value in limits.items() if value is not None}


class Tuner(Section):
    """Which weights are trained, and in what form."""

    train_type: Literal["full", "lora"] = "lora"
    """Form of training: `full` trains the weights themselves, `lora` trains low-rank adapters."""
    use_dora: bool = False
    """Whether adapters also learn a magnitude for each output row (DoRA). vLLM cannot load such adapters, so the
    learner sends them merged."""
    use_swift_lora: Literal[False] = False
    """Whether to use the adapters of ms-swift; stage2 always uses PEFT."""
    lora_rank: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rank of the adapters."""
    lora_alpha: Positive = 32
    """Scale of the adapters: their product is multiplied by alpha / rank."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Dropout probability of the adapters' inputs. GRPO trains without dropout. With DoRA, dropout doubles the
    operations of the adapted layers."""
    lora_bias: Literal["none"] = "none"
    """Bias terms trained with the adapters: none."""
    target_modules: list[Name] = Field(default=["all-linear"], min_length=1, max_length=256)
    """List of modules that get adapters, by the end of their names; `all-linear` means all linear layers that are not
    frozen."""
    target_regex: Text | None = None
    """Regular expression for the full names of the modules that get adapters; null means `target_modules` decides."""
    modules_to_save: list[Name] = Field(default=[], max_length=256)
    """List of modules trained in full in addition to the adapters, by the end of their names."""
    train_coord_rows: bool = False
    """Whether to train the coordinate tokens' rows of the input and output embeddings in addition to the adapters.
    Other rows stay frozen, and tied tables stay tied. Stage 1 needs it for a model with new rows."""
    freeze_llm: bool = False
    """Whether the language model is frozen."""
    freeze_vit: bool = True
    """Whether the image encoder is frozen."""
    freeze_aligner: bool = True
    """Whether the aligner (the mergers between image encoder and language model) is frozen."""
