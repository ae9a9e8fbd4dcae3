"""Sequences packed into one row give exactly what each gives alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from stage2_trainer.learner.padding_free_batch import collate, place

ANSWERS = ['{"object_1": {"desc": "red box"}}', "{}", '{"object_1": {"desc": "a"}, "object_2": {"desc": "b"}}']
ROUNDING = 1e-5  # float32, another order of additions


@pytest.fixture
def sequences(model, encoder, chats):
    return [
        place(encoder.teacher_forced(encoder.prompt(chat), encoder.tokenizer.encode(answer)), model.model)
        for chat, answer in zip(chats, ANSWERS, strict=True)
    ]


def logits(model, rows):
    return model(**rows.model_inputs()).logits


def alone(model, placed):
    return logits(model, collate([[placed]], pad_token_id=0))[0]


def own_positions(model, placed):
    """The model's own answer for one sequence, with the positions that it computes itself."""
    encoding = placed.encoding
    return model(
        input_ids=encoding.input_ids[None],
        mm_token_type_ids=encoding.mm_token_type_ids[None],
        pixel_values=encoding.pixel_values,
        image_grid_thw=encoding.image_grid_thw,
        use_cache=False,
    ).logits[0]


def gradients(model, losses):
    model.zero_grad()
    sum(losses).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def surprise(outputs, placed):
    ids = placed.encoding.input_ids
    return torch.nn.functional.cross_entropy(outputs[:-1], ids[1:], reduction="sum")


def test_a_sequence_alone_in_a_row_gives_what_the_model_gives_without_our_positions(model, sequences):
    for placed in sequences:
        assert torch.equal(alone(model, placed), own_positions(model, placed))


def test_packed_logits_equal_unpacked_ones(model, sequences):
    packed = logits(model, collate([sequences], pad_token_id=0))[0]
    for part, placed in zip(packed.split([len(s) for s in sequences]), sequences, strict=True):
        torch.testing.assert_close(part, alone(model, placed), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("training", [True, False])
def test_changing_one_sequence_moves_no_other_one_in_its_row(model, sequences, training):
    model.train(training)
    changed = dataclasses.replace(
        sequences[0].encoding,
        input_ids=torch.where(sequences[0].encoding.mm_token_type_ids == 0, 300, sequences[0].encoding.input_ids),
        pixel_values=-sequences[0].encoding.pixel_values,
    )
    first, rest = len(sequences[0]), sequences[1:]
    before = logits(model, collate([sequences], pad_token_id=0))[0]
    after = logits(model, collate([[dataclasses.replace(sequences[0], encoding=changed), *rest]], pad_token_id=0))[0]
    assert (before[:first] - after[:first]).abs().max() > 0.1
    assert torch.equal(before[first:], after[first:])


def test_sequences_without_an_image_share_a_row_with_those_that_have_one(model, encoder, sequences):
    chats = [[{"role": "user", "content": text}] for text in ("Say nothing.", "List the shapes of the alphabet.")]
    texts = [
        place(encoder.teacher_forced(encoder.prompt(chat), encoder.tokenizer.encode(answer)), model.model)
        for chat, answer in zip(chats, ANSWERS, strict=False)
    ]
    row = [texts[0], sequences[0], texts[1], sequences[1]]
    packed = logits(model, collate([row], pad_token_id=0))[0].split([len(s) for s in row])
    for part, placed in zip(packed, row, strict=True):
        torch.testing.assert_close(part, alone(model, placed), rtol=0, atol=ROUNDING)
    together = gradients(model, [surprise(part, s) for part, s in zip(packed, row, strict=True)])
    apart = gradients(model, [surprise(alone(model, s), s) for s in row])
    for name, gradient in together.items():
        assert (gradient - apart[name]).norm() <= 1e-4 * apart[name].norm() + 1e-6, name


def test_rows_of_unequal_length_are_padded_without_effect(model, sequences):
    both = logits(model, collate([[sequences[0], sequences[1]], [sequences[2]]], pad_token_id=0))
    torch.testing.assert_close(both[1, : len(sequences[2])], alone(model, sequences[2]), rtol=0, atol=ROUNDING)


def test_packed_gradients_equal_the_sum_of_unpacked_ones(model, sequences):
    packed = logits(model, collate([sequences], pad_token_id=0))[0].split([len(s) for s in sequences])
    together = gradients(model, [surprise(part, s) for part, s in zip(packed, sequences, strict=True)])
    apart = gradients(model, [surprise(alone(model, s), s) for s in sequences])
    assert together.keys() == apart.keys()
    assert any("visual" in name for name in together)
    for name, gradient in together.items():
        assert (gradient - apart[name]).norm() <= 1e-4 * apart[name].norm() + 1e-6, name


def test_logits_only_where_they_are_asked_for_equal_those_of_the_whole_row(model, sequences):
    rows = collate([sequences], pad_token_id=0)
    keep = torch.tensor([3, 60, 100])
    some = model(**rows.model_inputs(), logits_to_keep=keep).logits
    torch.testing.assert_close(some, logits(model, rows)[:, keep], rtol=0, atol=ROUNDING)


def test_images_are_joined_in_the_order_of_their_tokens(model, sequences):
    rows = collate([[sequences[2], sequences[0]], [sequences[1]]], pad_token_id=0)
    grids = [sequences[i].encoding.image_grid_thw for i in (2, 0, 1)]
    assert torch.equal(rows.image_grid_thw, torch.cat(grids))
    assert len({tuple(grid[0].tolist()) for grid in grids}) == 3
