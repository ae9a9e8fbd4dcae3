"""Prompts of a GRPO run as cards: the image, and the answers that were compared with one another."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from stage2_report.sample_cards import Thumbnail, thumbnail
from stage2_trainer.data.records import Record
from stage2_trainer.telemetry.run_log import ROLLOUT_LOG

TRAIN, HELD_OUT = "train", "held-out"
MOST_ANSWERS = 200
"""Answers that are kept of one prompt, at one step."""
_START = re.compile(
    rb'\{"event": "rollout", "part": "(train|held-out)", "step": (\d{1,12}), "record": \d+, "sample_id"'
)
"""How the lines begin; of most no more is read than this."""

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
    left_out: int = 0

    def add(self, answer: RewardedAnswer) -> None:
        """Take an answer, where there is room."""
        if len(self.answers) < MOST_ANSWERS:
            self.answers.append(answer)
        else:
            self.left_out += 1

    @property
    def mean(self) -> float:
        """Return the mean reward."""
        return fmean(one.reward for one in self.answers)

    @property
    def spread(self) -> float:
        """Return the standard deviation of the rewards: where there is none, nothing is learnt."""
        return pstdev(one.reward for one in self.answers)


def answered_rounds(log: Path) -> set[Round]:
    """Return the rounds of which a run wrote rewarded answers down."""
    return {found for path in _files(log) for found, _ in _lines(path)}


def read_groups(log: Path, rounds: Collection[Round]) -> dict[Round, dict[str, AnswerGroup]]:
    """Return the answers of these rounds, of all learner processes, by their samples."""
    groups: dict[Round, dict[str, AnswerGroup]] = {one: {} for one in rounds}
    for path in _files(log):
        for found, own in _groups_of(path, rounds).items():
            for group in own.values():
                whole = groups[found].setdefault(group.sample_id, AnswerGroup(group.sample_id, group.image))
                for answer in group.answers:
                    whole.add(answer)
                whole.left_out += group.left_out
    return groups


def _groups_of(path: Path, rounds: Collection[Round]) -> dict[Round, dict[str, AnswerGroup]]:
    """Return the answers of one process. Of a round made again, after a checkpoint was gone back to, the last."""
    groups: dict[Round, dict[str, AnswerGroup]] = {}
    before: Round | None = None
    for found, line in _lines(path):
        if found != before and found in rounds:
            groups[found] = {}
        before = found
        if found in rounds and (told := _parsed(line)) is not None:
            group = groups[found].setdefault(told["sample_id"], AnswerGroup(told["sample_id"], told["image"]))
            group.add(_answer(told))
    return groups


def _answer(line: Mapping[str, Any]) -> RewardedAnswer:
    return RewardedAnswer(line["answer"], line["reward"], line["advantage"], line["rewards"], line["finish_reason"])


def _files(log: Path) -> list[Path]:
    return sorted(log.parent.glob(f"*{ROLLOUT_LOG}"))


def _lines(path: Path) -> Iterator[tuple[Round, bytes]]:
    with path.open("rb") as lines:
        for line in lines:
            if found := _START.match(line):
                yield (found[1].decode(), int(found[2])), line


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line; None for one that is still in writing."""
    try:
        found: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return found


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
