"""Which attention runs, its CPU reference, and how its kernel is called; on the real model: test_padding_free_batch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from stage2_trainer.model import attention
from stage2_trainer.model.attention import (
    PACKED,
    PACKED_VISION,
    Sequences,
    attention_here,
    attention_words,
    by_kernel,
    kernel_dtype,
    one_by_one,
)
from stage2_trainer.model.policy import load_policy
from tests.unit.trainer.learner.configs import run_config

ENDS = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
HEADS, GROUPS, HEAD_DIM = 4, 2, 8
AMPERE = {"capability": (8, 0), "autocast": None}


@pytest.mark.parametrize(
    ("asked", "flash_attn", "runs"),
    [
        ("auto", True, PACKED),
        ("auto", False, PACKED),
        ("flash_attention_2", True, "flash_attention_2"),
        ("flash_attention_2", False, PACKED),
        ("flash_attention_3", False, "flash_attention_3"),
        ("sdpa", True, "sdpa"),
        ("eager", True, "eager"),
    ],
)
def test_attention_follows_config_and_installed_packages(asked, flash_attn, runs, monkeypatch):
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: flash_attn)
    assert attention_here(asked) == runs


@pytest.mark.parametrize(
    ("dtype", "head_dim", "device", "attends_in"),
    [
        (torch.bfloat16, 128, AMPERE, torch.bfloat16),
        (torch.float16, 72, AMPERE, torch.float16),
        (torch.float32, 128, AMPERE, None),
        (torch.float32, 128, {**AMPERE, "autocast": torch.bfloat16}, torch.bfloat16),
        (torch.float32, 128, {**AMPERE, "autocast": torch.float32}, None),
        (torch.bfloat16, 128, {**AMPERE, "capability": (9, 0)}, torch.bfloat16),
        (torch.bfloat16, 128, {**AMPERE, "capability": (7, 5)}, None),
        (torch.bfloat16, 257, AMPERE, None),
        (torch.bfloat16, 264, AMPERE, None),
        (torch.bfloat16, 12, AMPERE, None),
    ],
)
def test_flash_kernel_is_used_only_for_supported_types_and_devices(dtype, head_dim, device, attends_in):
    assert kernel_dtype(dtype, head_dim, **device) == attends_in


def heads(count, device="cpu", dtype=torch.float32):
    return torch.randn(int(ENDS[-1]), count, HEAD_DIM, device=device, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("causal", [True, False])
def test_sequential_attention_equals_block_mask(causal):
    torch.manual_seed(1)
    query, key, value = heads(HEADS), heads(GROUPS), heads(GROUPS)
    owner = torch.bucketize(torch.arange(9), ENDS[1:], right=True)
    mask = owner[:, None] == owner[None, :]
    mask = mask.tril() if causal else mask
    whole = [one.transpose(0, 1).unsqueeze(0) for one in (query, key, value)]
    expected = scaled_dot_product_attention(*whole, attn_mask=mask, scale=0.3, enable_gqa=True).squeeze(0)
    found = one_by_one(query, key, value, Sequences(ENDS, 5, causal, scale=0.3))
    torch.testing.assert_close(found, expected.transpose(0, 1))


def test_flash_kernel_call_matches_its_signature_and_gives_gradients():
    """Without a GPU: on tensors without values PyTorch's own account of the kernel's shapes takes its place."""
    query, key, value = (heads(count, "meta", torch.bfloat16) for count in (HEADS, GROUPS, GROUPS))
    found = by_kernel(query, key, value, Sequences(ENDS.to("meta"), 5, causal=True))
    assert (found.shape, found.dtype) == (query.shape, torch.bfloat16)
    found.sum().backward()
    assert [one.grad.shape for one in (query, key, value)] == [query.shape, key.shape, value.shape]


def kernel_without_groups(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    """Stands in for the kernel of PyTorch 2.11, with its signature: each head has keys and values of its own."""
    assert query.shape == key.shape == value.shape
    return one_by_one(query, key, value, Sequences(cu_seq_q, max_q, window_size == (-1, 0), scale))


@pytest.mark.parametrize("causal", [True, False])
def test_kernel_without_grouped_heads_gets_repeated_heads_with_same_results(causal, monkeypatch):
    torch.manual_seed(1)
    asked = Sequences(ENDS, 5, causal, scale=0.3)
    inputs = [heads(HEADS), heads(GROUPS), heads(GROUPS)]
    expected = one_by_one(*inputs, asked)
    expected_gradients = torch.autograd.grad(expected.square().sum(), inputs)
    monkeypatch.setattr(varlen, "varlen_attn", kernel_without_groups)
    found = by_kernel(*inputs, asked)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), inputs), expected_gradients)


def test_attention_words_name_implementation_that_runs(monkeypatch):
    assert attention_words("sdpa", on_gpu=True) == "sdpa"
    assert attention_words(PACKED, on_gpu=False) == "packed, sequence by sequence"
    assert attention_words(PACKED, on_gpu=True) == "packed, at 16 bits PyTorch's kernel in groups of heads"
    monkeypatch.setattr(varlen, "varlen_attn", kernel_without_groups)
    assert attention_words(PACKED, on_gpu=True) == "packed, at 16 bits PyTorch's kernel with repeated keys and values"


@pytest.mark.parametrize(("asked", "vision"), [("auto", PACKED_VISION), ("sdpa", "sdpa")])
def test_policy_uses_configured_attention(model_path, asked, vision):
    config = run_config(model={"model": str(model_path), "torch_dtype": "float32", "attn_impl": asked})
    policy = load_policy(config).get_base_model()
    text = PACKED if asked == "auto" else asked
    assert policy.config.text_config._attn_implementation == text
    assert policy.model.visual.config._attn_implementation == vision
