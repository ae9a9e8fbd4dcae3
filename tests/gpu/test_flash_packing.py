"""Packed rows under flash attention, on a GPU: what each sequence gives alone, up to the rounding of bfloat16.

How much rounding may take is measured in place: by how far the same sequences alone are from float32. The kernel that
PyTorch brings is tried, and that of the flash-attn package where it is installed.
"""

import dataclasses
from functools import wraps

import pytest
import torch
from torch.nn.attention import varlen
from transformers.utils.import_utils import is_flash_attn_2_available

from stage2_trainer.learner.padding_free_batch import collate, hidden_states, with_positions
from stage2_trainer.model.attention import PACKED
from stage2_trainer.model.policy import load_model
from tests.gpu.conftest import DEVICE, ON_GPU_ALONE

ANSWERS = ['{"object_1": {"desc": "red box"}}', "{}", '{"object_1": {"desc": "a"}, "object_2": {"desc": "b"}}']
KERNELS = [PACKED, *(["flash_attention_2"] if is_flash_attn_2_available() else [])]
SLACK = 2.0  # packed may be this much further from float32 than unpacked is


@pytest.fixture(scope="module", params=KERNELS)
def flash(model_path, request):
    return load_model(model_path, dtype=torch.bfloat16, attn_implementation=request.param).to(DEVICE)


@pytest.fixture(scope="module")
def exact(model_path):
    return load_model(model_path, dtype=torch.float32, attn_implementation="sdpa").to(DEVICE)


@pytest.fixture(scope="module")
def sequences(exact, encoder, chats):
    """Three sequences with images of different sizes."""
    return [
        with_positions(encoder.teacher_forced(encoder.prompt(chat), encoder.tokenizer.encode(answer)), exact.model)
        for chat, answer in zip(chats, ANSWERS, strict=True)
    ]


def logits(model, row):
    """Logits of each sequence of a row, in float32."""
    inputs = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for name, value in collate([row], pad_token_id=0).model_inputs().items()
    }
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    return model.lm_head(hidden_states(model.model, inputs))[0].float().split([len(placed) for placed in row])


def alone(model, sequences):
    return [part for placed in sequences for part in logits(model, [placed])]


def gradient(model, outputs, sequences):
    model.zero_grad()
    losses = [
        torch.nn.functional.cross_entropy(part[:-1], placed.encoding.input_ids[1:].to(DEVICE), reduction="sum")
        for part, placed in zip(outputs, sequences, strict=True)
    ]
    torch.stack(losses).sum().backward()
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def test_packed_logits_are_as_near_to_float32_as_unpacked_ones(flash, exact, sequences):
    with torch.no_grad():
        truth = torch.cat(alone(exact, sequences))
        unpacked = (torch.cat(alone(flash, sequences)) - truth).norm()
        packed = (torch.cat(logits(flash, sequences)) - truth).norm()
    assert packed <= SLACK * unpacked


def test_packed_gradients_are_as_near_to_float32_as_unpacked_ones(flash, exact, sequences):
    truth = gradient(exact, alone(exact, sequences), sequences)
    unpacked = (gradient(flash, alone(flash, sequences), sequences) - truth).norm()
    packed = (gradient(flash, logits(flash, sequences), sequences) - truth).norm()
    assert packed <= SLACK * unpacked


def test_changing_sequence_does_not_affect_others_in_packed_row(flash, sequences):
    first, *rest = sequences
    changed = dataclasses.replace(
        first, encoding=dataclasses.replace(first.encoding, pixel_values=-first.encoding.pixel_values)
    )
    with torch.no_grad():
        before, after = logits(flash, [first, *rest]), logits(flash, [changed, *rest])
    assert (before[0] - after[0]).abs().max() > 0.1
    for one, other in zip(before[1:], after[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3)


@ON_GPU_ALONE
def test_packed_row_calls_flash_kernel_once_per_layer(model_path, sequences, monkeypatch):
    calls, kernel = [], varlen.varlen_attn

    @wraps(kernel)  # whose signature decides how it is called
    def counted(query, *args, **kwargs):
        calls.append(query.dtype)
        return kernel(query, *args, **kwargs)

    monkeypatch.setattr(varlen, "varlen_attn", counted)
    model = load_model(model_path, dtype=torch.bfloat16, attn_implementation=PACKED).to(DEVICE)
    with torch.no_grad():
        logits(model, sequences)
    layers = model.config.text_config.num_hidden_layers + model.config.vision_config.depth
    assert calls == [torch.bfloat16] * layers
