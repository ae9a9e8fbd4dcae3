"""Prompts of a GRPO run as cards: the image, and the answers that were compared, with their rewards and advantages."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from stage2_report.run_history import parse_record
from stage2_report.sample_cards import Thumbnail, thumbnail
from stage2_trainer.data.records import Record
from stage2_trainer.telemetry.run_log import ROLLOUT_LOG

TRAIN, HELD_OUT = "train", "held-out"
MOST_ROUNDS, MOST_EVALUATIONS = 6, 2
WORST, BEST = 5, 3
"""Prompts of a round that get a card, by the mean reward of their answers."""
SHOWN_ANSWERS = 16
TEXT_CHARACTERS = 1500
UNKNOWN_SIDE = 1000
_START = re.compile(
    rb'\{"event": "rollout", "part": "(train|held-out)", "step": (\d{1,12}), "record": \d+, "sample_id"'
)
"""The start of a rollout's line; most lines are read no further."""

Round = tuple[str, int]
"""The part and the step of answers."""


@dataclass(frozen=True)
class RewardedAnswer:
    """One answer. reward: the weighted sum that it was trained by. rewards: each by its name, before weights."""

    text: str
    reward: float
    advantage: float
    rewards: Mapping[str, float]
    finish_reason: str


@dataclass
class AnswerGroup:
    """The answers to one prompt at one step. image: None where the record's is no file."""

    sample_id: str
    image: str | None
    answers: list[RewardedAnswer] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """The mean reward."""
        return fmean(one.reward for one in self.answers)

    @property
    def spread(self) -> float:
        """The standard deviation of the rewards; where it is zero, nothing is learnt."""
        return pstdev(one.reward for one in self.answers)


@dataclass(frozen=True)
class RewardCard:
    """One prompt at one choice of rounds. answers: best first. left_out: how many between them are not shown."""

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
        """How many of the answers reached the token limit."""
        return sum(one.finish_reason == "length" for one in self.answers)


@dataclass(frozen=True)
class RewardSamples:
    """The prompts of a page: labels of the rounds, (round, prompt) of each card, and the number of all prompts."""

    labels: Sequence[str]
    groups: Sequence[tuple[int, AnswerGroup]]
    of: int


def reward_samples(log: Path) -> RewardSamples | None:
    """Return the prompts that get cards, at some of the steps; None where the run wrote no rewarded answers down."""
    rounds = _choose_rounds(answered_rounds(log))
    if not rounds:
        return None
    groups = read_groups(log, rounds)
    prompts = [list(groups[one].values()) for one in rounds]
    shown = [(view, group) for view, every in enumerate(prompts) for group in _worst_and_best(every)]
    return RewardSamples([_label(one) for one in rounds], shown, sum(map(len, prompts)))


def reward_card(number: int, view: int, group: AnswerGroup, folder: Path | None) -> RewardCard:
    """Return the card of a prompt. folder: where its image is found by name; None = at its recorded path."""
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
        left_out=len(ranked) - len(shown),
    )


def answered_rounds(log: Path) -> set[Round]:
    """Return the rounds that have rewarded answers."""
    return {found for path in _files(log) for found, _ in _lines(path)}


def read_groups(log: Path, rounds: Collection[Round]) -> dict[Round, dict[str, AnswerGroup]]:
    """Return the answers of these rounds, from all learner processes, by sample."""
    groups: dict[Round, dict[str, AnswerGroup]] = {one: {} for one in rounds}
    for path in _files(log):
        for one, answers in _answers_of_process(path, rounds).items():
            for line in answers:
                group = groups[one].setdefault(line["sample_id"], AnswerGroup(line["sample_id"], line["image"]))
                rewards, reason = line["rewards"], line["finish_reason"]
                group.answers.append(RewardedAnswer(line["answer"], line["reward"], line["advantage"], rewards, reason))
    return groups


def _answers_of_process(path: Path, rounds: Collection[Round]) -> dict[Round, list[dict[str, Any]]]:
    """Return the lines of one process; of a round that was repeated after a restart, the last ones."""
    answers: dict[Round, list[dict[str, Any]]] = {}
    before: Round | None = None
    for one, line in _lines(path):
        if one != before and one in rounds:
            answers[one] = []
        before = one
        if one in rounds and (record := parse_record(line)) is not None:
            answers[one].append(record)
    return answers


def _files(log: Path) -> list[Path]:
    return sorted(log.parent.glob(f"*{ROLLOUT_LOG}"))


def _lines(path: Path) -> Iterator[tuple[Round, bytes]]:
    with path.open("rb") as lines:
        for line in lines:
            if match := _START.match(line):
                yield (match[1].decode(), int(match[2])), line


def _choose_rounds(rounds: set[Round]) -> list[Round]:
    """Return the first and last rounds of evaluations and of training, and some rounds of training between them."""
    held_out, train = (sorted(one for one in rounds if one[0] == part) for part in (HELD_OUT, TRAIN))
    return [*_evenly(held_out, MOST_EVALUATIONS), *_evenly(train, MOST_ROUNDS)]


def _evenly(rounds: Sequence[Round], most: int) -> list[Round]:
    if len(rounds) <= most:
        return list(rounds)
    return [rounds[round(index * (len(rounds) - 1) / (most - 1))] for index in range(most)]


def _label(one: Round) -> str:
    part, step = one
    return f"evaluation at step {step}" if part == HELD_OUT else f"training, step {step + 1}"


def _worst_and_best(prompts: Sequence[AnswerGroup]) -> list[AnswerGroup]:
    ranked = sorted(prompts, key=lambda one: one.mean)
    return ranked if len(ranked) <= WORST + BEST else [*ranked[:WORST], *ranked[-BEST:]]
