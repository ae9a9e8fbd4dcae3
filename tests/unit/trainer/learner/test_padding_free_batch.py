"""Sequences packed into one row give what each gives alone, under a mask of blocks and by packed attention.

Packed attention runs here on its CPU reference, through the real model.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface

from stage2_trainer.learner.padding_free_batch import collate, hidden_states, with_positions
from stage2_trainer.model.attention import PACKED, PACKED_VISION, DeferredMask, packed_attention
from stage2_trainer.model.policy import load_model
from stage2_trainer.rollouts.hf import left_padded

ANSWERS = ['{"object_1": {"desc": "red box"}}', "{}", '{"object_1": {"desc": "a"}, "object_2": {"desc": "b"}}']
ROUNDING = 1e-5  # float32, another order of additions


@pytest.fixture
def packed(model_path):
    return load_model(model_path, dtype=torch.float32, attn_implementation=PACKED)


@pytest.fixture
def masked(model_path):
    return load_model(model_path, dtype=torch.float32, attn_implementation="sdpa")


@pytest.fixture(params=["masked", "packed"])
def model(request):
    return request.getfixturevalue(request.param)


def placed_all(model, encoder, chats):
    return [
        with_positions(encoder.teacher_forced(encoder.prompt(chat), encoder.tokenizer.encode(answer)), model.model)
        for chat, answer in zip(chats, ANSWERS, strict=False)
    ]


@pytest.fixture
def sequences(packed, encoder, chats):
    return placed_all(packed, encoder, chats)


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


def test_single_sequence_row_equals_model_with_default_positions(model, sequences):
    for placed, found in zip(sequences, alone(model, sequences), strict=True):
        encoding = placed.encoding
        expected = model(
            input_ids=encoding.input_ids[None],
            mm_token_type_ids=encoding.mm_token_type_ids[None],
            pixel_values=encoding.pixel_values,
            image_grid_thw=encoding.image_grid_thw,
            use_cache=False,
        ).logits[0]
        assert torch.equal(found, expected)


def test_packed_sequence_logits_equal_unpacked_ones(model, sequences):
    rows = [sequences[:2], sequences[2:]]  # the second row is padded
    for arrangement in ([sequences], rows):
        for part, expected in zip(logits(model, arrangement), alone(model, sequences), strict=True):
            torch.testing.assert_close(part, expected, rtol=0, atol=ROUNDING)


def test_packed_gradients_equal_sum_of_unpacked_ones(model, sequences):
    together = gradients(model, logits(model, [sequences]), sequences)
    assert any("visual" in name for name in together)
    assert_near(together, gradients(model, alone(model, sequences), sequences))


@pytest.mark.parametrize("training", [True, False])
def test_changing_sequence_does_not_affect_others_in_packed_row(model, sequences, training):
    model.train(training)
    first, *rest = sequences
    changed = dataclasses.replace(
        first.encoding,
        input_ids=torch.where(first.encoding.mm_token_type_ids == 0, 300, first.encoding.input_ids),
        pixel_values=-first.encoding.pixel_values,
    )
    before = logits(model, [sequences])
    after = logits(model, [[dataclasses.replace(first, encoding=changed), *rest]])
    assert (before[0] - after[0]).abs().max() > 0.1
    assert all(map(torch.equal, before[1:], after[1:]))


def test_sequences_with_and_without_images_share_packed_row(model, encoder, sequences):
    chats = [[{"role": "user", "content": text}] for text in ("Say nothing.", "List the shapes of the alphabet.")]
    texts = placed_all(model, encoder, chats)
    row = [texts[0], sequences[0], texts[1], sequences[1]]
    packed = logits(model, [row])
    for part, expected in zip(packed, alone(model, row), strict=True):
        torch.testing.assert_close(part, expected, rtol=0, atol=ROUNDING)
    assert_near(gradients(model, packed, row), gradients(model, alone(model, row), row))


def test_images_are_concatenated_in_token_order(sequences):
    rows = collate([[sequences[2], sequences[0]], [sequences[1]]], pad_token_id=0)
    grids = [sequences[i].encoding.image_grid_thw for i in (2, 0, 1)]
    assert torch.equal(rows.image_grid_thw, torch.cat(grids))
    assert len({tuple(grid[0].tolist()) for grid in grids}) == 3


def test_packed_attention_equals_block_mask_over_row(packed, masked, sequences):
    for part, expected in zip(logits(packed, [sequences]), logits(masked, [sequences]), strict=True):
        torch.testing.assert_close(part, expected, rtol=0, atol=ROUNDING)
    found = gradients(packed, logits(packed, [sequences]), sequences)
    assert_near(found, gradients(masked, logits(masked, [sequences]), sequences))


def test_gradient_checkpointing_with_packed_attention_gives_same_gradients(packed, sequences):
    plain = gradients(packed.train(), logits(packed, [sequences]), sequences)
    packed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_near(gradients(packed, logits(packed, [sequences]), sequences), plain)


def test_packed_attention_builds_no_mask_tensor(packed, sequences):
    seen = []
    packed.model.language_model.layers[0].register_forward_pre_hook(
        lambda layer, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    logits(packed, [sequences])
    assert [isinstance(mask, DeferredMask) for mask in seen] == [True]
    assert "tensor" not in vars(seen[0])


def test_vision_tower_processes_all_images_in_one_attention_call(packed, sequences, monkeypatch):
    calls = []

    def recording(module, *args, **kwargs):
        calls.append((module.is_causal, len(kwargs["cu_seq_lens_q"]) - 1))
        return packed_attention(module, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, PACKED_VISION, recording)
    logits(packed, [sequences])
    assert calls == [(False, len(sequences))] * packed.config.vision_config.depth


def test_packed_attention_generation_with_cache_and_padding_equals_sdpa(packed, masked, encoder, chats):
    inputs = left_padded([encoder.prompt(chat) for chat in chats], pad=0)
    assert not inputs["attention_mask"].all()
    options = {"max_new_tokens": 12, "do_sample": False, "use_cache": True, "output_logits": True}
    options |= {"return_dict_in_generate": True, "eos_token_id": None}
    found, expected = (model.generate(**inputs, **options) for model in (packed, masked))
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=0, atol=ROUNDING)


def test_packed_attention_is_not_saved_in_model_config(packed, tmp_path):
    packed.save_pretrained(tmp_path)
    again = load_model(tmp_path, dtype=None, attn_implementation="sdpa")
    assert again.config.vision_config._attn_implementation == "sdpa"
    assert PACKED not in (tmp_path / "config.json").read_text()
