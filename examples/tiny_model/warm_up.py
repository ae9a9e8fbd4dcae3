"""The warm-up: teacher-forced training on true answers, which is what stage 1 is to a large model.

Structure (everything but coordinates) is learnt by cross entropy. A coordinate is learnt as a distribution over its
1000 bins, as stage 2 does it (semantics, section 6): soft cross entropy and W1 against a Gaussian around the true bin,
and a gate that keeps the probability on coord tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor
from torch.nn import functional as F

from stage2_api.rollout_matching import RolloutMatching
from stage2_trainer.learner.loss import coord_losses
from tiny_model.answers import COORD_TOKENS
from tiny_model.batches import IGNORED, Batch, Batches
from tiny_model.foreign import Model, Processor

OnStep = Callable[[int, float], None]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Recipe:
    """How to train. The defaults are the recipe of the checkpoint that is checked in."""

    steps: int = 1400
    """Optimizer steps; the learning rate's schedule spans them."""
    batch_size: int = 16
    """Images in a step. 16 learns more in a minute on two CPU cores than 32 does."""
    learning_rate: float = 2e-3
    """The peak, after the warm-up."""
    final_fraction: float = 0.02
    """Where the cosine ends, as a fraction of the peak."""
    warm_up_steps: int = 100
    """Steps of linear rise to the peak."""
    weight_decay: float = 0.05
    """On matrices; biases and norms have none."""
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0
    """Largest norm of the gradient."""
    sigma: float = 8.0
    """Width of a coordinate's target in bins: a little less than a pixel, which is 10.4 bins."""


def train(model: Model, processor: Processor, recipe: Recipe, *, seed: int, on_step: OnStep) -> None:
    """Train `model` in place to list shapes; `on_step` is called with each step's number (from 1) and loss."""
    coord_ids = torch.tensor(processor.tokenizer.convert_tokens_to_ids(COORD_TOKENS))
    batches = Batches(processor, model, seed=seed, size=recipe.batch_size)
    fit(model, batches, recipe, partial(answer_loss, coord_ids=coord_ids, sigma=recipe.sigma), on_step)


def fit(model: Model, batches: Batches, recipe: Recipe, loss_of: Loss, on_step: OnStep) -> None:
    """Train `model` in place on the first batches, with a loss of logits and labels."""
    optimizer, schedule = _optimizer(model, recipe)
    model.train()
    for step, batch in enumerate(_first(batches, recipe.steps), start=1):
        loss = loss_of(model(**batch.inputs).logits, batch.labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        on_step(step, loss.item())
    model.eval()


def text_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of an answer without coordinates; shapes as in `answer_loss`."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def answer_loss(logits: Tensor, labels: Tensor, coord_ids: Tensor, *, sigma: float) -> Tensor:
    """Return the loss of (batch, answer, vocabulary) logits against (batch, answer) labels, as the module describes."""
    kept = labels != IGNORED
    logits, labels = logits[kept].float(), labels[kept]
    bins = torch.searchsorted(coord_ids, labels)
    is_coord = torch.isin(labels, coord_ids)
    structure = F.cross_entropy(logits[~is_coord], labels[~is_coord])
    options = RolloutMatching(target_sigma=sigma)
    return structure + coord_losses(logits[is_coord], bins[is_coord], coord_ids, options).mean()


def _optimizer(model: Model, recipe: Recipe) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, recipe))


def rate(step: int, recipe: Recipe) -> float:
    """Return the fraction of the peak learning rate after `step` steps: a linear rise, then a cosine."""
    rise = min(1.0, (step + 1) / recipe.warm_up_steps)
    progress = min(1.0, step / recipe.steps)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return rise * (recipe.final_fraction + (1 - recipe.final_fraction) * cosine)


def _first(batches: Batches, steps: int) -> Iterator[Batch]:
    return islice(iter(batches), steps)
