"""Frame drafts of the Triton kernels against those of their reference, on random requests, and how long they take.

    TRITON_INTERPRET=1 python -m bench.frame_kernels REQUESTS SEED
    python -m bench.frame_kernels REQUESTS SEED --device cuda --timed

Triton chooses its interpreter when it is imported, so the requests run in a process of their own. Where vLLM is
installed the drafts go through the speculator that vLLM calls, elsewhere they come from the kernels themselves.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from bench.coco_names import COCO, MODEL, qwen_like_tokenizer
from torch import Tensor
from transformers import AutoTokenizer

from stage2_api.coordinates import coord_token
from stage2_trainer.matching import GTObject, serialize_objects
from stage2_trainer.serve.frame import Frame
from stage2_trainer.sync.vllm.vllm_compat import PROPOSED

REQUESTS, SEED = 2000, 1
SLOTS, LONGEST, MOST = 8, 700, 24
VOCABULARY = 8192  # of the model, more than a tokenizer has
BLOCKS = (1024, 512, 1024, 256)  # of positions, in turns: the interpreter takes as long for a large one
COORDINATES = tuple(coord_token(value) for value in range(0, 1000, 37))
TOKENIZERS = ("the tiny model's", "Qwen-like", "Qwen-like, names letter by letter")
KINDS = ("answer", "answer with wrong tokens", "another format", "loop", "names in the prompt")
BY_POSITION = PROPOSED.index("dp_sync_state")
SHAPES = {"bbox": 4, "poly": 8}
NOTED = 200  # requests between two lines that say how far it is
AT_ONCE = ((11, 11), (32, 7), (64, 5))
"""Requests that are timed, and the tokens of their drafts: `stage2_api.vllm.TOKENS_BY_BATCH`."""
TIMED_LENGTH, TIMED_RUNS = 2000, 100  # tokens of a request, and launches


class Equality:
    """How many drafts differ."""

    def lines(self) -> Iterator[str]:
        """The table's lines."""
        yield f"\n## {REQUESTS:,} drafts of the Triton kernels against their reference, in Triton's interpreter\n\n"
        command = [sys.executable, "-m", "bench.frame_kernels", str(REQUESTS), str(SEED)]
        yield subprocess.run(
            command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, text=True, stdout=subprocess.PIPE
        ).stdout


@cache
def tokenizer(name: str) -> Any:
    """Return one of TOKENIZERS."""
    if name == "the tiny model's":
        return AutoTokenizer.from_pretrained(MODEL)
    return qwen_like_tokenizer(tuple(COCO) if name == "Qwen-like" else ("x",))


@cache
def frame(name: str) -> Frame:
    """Return the frame in the tokens of one of TOKENIZERS."""
    return Frame(tokenizer(name), VOCABULARY)


def random_request(random: np.random.Generator, name: str, kind: str) -> list[int]:
    """Return a request that ends anywhere."""
    tokens = encoded(name, "<|im_start|>assistant\n" + _text(random, kind))
    cut = int(random.integers(1, len(tokens) + 1))
    tokens = tokens[max(0, cut - LONGEST) : cut]
    if kind == "answer with wrong tokens":
        for at in random.integers(0, len(tokens), 1 + len(tokens) // 20):
            tokens[at] = int(random.choice([VOCABULARY - 1, *tokens]))
    return tokens


def encoded(name: str, text: str) -> list[int]:
    """Return the tokens of a text."""
    return list(tokenizer(name).encode(text, add_special_tokens=False))


def _text(random: np.random.Generator, kind: str) -> str:
    if kind == "another format":
        key, name, comma = random.permutation(["box", "name", "desc", "object_7"])[:3]
        line = "{{'{}':[{},{}],'{}':{}}}{}"
        rows = (line.format(key, *_coordinates(random, 2), name, i, comma) for i in range(random.integers(1, 20)))
        return "".join(rows)
    if kind == "loop":
        piece = random.choice(['"object_1', "1", '"desc": "', "9", 'object_99": {"', " dog", '", "', "[["])
        return str(_answer(random)[: random.integers(0, 60)] + str(piece) * random.integers(1, 60))
    names = ", ".join(random.choice(list(COCO), 12)) + ": " if kind == "names in the prompt" else ""
    return names + _answer(random) + "<|im_end|>"


def _answer(random: np.random.Generator) -> str:
    names = random.choice(list(COCO), random.integers(1, 6))
    count = random.choice([1, 3, 8, 12, 30])
    answer = serialize_objects([_object(random, str(random.choice(names))) for _ in range(count)])
    shift = int(random.choice([0, 0, 90, 994]))  # numbers that get another digit
    for i in reversed(range(1, count + 1)):
        answer = answer.replace(f'"object_{i}"', f'"object_{i + shift}"')
    return answer


def _object(random: np.random.Generator, name: str) -> GTObject:
    kind = "bbox" if random.random() < 0.8 else "poly"
    return GTObject(name, kind, tuple(random.integers(0, 1000, SHAPES[kind]).tolist()))  # type: ignore[arg-type]


def _coordinates(random: np.random.Generator, count: int) -> list[str]:
    return [str(one) for one in random.choice(COORDINATES, count)]


def compare(requests: int, seed: int, device: str = "cpu") -> Iterator[tuple[str, str, bool, bool]]:
    """Return of each request its tokenizer and kind, whether anything is drafted, and whether the kernels differ."""
    from stage2_trainer.serve import frame_kernels

    random = np.random.default_rng(seed)
    has_vllm = find_spec("vllm") and find_spec("vllm.v1")  # hack/gpu-hour --carry has a stand-in without v1
    draft_by: Callable[..., Tensor] = _by_speculator if has_vllm else _by_kernels
    for turn in range(-(-requests // SLOTS)):
        name, most = TOKENIZERS[turn % len(TOKENIZERS)], int(random.integers(1, MOST + 1))
        frame_kernels.BLOCK = BLOCKS[turn % len(BLOCKS)]
        kinds = [str(kind) for kind in random.choice(KINDS, SLOTS)]
        written = [random_request(random, name, kind) for kind in kinds]
        tokens = random.integers(0, 1000, (SLOTS, LONGEST)).astype(np.int32)  # left by others
        for slot, request in enumerate(written):
            tokens[slot, : len(request)] = request
        lengths = np.array([len(request) for request in written], dtype=np.int32)
        rows, sampled = random.permutation(SLOTS), (random.random(SLOTS) < 0.9).astype(np.int32)
        last = np.array([request[-1:] for request in written])
        passed = [torch.from_numpy(one).to(device) for one in (tokens, rows, lengths, sampled, last)]
        drafts = draft_by(name, most, *passed).tolist()
        for row, sure, draft in zip(rows.tolist(), sampled.tolist(), drafts, strict=True):
            wanted = frame(name).draft(np.array(written[row], dtype=np.int32), most) if sure else []
            filled = wanted + written[row][-1:] * (most - len(wanted))
            yield name, kinds[row], bool(wanted), draft != filled


def _by_kernels(name: str, most: int, tokens: Tensor, rows: Tensor, *others: Tensor) -> Tensor:
    """Return what the kernels draft. others: lengths, num_sampled and last_sampled of `FrameKernels.draft`."""
    from stage2_trainer.serve.frame_kernels import FrameKernels

    kernels = FrameKernels(frame(name), most, slots=len(rows), longest=tokens.shape[1], device=tokens.device)
    return kernels.draft(tokens, rows, *others)


def _by_speculator(
    name: str, most: int, tokens: Tensor, rows: Tensor, lengths: Tensor, sampled: Tensor, last: Tensor
) -> Tensor:
    """Return what the speculator drafts, called as vLLM's model runner V2 calls it."""
    from stage2_trainer.serve import frame_speculator

    with patch.object(frame_speculator, "cached_tokenizer_from_config", lambda _: tokenizer(name)):
        speculator = frame_speculator.FrameSpeculator(_config(most), tokens.device, _states(tokens, lengths))
    batch, passed = SimpleNamespace(num_reqs=SLOTS, idx_mapping=rows), {"num_sampled": sampled, "last_sampled": last}
    arguments = [passed.get(one) for one in PROPOSED[1:BY_POSITION]]
    return speculator.propose(batch, *arguments, num_speculative_tokens=most)


def timed(device: str) -> Iterator[str]:
    """Yield the lines of a table of how long a batch's drafts take; the interpreter is timed at its smallest."""
    on_gpu, name = device != "cpu", TOKENIZERS[1]
    random = np.random.default_rng(SEED)
    yield "\n## The drafts of a batch\n\n"
    yield "| requests at once, of tokens | tokens of a draft | microseconds |\n| ---: | ---: | ---: |\n"
    for count, most in AT_ONCE if on_gpu else ((1, 5),):
        length = TIMED_LENGTH if on_gpu else LONGEST
        text = encoded(name, "".join(_answer(random) for _ in range(30)))[:length]
        tokens = torch.tensor([text] * count, dtype=torch.int32, device=device)
        ones = torch.ones(count, dtype=torch.int32, device=device)
        last = tokens[:, -1].long()
        arguments = (torch.arange(count, device=device), ones * len(text), ones, last)
        took = _seconds(name, most, tokens, arguments, TIMED_RUNS if on_gpu else 1)
        yield f"| {count}, {len(text):,} | {most} | {1e6 * took:,.0f} |\n"


def _seconds(name: str, most: int, tokens: Tensor, arguments: Sequence[Tensor], runs: int) -> float:
    """Return the mean wall time of drafts, launched one after the other."""
    from stage2_trainer.serve.frame_kernels import FrameKernels

    kernels = FrameKernels(frame(name), most, slots=len(tokens), longest=tokens.shape[1], device=tokens.device)
    kernels.draft(tokens, *arguments).tolist()  # compiles, and waits
    start = time.perf_counter()
    for _ in range(runs):
        drafts = kernels.draft(tokens, *arguments)
    drafts.tolist()
    return (time.perf_counter() - start) / runs


def _config(most: int) -> Any:
    """Return what the speculator reads of vLLM's configuration."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
        scheduler_config=SimpleNamespace(max_num_seqs=SLOTS),
        model_config=SimpleNamespace(max_model_len=LONGEST, get_vocab_size=lambda: VOCABULARY),
    )


def _states(tokens: Tensor, lengths: Tensor) -> Any:
    """Return what it reads of vLLM's `RequestState`."""
    return SimpleNamespace(all_token_ids=SimpleNamespace(gpu=tokens), total_len=SimpleNamespace(gpu=lengths))


def take_scalars_in_masks() -> None:
    """Let Triton's interpreter take masks in which a comparison of scalars is part, as compiled kernels do.

    The interpreter makes an array of such a comparison's result in the type of what was compared, and that of Triton
    3.9 takes no integers as a mask. No upstream issue found. Goes when the array is of booleans.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    plain = InterpreterBuilder.create_splat

    def create_splat(builder: Any, type_: Any, scalar: Any) -> Any:
        made = plain(builder, type_, scalar)
        made.data = made.data.astype(scalar.data.dtype)
        return made

    InterpreterBuilder.create_splat = create_splat


def main() -> None:
    """Print the tables; the exit code is 1 if a draft differs."""
    parser = argparse.ArgumentParser(prog="bench.frame_kernels", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("requests", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--timed", action="store_true", help="say how far it is, and how long a batch takes")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        take_scalars_in_masks()
    print("| tokenizer | requests that are | requests | with a draft | drafts that differ |")
    print("| --- | --- | ---: | ---: | ---: |")
    found: list[tuple[str, str, bool, bool]] = []
    for one in compare(options.requests, options.seed, options.device):
        found.append(one)
        if options.timed and len(found) % NOTED == 0:
            print(_row(found, "so far", ""), flush=True)
    for name, kind in sorted({one[:2] for one in found}):
        print(_row([one for one in found if one[:2] == (name, kind)], name, kind))
    print(_row(found, "all", ""))
    for line in timed(options.device) if options.timed else ():
        print(line, end="", flush=True)
    sys.exit(any(differs for *_, differs in found))


def _row(found: Sequence[tuple[str, str, bool, bool]], name: str, kind: str) -> str:
    drafted, differ = sum(one[2] for one in found), sum(one[3] for one in found)
    return f"| {name} | {kind} | {len(found):,} | {drafted:,} | {differ} |"


TABLE = Equality()

if __name__ == "__main__":
    main()
