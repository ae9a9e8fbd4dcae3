"""The prompt by which servers and learner are asked to prove that they hold the same weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stage2_trainer.data.encode import Encoder


@dataclass(frozen=True)
class Probe:
    """One prompt, with an image and perhaps an answer, in both sides' terms.

    messages: for the server, in OpenAI's chat format.
    inputs: for the learner's model, as its processor made them; input_ids has shape (1, prompt).
    """

    messages: Sequence[Mapping[str, Any]]
    inputs: Mapping[str, Tensor]


def sample_probe(encoder: Encoder, chat: list[dict[str, Any]], answer: str = "") -> Probe:
    """Return a prompt as servers and learner are asked about it to prove that they hold the same weights.

    answer: follows as the assistant's turn, so that tokens as the model generates them are among those compared.
    """
    chat = [*chat, {"role": "assistant", "content": answer}] if answer else chat
    prompt = encoder.prompt(chat)
    inputs = {
        "input_ids": prompt.input_ids.unsqueeze(0),
        "mm_token_type_ids": prompt.mm_token_type_ids.unsqueeze(0),
        "pixel_values": prompt.pixel_values,
        "image_grid_thw": prompt.image_grid_thw,
    }
    return Probe(messages=chat, inputs={name: tensor for name, tensor in inputs.items() if tensor is not None})
