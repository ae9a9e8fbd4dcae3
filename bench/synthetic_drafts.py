"""What drafts save an 8B on one GPU: milliseconds of a decode step by method, length of the drafts and answers at once.

    python -m bench.synthetic_drafts [--tiny]

Nobody needs a trained model for that: the weights are random, and vLLM accepts drafts at rates that are given to it
(`rejection_sample_method: synthetic`). The rates are those of the replay of true answers with COCO's names
(bench/speculation.py), for each place of a draft. Each method has a process of its own, one after the other, and the
most telling come first. A decode step is what answers take beyond their first token, divided by their steps.

With --tiny narrow layers decode on a CPU, where vLLM has neither V2 nor given rates: V1 drafts, and what it drafts is
accepted where it is right.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
from bench import gpu_hour, memory
from bench.coco_names import COCO, qwen_like_tokenizer
from bench.speculation import Draft, acceptance, coco_objects, draft_counts, ngram_draft

from stage2_api.vllm import FRAME_LOOKUP
from stage2_trainer.rollouts.build import engine_environment
from stage2_trainer.serve.frame import Frame
from stage2_trainer.sync.vllm.vllm_compat import RUNNER_VARIABLE

REPLAYED = 60  # answers
NGRAM_LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 8}
Method = Literal["none", "frame, V2", "frame, V1", "n-gram"]


@dataclass(frozen=True)
class Size:
    """A model, and what is asked of it.

    at_once: numbers of answers. prompt, answer: their tokens. drafts: methods, and the most tokens of a draft.
    """

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    at_once: Sequence[int]
    prompt: int
    answer: int
    drafts: Sequence[tuple[Method, int]]
    on_cpu: bool


FULL = Size(
    memory.TEXT, memory.VISION, at_once=(11, 32, 64), prompt=1200, answer=256,
    drafts=(
        ("none", 0), ("frame, V2", 7), ("frame, V1", 7), ("n-gram", 7), ("frame, V2", 5), ("frame, V2", 11),
    ),
    on_cpu=False,
)  # fmt: skip
TINY = Size(
    gpu_hour.TINY.text, gpu_hour.TINY.vision, at_once=(1, 4), prompt=40, answer=24,
    drafts=(("none", 0), ("frame, V1", 5), ("frame, V1", 7), ("frame, V1", 11), ("n-gram", 7)), on_cpu=True,
)  # fmt: skip


class FilledProposer:
    """V1's proposer with each draft filled up, as the kernels fill theirs.

    Text of random weights has no frame, and vLLM accepts only what was drafted.
    """

    def __init__(self, vllm_config: Any) -> None:
        from stage2_trainer.serve.frame_proposer import FrameProposer  # imports vLLM

        self._plain, self._most = FrameProposer(vllm_config), vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, *_: object) -> None:
        """Do nothing; vLLM calls it when it loads weights."""

    def propose(self, sampled_token_ids: list[list[int]], *arguments: Any, **named: Any) -> list[list[int]]:
        """Return the draft of each request. sampled_token_ids: the tokens that each request gained in this step."""
        drafts = self._plain.propose(sampled_token_ids, *arguments, **named)
        pairs = zip(drafts, sampled_token_ids, strict=True)
        return [draft + sampled[-1:] * (self._most - len(draft)) for draft, sampled in pairs]


def speculative_config(method: Method, most: int, rates: Sequence[float], *, on_cpu: bool) -> dict[str, Any] | None:
    """Return vLLM's option of this name, with which it accepts drafts at these rates."""
    if method == "none":
        return None
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(rates)}
    shared = {"num_speculative_tokens": most, **({} if on_cpu else synthetic)}
    if method == "frame, V1":
        return {"method": "custom_class", "model": "bench.synthetic_drafts.FilledProposer", **shared}
    lookup = FRAME_LOOKUP if method == "frame, V2" else NGRAM_LOOKUP
    return {"method": "ngram" if on_cpu else "ngram_gpu", **lookup, **shared}


def rates_of(method: Method, most: int) -> list[float]:
    """Return the replay's acceptance of each place of a draft."""
    tokenizer = qwen_like_tokenizer(tuple(COCO))
    draft: Draft = ngram_draft if method == "n-gram" else Frame(tokenizer).draft
    return acceptance(tokenizer, coco_objects()[:REPLAYED], draft, most) if most else []


@dataclass(frozen=True)
class Measured:
    """Seconds of answers beyond their first tokens, and the share of these tokens that were accepted drafts."""

    seconds: float
    accepted: float


def start(model: str, size: Size, method: Method, most: int, rates: Sequence[float]) -> None:
    """Start vLLM in this process."""
    global _LLM
    import vllm

    widest = max(size.at_once)
    if size.on_cpu:
        options: dict[str, Any] = {"enforce_eager": True}
    else:  # few graphs: they are what takes long at the start
        graphs = {"cudagraph_capture_sizes": sorted({count * (1 + most) for count in size.at_once})}
        options = {"gpu_memory_utilization": 0.85, "compilation_config": graphs}
    _LLM = vllm.LLM(
        model=model, load_format="dummy", dtype="bfloat16", max_model_len=size.prompt + size.answer + 64,
        max_num_seqs=widest, enable_prefix_caching=False, disable_log_stats=False, seed=0,
        limit_mm_per_prompt={"image": 0, "video": 0},
        speculative_config=speculative_config(method, most, rates, on_cpu=size.on_cpu), **options,
    )  # fmt: skip
    measure(size, widest)  # compiles


def measure(size: Size, at_once: int) -> Measured:
    """Answer so many prompts of random tokens."""
    import vllm

    random = np.random.default_rng(at_once)
    prompts: Any = [{"prompt_token_ids": random.integers(0, 1000, size.prompt).tolist()} for _ in range(at_once)]
    seconds = []
    before = draft_counts(_LLM)[1]
    for length in (1, size.answer + 1):
        asked = vllm.SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        _LLM.generate(prompts, asked, use_tqdm=False)
        seconds.append(time.perf_counter() - begun)
    accepted = draft_counts(_LLM)[1] - before
    return Measured(seconds[1] - seconds[0], accepted / (at_once * size.answer))


_LLM: Any


def lines(size: Size) -> Iterator[str]:
    """The table's lines. Raises RuntimeError in the end where a method failed."""
    os.environ.update(engine_environment(on_cpu=size.on_cpu, eager=size.on_cpu))
    yield f"\n## Decode steps with drafts, {size.answer} tokens after a prompt of {size.prompt}\n\n"
    yield "| drafts | most tokens | at once | steps per token, replayed | measured | ms a step | tokens/s | ratio |\n"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
    plain: dict[int, float] = {}
    failed = []
    with TemporaryDirectory() as folder:
        model = str(Path(folder) / "model")
        gpu_hour.make_shape(Path(model), size.text, size.vision, gpu_hour.TINY.side)
        for method, most in size.drafts:
            try:
                yield from _of_method(model, size, (method, most), plain)
            except (RuntimeError, ValueError, OSError) as error:
                failed.append(method)
                yield f"| {method} | {most} | failed: {str(error).splitlines()[:1]} | | | | | |\n"
    if failed:
        raise RuntimeError(f"no figures, or not all, of: {', '.join(failed)}")


def _of_method(model: str, size: Size, drafts: tuple[Method, int], plain: dict[int, float]) -> Iterator[str]:
    """Yield a line for each number of answers at once. plain: seconds without drafts, which "none" leaves there."""
    method, most = drafts
    rates = rates_of(method, most)
    replayed = 1 / (1 + sum(rates))
    runner = {RUNNER_VARIABLE: "0"} if method == "frame, V1" else {}
    begin = partial(start, model, size, method, most, rates)
    with patch.dict(os.environ, runner), ProcessPoolExecutor(1, get_context("spawn"), begin) as process:
        for at_once in size.at_once:
            found = process.submit(measure, size, at_once).result()
            plain.setdefault(at_once, found.seconds)
            steps = 1 - found.accepted
            figures = [
                f"{replayed:.3f}", f"{steps:.3f}", f"{1e3 * found.seconds / (steps * size.answer):.2f}",
                f"{at_once * size.answer / found.seconds:,.0f}", f"{plain[at_once] / found.seconds:.2f}",
            ]  # fmt: skip
            yield f"| {method} | {most} | {at_once} | {' | '.join(figures)} |\n"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="bench.synthetic_drafts", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="rehearse on a CPU, with narrow layers")
    for line in lines(TINY if parser.parse_args().tiny else FULL):
        print(line, end="", flush=True)


if __name__ == "__main__":
    main()
