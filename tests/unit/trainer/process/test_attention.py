"""Packed attention, on its CPU reference through the real model: each sequence of a row gives what it gives alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface

from stage2_trainer.learner.padding_free_batch import collate, hidden_states, place
from stage2_trainer.process import attention
from stage2_trainer.process.attention import (
    PACKED,
    PACKED_VISION,
    DeferredMask,
    Sequences,
    attention_here,
    by_kernel,
    kernel_dtype,
    one_by_one,
    packed_attention,
)
from stage2_trainer.process.policy import load_model, load_policy
from stage2_trainer.rollouts.hf import left_padded
from tests.unit.trainer.learner.configs import run_config

ANSWERS = ['{"object_1": {"desc": "red box"}}', "{}", '{"object_1": {"desc": "a"}, "object_2": {"desc": "b"}}']
ROUNDING = 1e-5  # float32, another order of additions
ENDS = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
HEADS, GROUPS, HEAD_DIM = 4, 2, 8
AMPERE = {"capability": (8, 0), "autocast": None}


@pytest.fixture
def packed(model_path):
    return load_model(model_path, dtype=torch.float32, attn_implementation=PACKED)


@pytest.fixture
def masked(model_path):
    return load_model(model_path, dtype=torch.float32, attn_implementation="sdpa")


@pytest.fixture
def sequences(packed, encoder, chats):
    return [
        place(encoder.teacher_forced(encoder.prompt(chat), encoder.tokenizer.encode(answer)), packed.model)
        for chat, answer in zip(chats, ANSWERS, strict=True)
    ]


def logits(model, rows):
    """Logits of each sequence of each row."""
    found = model.lm_head(hidden_states(model.model, collate(rows, pad_token_id=0).model_inputs()))
    lengths = [[len(placed) for placed in row] for row in rows]
    return [
        part
        for row, own in zip(found, lengths, strict=True)
        for part in row.split([*own, len(row) - sum(own)])[: len(own)]
    ]


def alone(model, sequences):
    return [part for placed in sequences for part in logits(model, [[placed]])]


def gradients(model, outputs, sequences):
    model.zero_grad()
    losses = [
        cross_entropy(part[:-1], placed.encoding.input_ids[1:], reduction="sum")
        for part, placed in zip(outputs, sequences, strict=True)
    ]
    sum(losses).backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def assert_near(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() <= 1e-4 * expected[name].norm() + 1e-6, name


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
def test_what_runs_follows_from_the_configuration_and_what_is_installed(asked, flash_attn, runs, monkeypatch):
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
def test_the_kernel_is_asked_only_for_what_it_can(dtype, head_dim, device, attends_in):
    assert kernel_dtype(dtype, head_dim, **device) == attends_in


def heads(count, device="cpu", dtype=torch.float32):
    return torch.randn(int(ENDS[-1]), count, HEAD_DIM, device=device, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("causal", [True, False])
def test_sequences_one_by_one_attend_as_under_a_mask_of_blocks(causal):
    torch.manual_seed(1)
    query, key, value = heads(HEADS), heads(GROUPS), heads(GROUPS)
    owner = torch.bucketize(torch.arange(9), ENDS[1:], right=True)
    mask = owner[:, None] == owner[None, :]
    mask = mask.tril() if causal else mask
    whole = [one.transpose(0, 1).unsqueeze(0) for one in (query, key, value)]
    expected = scaled_dot_product_attention(*whole, attn_mask=mask, scale=0.3, enable_gqa=True).squeeze(0)
    found = one_by_one(query, key, value, Sequences(ENDS, 5, causal, scale=0.3))
    torch.testing.assert_close(found, expected.transpose(0, 1))


def test_the_kernel_is_called_by_its_own_signature_and_gives_gradients():
    """Without a GPU: on tensors without values PyTorch's own account of the kernel's shapes takes its place."""
    query, key, value = (heads(count, "meta", torch.bfloat16) for count in (HEADS, GROUPS, GROUPS))
    found = by_kernel(query, key, value, Sequences(ENDS.to("meta"), 5, causal=True))
    assert (found.shape, found.dtype) == (query.shape, torch.bfloat16)
    found.sum().backward()
    assert [one.grad.shape for one in (query, key, value)] == [query.shape, key.shape, value.shape]


def test_packed_sequences_give_what_each_gives_alone(packed, sequences):
    rows = [sequences[:2], sequences[2:]]  # the second row is padded
    for arrangement in ([sequences], rows):
        for part, expected in zip(logits(packed, arrangement), alone(packed, sequences), strict=True):
            torch.testing.assert_close(part, expected, rtol=0, atol=ROUNDING)


def test_packed_gradients_equal_the_sum_of_unpacked_ones(packed, sequences):
    together = gradients(packed, logits(packed, [sequences]), sequences)
    assert any("visual" in name for name in together)
    assert_near(together, gradients(packed, alone(packed, sequences), sequences))


def test_it_gives_what_a_mask_over_the_whole_row_gives(packed, masked, sequences):
    for part, expected in zip(logits(packed, [sequences]), logits(masked, [sequences]), strict=True):
        torch.testing.assert_close(part, expected, rtol=0, atol=ROUNDING)
    found = gradients(packed, logits(packed, [sequences]), sequences)
    assert_near(found, gradients(masked, logits(masked, [sequences]), sequences))


def test_changing_one_sequence_moves_no_other_one_in_its_row(packed, sequences):
    first, *rest = sequences
    encoding = dataclasses.replace(first.encoding, pixel_values=-first.encoding.pixel_values)
    before = logits(packed, [[first, *rest]])
    after = logits(packed, [[dataclasses.replace(first, encoding=encoding), *rest]])
    assert (before[0] - after[0]).abs().max() > 0.1
    for one, other in zip(before[1:], after[1:], strict=True):
        assert torch.equal(one, other)


def test_layers_that_are_computed_again_in_the_backward_pass_see_the_same_sequences(packed, sequences):
    plain = gradients(packed.train(), logits(packed, [sequences]), sequences)
    packed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_near(gradients(packed, logits(packed, [sequences]), sequences), plain)


def test_no_mask_is_built_for_a_packed_row(packed, sequences):
    seen = []
    packed.model.language_model.layers[0].register_forward_pre_hook(
        lambda layer, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    logits(packed, [sequences])
    assert [isinstance(mask, DeferredMask) for mask in seen] == [True]
    assert "tensor" not in vars(seen[0])


def test_the_vision_tower_attends_to_all_images_in_one_call(packed, sequences, monkeypatch):
    calls = []

    def recording(module, *args, **kwargs):
        calls.append((module.is_causal, len(kwargs["cu_seq_lens_q"]) - 1))
        return packed_attention(module, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, PACKED_VISION, recording)
    logits(packed, [sequences])
    assert calls == [(False, len(sequences))] * packed.config.vision_config.depth


def test_generation_with_a_cache_and_padding_is_that_of_sdpa(packed, masked, encoder, chats):
    inputs = left_padded([encoder.prompt(chat) for chat in chats], pad=0)
    assert not inputs["attention_mask"].all()
    options = {"max_new_tokens": 12, "do_sample": False, "use_cache": True, "output_logits": True}
    options |= {"return_dict_in_generate": True, "eos_token_id": None}
    found, expected = (model.generate(**inputs, **options) for model in (packed, masked))
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=0, atol=ROUNDING)


def test_a_model_that_was_loaded_so_is_saved_without_it(packed, tmp_path):
    packed.save_pretrained(tmp_path)
    again = load_model(tmp_path, dtype=None, attn_implementation="sdpa")
    assert again.config.vision_config._attn_implementation == "sdpa"
    assert PACKED not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize(("asked", "vision"), [("auto", PACKED_VISION), ("sdpa", "sdpa")])
def test_the_policy_attends_as_it_is_configured(model_path, asked, vision):
    config = run_config(model={"model": str(model_path), "torch_dtype": "float32", "attn_impl": asked})
    policy = load_policy(config).get_base_model()
    text = PACKED if asked == "auto" else asked
    assert policy.config.text_config._attn_implementation == text
    assert policy.model.visual.config._attn_implementation == vision
