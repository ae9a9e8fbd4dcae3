"""The tiny Qwen3-VL: Qwen3-VL's own architecture with 1.6 million parameters, its processor, and how it starts."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from tiny_model.answers import COORD_TOKENS
from tiny_model.foreign import Model, Processor, Tokenizer
from tiny_model.scenes import SIZE
from tiny_model.tokenizer import CHAT_TEMPLATE, END_OF_TEXT, IMAGE_PAD, TURN_END, VIDEO_PAD, VISION_END, VISION_START

PATCH = 8
MERGE = 2
HIDDEN = 128
_SMALLEST_IMAGE = 32
_COORD_NOISE = 0.002


def build_processor(tokenizer: Tokenizer, size: int = SIZE) -> Processor:
    """Return the processor: images of up to `size` pixels a side in patches of 8, one token for each 2x2 patches."""
    pixels: dict[str, Any] = {
        "size": {"shortest_edge": _SMALLEST_IMAGE**2, "longest_edge": size**2},
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    video = Qwen3VLVideoProcessor(**pixels)
    return Qwen3VLProcessor(Qwen2VLImageProcessor(**pixels), tokenizer, video, chat_template=CHAT_TEMPLATE)


def build_model(tokenizer: Tokenizer, seed: int) -> Model:
    """Return the model with random weights, the same for the same seed."""
    torch.manual_seed(seed)
    model: Model = Qwen3VLForConditionalGeneration(_config(tokenizer))
    model.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        eos_token_id=tokenizer.convert_tokens_to_ids(TURN_END),
        pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
    )
    if COORD_TOKENS[-1] in tokenizer.get_vocab():
        _make_coords_neighbours(model, tokenizer)
    return model


def _config(tokenizer: Tokenizer) -> Qwen3VLConfig:
    token_id = tokenizer.convert_tokens_to_ids
    return Qwen3VLConfig(
        text_config=_text_config(tokenizer),
        vision_config=_vision_config(),
        image_token_id=token_id(IMAGE_PAD),
        video_token_id=token_id(VIDEO_PAD),
        vision_start_token_id=token_id(VISION_START),
        vision_end_token_id=token_id(VISION_END),
        tie_word_embeddings=True,
    )


def _text_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # the smallest that vLLM's attention takes on a CPU
        "max_position_embeddings": 4096,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.convert_tokens_to_ids(TURN_END),
        "pad_token_id": tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }


def _vision_config() -> dict[str, Any]:
    return {
        "hidden_size": 96,
        "intermediate_size": 192,
        "depth": 3,
        "num_heads": 3,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": (SIZE // PATCH) ** 2,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.05,
    }


@torch.no_grad()
def _make_coords_neighbours(model: Model, tokenizer: Tokenizer) -> None:
    """Give coord tokens smooth embeddings, so that what is learnt about one bin holds for those beside it.

    E[k] = (sin(2 pi k / P), cos(2 pi k / P)) turned by a random rotation, for periods P from 2000 to 40 bins.
    """
    table = model.get_input_embeddings().weight
    periods = torch.logspace(math.log10(2000), math.log10(40), HIDDEN // 2)
    angles = 2 * math.pi * torch.arange(len(COORD_TOKENS))[:, None] / periods
    rotation = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN)).Q
    smooth = torch.cat([angles.sin(), angles.cos()], dim=1) @ rotation
    smooth *= table.std() / smooth.std()
    ids = torch.tensor(tokenizer.convert_tokens_to_ids(COORD_TOKENS))
    table[ids] = smooth + _COORD_NOISE * torch.randn_like(smooth)
