"""Greedy answers of the tiny model with drafts and without: how many differ, and how close the tokens were there.

    python -m bench.draft_equality [--cpu]

A step that verifies several tokens rounds other bits than one that generates one, and so does a step of another number
of answers. Where two tokens are as good as equally likely, either may win. A margin is how much more likely the best
token is than the next best.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from bench.coco_names import MODEL
from bench.speculation import PICTURES, Engine

from stage2_trainer.rollouts.build import engine_environment

AT_ONCE = 8
CLOSE = 0.05  # nats; bfloat16 numbers from 8 to 16 are 0.0625 apart
Answers = list[list[tuple[int, float]]]
"""The tokens of each answer, and the margin of each, in nats."""


@dataclass(frozen=True)
class Equal:
    """How many answers differ."""

    on_cpu: bool = True

    def lines(self) -> Iterator[str]:
        """The table's lines. vLLM takes one engine to a process."""
        os.environ.update(engine_environment(on_cpu=self.on_cpu, eager=self.on_cpu))
        yield f"\n## {PICTURES} greedy answers of the tiny model, against those without drafts, {AT_ONCE} at once\n\n"
        yield f"| format | answers | tokens | others | margin where they part, nats | tokens with less than {CLOSE} |\n"
        yield "| --- | --- | ---: | ---: | ---: | ---: |\n"
        for dtype in ("float32", "bfloat16"):
            plain, alone = self._of_process("none", dtype, AT_ONCE, 1)
            (drafted,) = self._of_process("frame", dtype, AT_ONCE)
            for what, answers in (("with drafts of the frame", drafted), ("one at a time", alone)):
                yield f"| {dtype} | {what} | {_differences(answers, plain)} |\n"

    def _of_process(self, method: str, dtype: str, *batches: int) -> list[Answers]:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            return process.submit(_answers, method, dtype, batches, self.on_cpu).result()


def _answers(method: str, dtype: str, batches: Sequence[int], on_cpu: bool) -> list[Answers]:
    """Return an engine's answers, once for each number of them that are made at once."""
    engine = Engine(MODEL, method, dtype, on_cpu=on_cpu)  # caches no prefixes: an answer owes nothing to an earlier one
    return [_answered(engine, batch) for batch in batches]


def _answered(engine: Engine, batch: int) -> Answers:
    import vllm

    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=300, logprobs=2)
    found: list[Any] = []
    for first in range(0, PICTURES, batch):
        found += engine.llm.chat(engine.chats[first : first + batch], greedy, use_tqdm=False)
    return [list(map(_with_margin, one.outputs[0].token_ids, one.outputs[0].logprobs)) for one in found]


def _with_margin(token: int, likely: Any) -> tuple[int, float]:
    best, next_best = sorted((one.logprob for one in likely.values()), reverse=True)[:2]
    return token, best - next_best


def _differences(found: Answers, plain: Answers) -> str:
    margins = [margin for answer in plain for _, margin in answer]
    parted = [margin for one, other in zip(found, plain, strict=True) for margin in _where_they_part(one, other)]
    ahead = f"{min(parted):.4f} to {max(parted):.4f}" if parted else "–"
    return f"{len(margins):,} | {len(parted)} of {len(plain)} | {ahead} | {sum(one < CLOSE for one in margins)}"


def _where_they_part(one: list[tuple[int, float]], other: list[tuple[int, float]]) -> list[float]:
    pairs = zip(one, other, strict=False)
    return [margin for (left, _), (right, margin) in pairs if left != right][:1]


def main() -> None:
    """Print the table, on a GPU unless told otherwise."""
    parser = argparse.ArgumentParser(prog="bench.draft_equality", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="decode on a CPU")
    for line in Equal(on_cpu=parser.parse_args().cpu).lines():
        print(line, end="", flush=True)


TABLE = Equal()

if __name__ == "__main__":
    main()
