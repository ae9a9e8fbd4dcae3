"""A two-layer Qwen3-VL with random weights: all kinds of parameters that a sync meets, none larger than a few kB."""

import pytest
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration


@pytest.fixture
def tiny():
    torch.manual_seed(3)
    text = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 1,
        "patch_size": 4,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)
    return Qwen3VLForConditionalGeneration(config).eval()
