"""The memory of a pass that the doctor counts without values is that of the learner's own pass, within a tenth."""

import copy
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText, Qwen3VLConfig

from stage2_trainer.checks import activations
from stage2_trainer.checks.activations import LiveBytes, pass_bytes
from stage2_trainer.learner.padding_free_batch import hidden_states
from stage2_trainer.model.attention import PACKED, pack_vision_tower

ROW, IMAGE_TOKENS, IMAGE_ID = 1024, 512, 5
TEXT = {
    "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 768, "vocab_size": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [12, 10, 10]},
}  # fmt: skip
VISION = {
    "depth": 4, "hidden_size": 128, "intermediate_size": 384, "num_heads": 4, "out_hidden_size": 256,
    "deepstack_visual_indexes": [1, 2], "patch_size": 16, "num_position_embeddings": 2304,
}  # fmt: skip
SHAPE = Qwen3VLConfig(text_config=TEXT, vision_config=VISION, image_token_id=IMAGE_ID)
LANGUAGE = r".*language_model\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"
LAST_LAYERS = LANGUAGE.replace(r"\d+", "[45]")
VISION_TOO = (
    rf"({LANGUAGE})|(.*visual\.(blocks\.\d+\.(attn\.(qkv|proj)|mlp\.linear_fc(1|2))|.*merger.*\.linear_fc(1|2)))"
)
CASES = {
    "LoRA": {},
    "LoRA in the last layers": {"target_modules": LAST_LAYERS},
    "DoRA": {"use_dora": True},
    "DoRA with dropout": {"use_dora": True, "lora_dropout": 0.1},
    "DoRA and vision tower": {"use_dora": True, "target_modules": VISION_TOO},
}


def policy(device, dtype=torch.bfloat16, **options):
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(copy.deepcopy(SHAPE), dtype=dtype, attn_implementation=PACKED)
        pack_vision_tower(model)
        return get_peft_model(model, LoraConfig(**{"r": 8, "target_modules": LANGUAGE, **options}))


def learner_bytes(model, *, rows, checkpointing, autocast):
    """What the learner's own pass over such rows takes, with values."""
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for one in model.parameters():
        one.grad = torch.zeros_like(one) if one.requires_grad else None
    ids = torch.full((rows, ROW), 9).index_fill(1, torch.arange(IMAGE_TOKENS), IMAGE_ID)
    ends = torch.arange(rows + 1, dtype=torch.int32) * ROW
    live = LiveBytes()
    live.ignore(*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None))
    with live:
        pixels = torch.zeros(rows * IMAGE_TOKENS * 4, 3 * 2 * 16 * 16)
    inputs = {
        "input_ids": ids,
        "position_ids": torch.arange(ROW).expand(4, rows, ROW),
        "use_cache": False,
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": ROW,
        "max_length_k": ROW,
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 32, IMAGE_TOKENS * 4 // 32]] * rows),
    }
    with live:
        with torch.autocast("cpu", autocast) if autocast else nullcontext():
            hidden = hidden_states(model.get_base_model().model, inputs)
        hidden.backward(torch.ones_like(hidden))
    return live.peak


@pytest.mark.in_turns(5)
@pytest.mark.parametrize(
    ("options", "rows", "checkpointing", "dtype"),
    [
        *(pytest.param(options, 1, True, torch.bfloat16, id=name) for name, options in CASES.items()),
        pytest.param(CASES["DoRA"], 2, True, torch.bfloat16, id="DoRA, rows of GRPO"),
        pytest.param(CASES["DoRA and vision tower"], 2, False, torch.bfloat16, id="all, without checkpoints"),
        pytest.param(CASES["LoRA"], 1, True, torch.float32, id="LoRA in float32"),
        pytest.param(CASES["DoRA and vision tower"], 2, False, torch.float32, id="all in float32"),
    ],
)
def test_estimated_activation_memory_matches_learner_within_tenth(options, rows, checkpointing, dtype, monkeypatch):
    monkeypatch.setattr(activations, "IMAGE_SHARE", IMAGE_TOKENS / ROW)
    autocast = dtype if dtype is torch.bfloat16 else None
    how = {"rows": rows, "checkpointing": checkpointing, "autocast": autocast}
    counted = pass_bytes(policy("meta", dtype, **options), row_tokens=ROW, **how)
    assert counted == pytest.approx(learner_bytes(policy("cpu", dtype, **options), **how), rel=0.1)


def test_dropout_with_dora_doubles_flops_of_layer():
    def operations(dropout):
        with torch.device("meta"):
            layer = torch.nn.Sequential(torch.nn.Linear(4096, 4096))
            options = LoraConfig(r=16, target_modules=["0"], use_dora=True, lora_dropout=dropout)
            adapted = get_peft_model(layer, options).train()
            with FlopCounterMode(display=False) as counter:
                adapted(torch.empty(60_000, 4096))
        return counter.get_total_flops()

    assert operations(0.1) / operations(0.0) == pytest.approx(2.0, rel=0.05)
