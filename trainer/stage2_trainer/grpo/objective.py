"""Advantages of answers, and CHORD: a supervised loss on reference answers that fades out (arXiv 2508.11408)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from stage2_api.grpo import Chord
from stage2_trainer.data.encode import Encoder
from stage2_trainer.data.images import ImageError, source_fault
from stage2_trainer.data.records import Record
from stage2_trainer.grpo.task import Task

EPSILON = 1e-4  # what TRL adds to a spread before it divides by it


def advantages(
    rewards: Tensor,
    group: int,
    *,
    estimator: Literal["grpo", "rloo", "reinforce_plus_plus"] = "grpo",
    scale: Literal["group", "batch", "none"] = "group",
) -> Tensor:
    """Return the advantage of each answer, shape (N,), from the rewards (N,) of groups of `group` in a row.

    A reward of NaN is ignored, and its advantage is 0. grpo and reinforce_plus_plus subtract the group's mean, rloo the
    mean of the group's others. The spread is that of the rewards, or with reinforce_plus_plus of the centred rewards.
    """
    grouped = rewards.view(-1, group)
    centred = grouped - grouped.nanmean(dim=1, keepdim=True)
    if estimator == "rloo":
        known = (~grouped.isnan()).sum(dim=1, keepdim=True)
        centred = centred * known / (known - 1)
    if scale == "none":
        return centred.flatten().nan_to_num(0.0)
    spread_of = centred if estimator == "reinforce_plus_plus" else grouped
    spread = _spread(spread_of if scale == "group" else spread_of.view(1, -1))
    return (centred / (spread + EPSILON)).flatten().nan_to_num(0.0)


def _spread(rows: Tensor) -> Tensor:
    """Return the standard deviation of each row without its NaN, shape (rows, 1)."""
    known = (~rows.isnan()).sum(dim=1, keepdim=True)
    squares = (rows - rows.nanmean(dim=1, keepdim=True)).square().nansum(dim=1, keepdim=True)
    return (squares / (known - 1)).sqrt()


def with_divergence(rewards: Tensor, policy: Tensor, reference: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Return the rewards (N,) minus beta times the divergence of each answer from the reference model.

    policy, reference: log-probabilities of the answer's tokens (N, T); mask (N, T) is 1 where there is one.
    """
    return rewards - beta * ((policy - reference) * mask).sum(dim=1)


def supervised_share(chord: Chord, step: int) -> float:
    """Return the supervised share of the loss at a step: up to the peak, then along a cosine to the valley."""
    warmup, decay = chord.mu_warmup_steps or 0, chord.mu_decay_steps or 0
    peak, valley = chord.mu_peak or 0.0, chord.mu_valley or 0.0
    if step < warmup:
        return peak * step / warmup
    if step - warmup >= decay:
        return valley
    return valley + (peak - valley) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / decay))


@dataclass(frozen=True)
class References:
    """Batches of reference answers, in another order for each process and each pass over the records."""

    records: Sequence[Record]
    task: Task
    encoder: Encoder
    seed: int

    def batch(self, micro_step: int, size: int, rank: int) -> tuple[dict[str, Tensor], Tensor]:
        """Return the inputs of a forward pass over `size` records and the answers' ids (B, T), -100 for padding.

        Prompts are padded on the left and answers on the right, so that all answers begin in the same column.
        """
        return self._padded([self._readable(micro_step * size + i, rank) for i in range(size)])

    def _readable(self, position: int, rank: int) -> tuple[Any, int]:
        """Return the record at a position of the order, or the next one whose images can be read.

        Raises:
            ImageError: no record's image can be read.
        """
        fault: ImageError | None = None
        for step in range(len(self.records)):
            record = self.records[self._index(position + step, rank)]
            try:
                return self._encoded(record)
            except ImageError as error:  # rollouts of this record set it aside
                fault = fault or source_fault(record.images) or error
        assert fault is not None, "there are records"
        raise fault

    def _index(self, position: int, rank: int) -> int:
        passes, place = divmod(position, len(self.records))
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * passes + 8191 * rank)
        return int(torch.randperm(len(self.records), generator=generator)[place])

    def _encoded(self, record: Record) -> tuple[Any, int]:
        prompt = self.encoder.prompt(self.task.chat(record, self.task.user_text(record, epoch=0)))
        ids = self.encoder.tokenizer.encode(self.task.reference(record), add_special_tokens=False)
        # the template adds more after the end-of-turn token, which no server ever generates
        encoding = self.encoder.teacher_forced(prompt, ids)
        return encoding, encoding.prompt_len + encoding.answer_len + 1

    def _padded(self, encoded: Sequence[tuple[Any, int]]) -> tuple[dict[str, Tensor], Tensor]:
        prompts = max(one.prompt_len for one, _ in encoded)
        answers = max(end - one.prompt_len for one, end in encoded)

        def column(one: Any, end: int, values: Tensor, fill: int) -> Tensor:
            return pad(values[:end], (prompts - one.prompt_len, answers - (end - one.prompt_len)), value=fill)

        filler = self.encoder.tokenizer.pad_token_id or 0
        ids = torch.stack([column(one, end, one.input_ids, filler) for one, end in encoded])
        mask = torch.stack([column(one, end, torch.ones_like(one.input_ids), 0) for one, end in encoded])
        kinds = torch.stack([column(one, end, one.mm_token_type_ids, 0) for one, end in encoded])
        images = {
            name: torch.cat([value for one, _ in encoded if (value := getattr(one, name)) is not None])
            for name in ("pixel_values", "image_grid_thw")
            if any(getattr(one, name) is not None for one, _ in encoded)
        }
        inputs = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": kinds, **images}
        return inputs, ids.masked_fill(mask == 0, -100)[:, prompts:]


def supervised_loss(logits: Tensor, answers: Tensor, *, phi: bool) -> Tensor:
    """Return the mean cross-entropy of the answers' tokens.

    logits (B, T, V) predict answers (B, T), -100 for padding. phi: a token's weight is p (1 - p), so a token counts
    less where the model is sure of it, or of another.
    """
    present = answers != -100
    chosen = logits[present].float().log_softmax(-1).gather(1, answers[present].unsqueeze(1)).squeeze(1)
    weights = chosen.detach().exp() * (1 - chosen.detach().exp()) if phi else torch.ones_like(chosen)
    return -(weights * chosen).sum() / present.sum().clamp(min=1)
