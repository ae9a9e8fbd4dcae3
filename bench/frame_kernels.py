"""Frame drafts of the Triton kernels against those of their reference, in Triton's interpreter, on random requests.

The interpreter is chosen when Triton is imported, so the requests run in a process of their own:

    python -m bench.frame_kernels REQUESTS SEED
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from bench.speculation import COCO, MODEL, qwen_like_tokenizer
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


class Equality:
    """How many drafts differ."""

    def lines(self) -> Iterator[str]:
        """The table's lines."""
        yield f"\n## {REQUESTS} drafts of the Triton kernels against their reference, in Triton's interpreter\n\n"
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
    from stage2_trainer.serve import frame_kernels, frame_speculator

    random = np.random.default_rng(seed)
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
        passed = {
            "num_sampled": sampled,
            "last_sampled": np.array([request[-1:] for request in written]),
        }
        with patch.object(frame_speculator, "cached_tokenizer_from_config", lambda _, name=name: tokenizer(name)):
            speculator = frame_speculator.FrameSpeculator(
                _config(most), torch.device(device), _states(tokens, lengths, device)
            )
        batch = SimpleNamespace(num_reqs=SLOTS, idx_mapping=torch.from_numpy(rows).to(device))
        arguments = [
            torch.from_numpy(passed[one]).to(device) if one in passed else None for one in PROPOSED[1:BY_POSITION]
        ]
        drafts = speculator.propose(batch, *arguments, num_speculative_tokens=most).tolist()
        for row, sure, draft in zip(rows.tolist(), sampled.tolist(), drafts, strict=True):
            wanted = frame(name).draft(np.array(written[row], dtype=np.int32), most) if sure else []
            filled = wanted + written[row][-1:] * (most - len(wanted))
            yield name, kinds[row], bool(wanted), draft != filled


def _config(most: int) -> Any:
    """Return what the speculator reads of vLLM's configuration."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
        scheduler_config=SimpleNamespace(max_num_seqs=SLOTS),
        model_config=SimpleNamespace(max_model_len=LONGEST, get_vocab_size=lambda: VOCABULARY),
    )


def _states(tokens: Any, lengths: Any, device: str) -> Any:
    """Return what it reads of vLLM's `RequestState`."""
    tables = {"all_token_ids": tokens, "total_len": lengths}
    return SimpleNamespace(
        **{name: SimpleNamespace(gpu=torch.from_numpy(one).to(device)) for name, one in tables.items()}
    )


def _counts(found: Sequence[tuple[str, str, bool, bool]]) -> Counter[tuple[str, str]]:
    """Return the number of requests by tokenizer and kind, and of all."""
    return Counter(key for name, kind, *_ in found for key in ((name, kind), ("all", "")))


def main() -> None:
    """Print the table; the exit code is 1 if a draft differs."""
    requests, seed = map(int, sys.argv[1:])
    found = list(compare(requests, seed))
    counted, drafted, differ = (
        _counts(found), _counts([one for one in found if one[2]]), _counts([one for one in found if one[3]])
    )  # fmt: skip
    print("| tokenizer | requests that are | requests | with a draft | drafts that differ |")
    print("| --- | --- | ---: | ---: | ---: |")
    for (name, kind), count in sorted(counted.items(), key=lambda one: (one[0][1] == "", one[0])):
        print(f"| {name} | {kind} | {count:,} | {drafted[name, kind]:,} | {differ[name, kind]} |")
    sys.exit(bool(differ))


TABLE = Equality()

if __name__ == "__main__":
    main()
