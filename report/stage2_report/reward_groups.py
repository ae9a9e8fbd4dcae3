"""The rollouts of a GRPO run: the answers to each prompt, with what each reward said to them and their advantages."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

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
