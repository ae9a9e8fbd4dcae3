"""Frame speculation against decoding token by token, and against vLLM's n-gram drafts.

One table replays true answers, COCO's 80 names among them in the tokens of a byte-level BPE that splits text as Qwen's
does. Suffix decoding, vLLM's other method without a model, is in it where `arctic_inference` can be imported (`pip
install --no-deps arctic-inference==0.1.1` compiles it in a minute). Another decodes with a real vLLM on the CPU
(bench/synthetic_drafts.py: on a GPU). Its model is the tiny one with feed-forward layers so wide that decoding is bound
by memory: the added columns have output weights of 0, so it answers as the tiny one does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from bench import schedule, slow_servers
from bench.coco_names import COCO, EXAMPLES, MODEL, qwen_like_tokenizer
from bench.rollouts import content
from bench.scenes import scene
from transformers import AutoModelForImageTextToText, AutoTokenizer

from stage2_api.coordinates import MAX_BIN
from stage2_api.vllm import LONGEST_DRAFT, TOKENS_BY_BATCH, Vllm
from stage2_trainer.matching import GTObject, ground_truth, serialize_objects
from stage2_trainer.rollouts.build import engine_environment
from stage2_trainer.serve.frame import Frame

BATCHES = (1, 8, 32)
LEAST_ANSWERS = 4
RUNS = 2
METHODS = ("none", "ngram", "frame")
IMAGES = 300  # of the replay
PICTURES = 48  # of the tiny model's answers
LENGTHS = (1, 2, 3, 5, 7, 11, 15, 24)  # of drafts
SUFFIX_DEPTH = 24  # vLLM's default, as the other options of the suffix method here
VERIFIED_S = 2 * 8e9 / 6e14  # of one token of an 8B
Draft = Callable[[Any, int], Sequence[int]]
LAYOUTS = (
    *schedule.JOBS,
    schedule.Job("2 + 2", 2, 2, 32),
    schedule.Job("5 + 3", 5, 3, 64),
    schedule.Job("4 + 4", 4, 4, 64),
)
SCHEDULES = {"generate all, then train": schedule.expected_after, "pipelined": schedule.expected_pipelined}


@dataclass(frozen=True)
class Decoded:
    """Answers of a real vLLM: seconds and decode steps by method and batch.

    wide: the width of the model's 4 feed-forward layers. batches: how many answers are made at once.
    """

    title: str
    wide: int
    batches: Sequence[int] = BATCHES

    def lines(self) -> Iterator[str]:
        """The table's lines. vLLM takes one engine to a process, so each method has a process of its own."""
        os.environ.update(engine_environment(on_cpu=True, eager=True))
        import vllm

        yield f"\n## {self.title}\n\nvLLM {vllm.__version__}. Batches of 1 give {LEAST_ANSWERS} answers, the others"
        yield f" as many as run at once; the best of {RUNS} runs.\n\n"
        yield "| at once | drafts | steps per token | drafts accepted | answers/s | ratio | other answers |\n"
        yield "| ---: | --- | ---: | ---: | ---: | ---: | ---: |\n"
        with TemporaryDirectory() as folder, ExitStack() as stack:
            model, spawned = widened(Path(folder) / "model", self.wide), get_context("spawn")
            processes = {
                method: stack.enter_context(ProcessPoolExecutor(1, spawned, _start, (model, method)))
                for method in METHODS
            }
            for batch in self.batches:
                yield from _rows(processes, batch)


def _rows(processes: dict[str, ProcessPoolExecutor], batch: int) -> Iterator[str]:
    turns = [{method: one.submit(_answer, batch).result() for method, one in processes.items()} for _ in range(RUNS)]
    plain = min(turn["none"].seconds for turn in turns)
    for method in METHODS:
        best = min((turn[method] for turn in turns), key=lambda one: one.seconds)
        other = sum(a != b for a, b in zip(best.answers, turns[0]["none"].answers, strict=True))
        count = len(best.answers)
        rates = f"{count / best.seconds:.2f} | {plain / best.seconds:.2f}"
        yield f"| {batch} | {method} | {best.steps:.3f} | {best.accepted:.0%} | {rates} | {other} of {count} |\n"
        if 2 * other > count:  # more than ties that flip
            raise RuntimeError(f"{method} gives {other} other answers of {count} than decoding token by token")


def _start(model: Path, method: str) -> None:
    global _ENGINE
    _ENGINE = Engine(model, method)


def _answer(batch: int) -> Run:
    return _ENGINE.answer(batch)


_ENGINE: Engine


class Run:
    """Answers, their seconds, decode steps per token, and the share of drafted tokens that were accepted."""

    def __init__(self, answers: list[list[int]], seconds: float, drafted: int, accepted: int) -> None:
        self.answers, self.seconds = answers, seconds
        generated = sum(map(len, answers))
        self.steps = 1 - accepted / generated
        self.accepted = accepted / max(drafted, 1)


class Engine:
    """A vLLM engine in this process, with drafts of one method."""

    def __init__(self, model: Path, method: Any, dtype: Any = "float32", *, on_cpu: bool = True) -> None:
        import vllm

        drafts = Vllm(speculation=method, max_num_seqs=max(BATCHES)).speculative_config(on_cpu=on_cpu, objects=True)
        self.llm = vllm.LLM(
            model=str(model), dtype=dtype, max_model_len=1024, max_num_seqs=max(BATCHES), enforce_eager=on_cpu,
            enable_prefix_caching=False, disable_log_stats=False, speculative_config=drafts, seed=0,
        )  # fmt: skip
        self.chats = chats()

    def answer(self, batch: int) -> Run:
        """Answer prompts, `batch` at once."""
        import vllm

        greedy = vllm.SamplingParams(temperature=0.0, max_tokens=300)
        before, start, found = draft_counts(self.llm), time.perf_counter(), []
        for first in range(0, max(batch, LEAST_ANSWERS), batch):
            found += self.llm.chat(self.chats[first : first + batch], greedy, use_tqdm=False)
        took = time.perf_counter() - start
        drafted, accepted = (b - a for a, b in zip(before, draft_counts(self.llm), strict=True))
        return Run([list(one.outputs[0].token_ids) for one in found], took, drafted, accepted)


def draft_counts(llm: Any) -> tuple[int, int]:
    """Return how many tokens vLLM has drafted so far, and accepted."""
    counters = {one.name: getattr(one, "value", 0) for one in llm.get_metrics()}
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    drafted, accepted = (int(counters.get(name, 0)) for name in names)
    return drafted, accepted


def widened(folder: Path, wide: int) -> Path:
    """Write the tiny model with wider feed-forward layers; it gives the tiny one's answers."""
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    model: Any = AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.float32)
    torch.manual_seed(0)
    for layer in model.model.language_model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            old: torch.nn.Linear = getattr(layer.mlp, name)
            rows, columns = (old.out_features, wide) if name == "down_proj" else (wide, old.in_features)
            new = torch.nn.Linear(columns, rows, bias=False)
            with torch.no_grad():
                if name == "down_proj":
                    new.weight.zero_()
                new.weight[: old.out_features, : old.in_features] = old.weight
            setattr(layer.mlp, name, new)
    model.config.text_config.intermediate_size = wide
    model.save_pretrained(folder)
    return folder


@cache
def chats() -> list[Any]:
    """Return chats with one image of shapes each."""
    with TemporaryDirectory() as folder:
        _made("make_shapes.py", Path(folder), "--held-out", str(PICTURES), "--max-shapes", "6")
        images = sorted(Path(folder).rglob("held-out*.png"))
        return [[{"role": "user", "content": content(image)}] for image in images]


def _made(script: str, folder: Path, *options: str) -> None:
    """Run one of the scripts that make data sets."""
    command = [sys.executable, str(EXAMPLES / script), str(folder), "--train", "1", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class Replayed:
    """Decode steps of answers that list the truth, if the model writes exactly them."""

    def lines(self) -> Iterator[str]:
        """The table's lines."""
        yield f"\n## Replay of {IMAGES} true answers\n\n"
        yield "| answers | tokenizer | tokens per object | drafts | steps per token | drafts accepted |\n"
        yield "| --- | --- | ---: | --- | ---: | ---: |\n"
        for what, whose, tokenizer, images in _data_sets():
            yield from _replayed(what, whose, tokenizer, images)


def _data_sets() -> Iterator[tuple[str, str, Any, Sequence[Sequence[GTObject]]]]:
    tiny = AutoTokenizer.from_pretrained(MODEL)
    yield "shapes", "the tiny model's", tiny, shapes()
    yield "digits", "the tiny model's", tiny, digits()
    yield "COCO's names", "Qwen-like", qwen_like_tokenizer(tuple(COCO)), coco_objects()


class ByLength:
    """Decode steps by the length of a draft, from which `stage2_api.vllm.TOKENS_BY_BATCH` follows."""

    def lines(self) -> Iterator[str]:
        """The table's lines."""
        yield "\n## Decode steps per token of the same answers, by the most tokens that `frame` drafts\n\n"
        yield f"| answers | {' | '.join(map(str, LENGTHS))} |\n| --- |{' ---: |' * len(LENGTHS)}\n"
        for what, _, tokenizer, images in _data_sets():
            draft = Frame(tokenizer).draft
            counts = [_counted(tokenizer, images, draft, most) for most in LENGTHS]
            yield f"| {what} | {' | '.join(f'{steps / tokens:.3f}' for steps, tokens, _ in counts)} |\n"


def _replayed(what: str, whose: str, tokenizer: Any, images: Sequence[Sequence[GTObject]]) -> Iterator[str]:
    count = sum(map(len, images))
    drafts: list[tuple[str, Draft]] = [("ngram", ngram_draft), ("frame", Frame(tokenizer).draft)]
    if find_spec("arctic_inference"):
        drafts.insert(1, ("suffix", SuffixDrafts().draft))
    for method, draft in drafts:
        steps, tokens, drafted = _counted(tokenizer, images, draft)
        figures = f"{tokens / count:.1f} | {method} | {steps / tokens:.3f} | {(tokens - steps) / drafted:.0%}"
        yield f"| {what} | {whose} | {figures} |\n"


def _counted(
    tokenizer: Any, images: Sequence[Sequence[GTObject]], draft: Draft, most: int = LONGEST_DRAFT
) -> tuple[int, int, int]:
    """Return the decode steps of true answers, their tokens, and the tokens drafted."""
    encoded = _encoded(tokenizer, images)
    steps = [step for one in encoded for step in _steps(*one, draft, most)]
    first = len(encoded)  # tokens that come with the prompt
    return first + len(steps), sum(len(answer) for _, answer in encoded), sum(drafted for _, drafted in steps)


def acceptance(tokenizer: Any, images: Sequence[Sequence[GTObject]], draft: Draft, most: int) -> list[float]:
    """Return of each place of a draft the share of decode steps that accept it, with all places before it."""
    right = [right for one in _encoded(tokenizer, images) for right, _ in _steps(*one, draft, most)]
    return [sum(one > place for one in right) / len(right) for place in range(most)]


def _encoded(tokenizer: Any, images: Sequence[Sequence[GTObject]]) -> list[tuple[list[int], list[int]]]:
    """Return the end of the prompt, and the true answer, of each image."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    prompt = encode("<|im_start|>assistant\n")
    return [(prompt, encode(f"{serialize_objects(list(one))}<|im_end|>")) for one in images]


def _steps(prompt: list[int], answer: list[int], draft: Draft, most: int) -> list[tuple[int, int]]:
    """Return of each decode step of an answer, after its first token, how many drafted tokens are right, and how many
    there are."""
    tokens = np.array(prompt + answer, dtype=np.int32)
    position = len(prompt) + 1
    steps: list[tuple[int, int]] = []
    while position < len(tokens):
        found = list(draft(tokens[:position], most))
        equal = takewhile(lambda pair: pair[0] == pair[1], zip(found, tokens[position:].tolist(), strict=False))
        right = sum(1 for _ in equal)
        position += 1 + right
        steps.append((right, len(found)))
    return steps


class Scheduled:
    """A step of `bench.schedule`'s model of an 8B on H100s, with the decode steps of COCO's names."""

    def lines(self) -> Iterator[str]:
        """The table's lines."""
        tokenizer = qwen_like_tokenizer(tuple(COCO))
        most = TOKENS_BY_BATCH[0][2]  # a server makes at most 16 of these answers at once
        steps, tokens, _ = _counted(tokenizer, coco_objects(), Frame(tokenizer).draft, most)
        per_token, verified = steps / tokens, 1 + most  # on GPUs each draft is filled up
        yield "\n## A step of an 8B on H100s, by the model of bench/schedule\n\n"
        yield f"{per_token:.3f} decode steps a token, each of which verifies {verified} tokens of every answer at "
        yield f"{1e6 * VERIFIED_S:.0f} us a token: 16 GFLOP at 600 TFLOP/s. Nothing of it was measured on a GPU.\n\n"
        yield "| job | schedule | without drafts s | with drafts s | ratio |\n| --- | --- | ---: | ---: | ---: |\n"
        speculating: dict[str, Any] = {
            "STEP_S": per_token * slow_servers.STEP_S,
            "STEP_S_PER_ANSWER": per_token * (slow_servers.STEP_S_PER_ANSWER + verified * VERIFIED_S),
        }
        for job in LAYOUTS:
            for name, expected in SCHEDULES.items():
                plain = _seconds(job, expected)
                with patch.multiple(slow_servers, **speculating):
                    found = _seconds(job, expected)
                yield f"| {job.name} | {name} | {plain:.1f} | {found:.1f} | {plain / found:.2f} |\n"


def _seconds(job: schedule.Job, expected: schedule.Expected) -> float:
    steps = range(1, 1 + schedule.MANY_STEPS)
    return sum(expected(job, step, True) for step in steps) / len(steps)


def ngram_draft(tokens: Any, most: int) -> list[int]:
    """Return what vLLM's n-gram method drafts."""
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as found

    drafted: list[int] = found(tokens, min_ngram=2, max_ngram=8, max_model_len=len(tokens) + most, k=most).tolist()
    return drafted


class SuffixDrafts:
    """What vLLM's suffix method drafts: what followed in the request and in all answers before it."""

    def __init__(self) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._cache = SuffixDecodingCache(max_tree_depth=SUFFIX_DEPTH, max_cached_requests=10_000)
        self._request, self._length = 0, 0

    def draft(self, tokens: Any, most: int) -> Sequence[int]:
        """Return the draft of a request; one that is not longer than that of the last call is the next one."""
        if len(tokens) <= self._length or not self._request:
            if self._request:
                self._cache.stop_request(self._request)
            self._request, self._length = self._request + 1, len(tokens) - 1
            self._cache.start_request(self._request, tokens[: self._length])
        self._cache.add_active_response(self._request, tokens[self._length :].tolist())
        self._length = len(tokens)
        pattern = tokens[-SUFFIX_DEPTH:]
        found: list[int] = self._cache.speculate(
            self._request, pattern, max_spec_tokens=most, max_spec_factor=1.0, min_token_prob=0.1
        ).token_ids
        return found


def shapes() -> list[Sequence[GTObject]]:
    """Return the outlines of one to six shapes in each image."""
    with TemporaryDirectory() as folder:
        _made("make_shapes.py", Path(folder), "--held-out", str(IMAGES), "--max-shapes", "6")
        records = list(map(json.loads, (Path(folder) / "held-out.jsonl").read_text().splitlines()))
    keyed = [{f"object_{i}": one for i, one in enumerate(record["objects"], 1)} for record in records]
    return [ground_truth(one).objects for one in keyed]


def digits() -> list[Sequence[GTObject]]:
    """Return the boxes of the digits in each image."""
    with TemporaryDirectory() as folder:
        _made("make_digits.py", Path(folder), "--test", str(IMAGES))
        coco = json.loads((Path(folder) / "test.json").read_text())
    names = {one["id"]: one["name"] for one in coco["categories"]}
    images: dict[int, list[GTObject]] = {one["id"]: [] for one in coco["images"]}
    for one in coco["annotations"]:
        left, top, width, height = (min(int(value), MAX_BIN // 2) for value in one["bbox"])
        box = GTObject(names[one["category_id"]], "bbox", (left, top, left + width, top + height))
        images[one["image_id"]].append(box)
    return list(images.values())


def coco_objects() -> list[Sequence[GTObject]]:
    """Return random boxes with COCO's names: some seven to an image, of some three names."""
    random = np.random.default_rng(0)
    names, weights = list(COCO), np.array(list(COCO.values())) / sum(COCO.values())
    images: list[Sequence[GTObject]] = []
    for seed in range(IMAGES):
        drawn = random.choice(names, size=random.integers(1, 6), replace=False, p=weights)
        _, boxes = scene(1 + random.poisson(6.3), polygons=0.0, seed=seed)
        images.append([replace(box, desc=str(random.choice(drawn))) for box in boxes])
    return images


DECODED = Decoded("Answers of a model of 100 million weights on two cores", wide=65_000)
REPLAYED, BY_LENGTH, SCHEDULED = Replayed(), ByLength(), Scheduled()
