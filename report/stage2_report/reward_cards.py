"""Prompts of a GRPO run as cards: the image, and the answers that were compared with one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stage2_report.reward_groups import (
    HELD_OUT,
    TRAIN,
    AnswerGroup,
    RewardedAnswer,
    Round,
    answered_rounds,
    read_groups,
)
from stage2_report.thumbnails import Thumbnail, thumbnail
from stage2_trainer.data.records import Record

MOST_ROUNDS, MOST_EVALUATIONS = 6, 2
WORST, BEST = 5, 3
"""Prompts of a round that get a card, by the mean reward of their answers."""
SHOWN_ANSWERS = 16
TEXT_CHARACTERS = 1500
UNKNOWN_SIDE = 1000


@dataclass(frozen=True)
class RewardCard:
    """One prompt at one choice of rounds. answers: best first. left_out: those between that are not shown."""

    number: int
    view: int
    sample_id: str
    thumbnail: Thumbnail
    mean: float
    spread: float
    names: Sequence[str]
    answers: Sequence[RewardedAnswer]
    left_out: int

    @property
    def cut_off(self) -> int:
        """How many of the answers were cut at the most tokens."""
        return sum(one.finish_reason == "length" for one in self.answers)


@dataclass(frozen=True)
class RewardSamples:
    """What a page shows of a GRPO run's rollouts: labels of the choices, prompts by choice, and how many there are."""

    labels: Sequence[str]
    groups: Sequence[tuple[int, AnswerGroup]]
    of: int


def reward_samples(log: Path) -> RewardSamples | None:
    """Return the prompts that get cards, at some of the steps; None where no rewarded answers were written down."""
    rounds = _chosen(answered_rounds(log))
    if not rounds:
        return None
    found = read_groups(log, rounds)
    whole = [list(found[one].values()) for one in rounds]
    groups = [(view, group) for view, prompts in enumerate(whole) for group in _ends(prompts)]
    return RewardSamples([_label(one) for one in rounds], groups, sum(map(len, whole)))


def reward_card(number: int, view: int, group: AnswerGroup, folder: Path | None) -> RewardCard:
    """Return the card of a prompt. folder: where images lie now."""
    images = (group.image,) if group.image else ()
    record = Record(0, group.sample_id, images, UNKNOWN_SIDE, UNKNOWN_SIDE)
    ranked = sorted(group.answers, key=lambda one: one.reward, reverse=True)
    half = SHOWN_ANSWERS // 2
    shown = ranked if len(ranked) <= SHOWN_ANSWERS else [*ranked[:half], *ranked[-half:]]
    return RewardCard(
        number=number,
        view=view,
        sample_id=group.sample_id,
        thumbnail=thumbnail(record, folder),
        mean=group.mean,
        spread=group.spread,
        names=list(shown[0].rewards),
        answers=shown,
        left_out=len(ranked) - len(shown) + group.left_out,
    )


def _chosen(rounds: set[Round]) -> list[Round]:
    """Return the first and last rounds of evaluations and of training, and some rounds of training between them."""
    held_out, train = (sorted(one for one in rounds if one[0] == part) for part in (HELD_OUT, TRAIN))
    return [*_spread(held_out, MOST_EVALUATIONS), *_spread(train, MOST_ROUNDS)]


def _spread(rounds: Sequence[Round], most: int) -> list[Round]:
    if len(rounds) <= most:
        return list(rounds)
    return [rounds[round(place * (len(rounds) - 1) / (most - 1))] for place in range(most)]


def _label(one: Round) -> str:
    part, step = one
    return f"evaluation at step {step}" if part == HELD_OUT else f"training, step {step + 1}"


def _ends(prompts: Sequence[AnswerGroup]) -> list[AnswerGroup]:
    """Return the prompts of the lowest and of the highest mean rewards."""
    ranked = sorted(prompts, key=lambda one: one.mean)
    return ranked if len(ranked) <= WORST + BEST else [*ranked[:WORST], *ranked[-BEST:]]
