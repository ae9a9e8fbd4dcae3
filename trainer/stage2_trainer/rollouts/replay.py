"""The targets that a run trained on, rebuilt from its rollout log: no server, no model, no data set.

Each line of `rollouts.jsonl` holds the ids of an answer, the true objects, and the options of matching; the target
(`Y_train`) follows from these and the tokenizer, and the line holds its hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stage2_trainer.matching import (
    CoordVocab,
    GroundTruth,
    GTObject,
    MatchedTarget,
    MatchOptions,
    build_target,
    cut_before,
    vision_ids,
)


@dataclass(frozen=True)
class Replayed:
    """One rollout's line and its rebuilt target."""

    line: Mapping[str, Any]
    target: MatchedTarget

    @property
    def same(self) -> bool:
        """Whether the rebuilt target has the hash of the original."""
        return ids_sha256(self.target.y_train_ids) == str(self.line["y_train_sha256"])


def lines_of_step(lines: Iterable[Mapping[str, Any]], step: int) -> list[Mapping[str, Any]]:
    """Return the training rollouts of an optimizer step in order; of repeated ones the last.

    step: as in the lines, where the first is 0. A run that resumes from a checkpoint repeats its last step.
    """
    found = {
        (line["micro_step"], line["index"]): line
        for line in lines
        if line.get("event") == "rollout" and line["part"] == "train" and line["step"] == step
    }
    return [found[key] for key in sorted(found)]


def replay(lines: Iterable[Mapping[str, Any]], tokenizer: Any) -> list[Replayed]:
    """Rebuild the targets. tokenizer: the Hugging Face tokenizer of the run's model."""
    vocab, ends = CoordVocab.from_tokenizer(tokenizer), vision_ids(tokenizer)
    return [
        Replayed(
            line,
            build_target(
                cut_before(line["token_ids"], ends)[: line.get("kept_tokens")],
                GroundTruth(tuple(_object(one) for one in line["ground_truth"])),
                vocab,
                MatchOptions(**line["options"]),
            ),
        )
        for line in lines
    ]


def ids_sha256(ids: Sequence[int]) -> str:
    """Return the hash of token ids: of their decimal forms with commas between them."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()


def _object(document: Mapping[str, Any]) -> GTObject:
    return GTObject(document["desc"], document["kind"], tuple(document["bins"]))
