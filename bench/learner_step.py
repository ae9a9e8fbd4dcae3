"""A learner's step of an 8B on a GPU: its seconds, its memory beside what `stage2 doctor` predicts, and early rows.

    python -m bench.learner_step step|early [--tiny]

The configuration is that of examples/job-3v1.yaml, and engine, policy and loss are the learner's own. The weights of
the model are random, and so are tokens and pixels of its row: 1,024 tokens of an image and 309 of text for each of nine
sequences. Nothing is pushed. With --tiny the layers are narrow, and a CPU computes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from bench.gpu_hour import EXAMPLES, MOST_OVER
from bench.memory import AN_8B
from bench.timed_learner import VOCAB
from torch import Tensor
from transformers import AutoModelForImageTextToText, Qwen3VLConfig

from stage2_api.coordinates import BINS
from stage2_api.parsing import merged, parse_job
from stage2_api.runconfig import RunConfig
from stage2_trainer.checks.activations import LiveBytes
from stage2_trainer.checks.footprint import footprint
from stage2_trainer.checks.resources import GIB, total
from stage2_trainer.data.encode import Encoding
from stage2_trainer.learner.engine import AccelerateEngine
from stage2_trainer.learner.loss import LossTargets
from stage2_trainer.learner.padding_free_batch import Placed, collate, with_positions
from stage2_trainer.learner.passes import EarlyGradients, early_gradients
from stage2_trainer.model.attention import attention_here, pack_vision_tower
from stage2_trainer.model.policy import adapt, adapter_options, frozen_parts, part_rates, rope_model
from stage2_trainer.model.training_arguments import training_arguments
from stage2_trainer.model.transformers_compat import disable_cache
from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.process.ranks import memory_bytes

STEPS = 3  # the first one takes memory and tries kernels
COORD_SHARE = 1 / 3  # of the supervised tokens
ANSWER_SHARE = 0.8  # of a sequence's text is its answer
MOST_APART = 0.05  # gradients of two backward passes from those of one, both in bfloat16
TINY_SHAPE = Qwen3VLConfig(
    text_config={
        "hidden_size": 64, "num_hidden_layers": 36, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "intermediate_size": 128, "vocab_size": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [6, 5, 5]},
    },
    vision_config={
        "depth": 27, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
        "deepstack_visual_indexes": [8, 16, 24], "patch_size": 16, "num_position_embeddings": 2304,
    },
    tie_word_embeddings=False, dtype="bfloat16", image_token_id=2000, vision_start_token_id=2001,
    vision_end_token_id=2002,
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """A model, and the sequences of its row. side: patches along an image. text: tokens beside it."""

    shape: Any  # Qwen3VLConfig
    device: torch.device
    sequences: int
    side: int
    text: int


FULL = Size(AN_8B, torch.device("cuda:0"), sequences=9, side=64, text=309)
TINY = Size(TINY_SHAPE, torch.device("cpu"), sequences=3, side=16, text=30)


class Step:
    """A learner's engine with a row to train on."""

    def __init__(self, size: Size, folder: Path) -> None:
        self.size, self.folder = size, folder
        size.shape.save_pretrained(folder)
        torch.manual_seed(0)
        policy = self._policy()
        args = training_arguments(self.config, world_size=1)
        self.engine = AccelerateEngine(
            policy, args, loss=self.config.rollout_matching, vocab=VOCAB, max_steps=100, rates=part_rates(self.config),
            interrupt=Interrupt(),
        )  # fmt: skip
        self.inputs, self.targets = self._row(rope_model(policy))

    @cached_property
    def config(self) -> RunConfig:
        """The configuration of job-3v1 with this model."""
        job = yaml.safe_load((EXAMPLES / "job-3v1.yaml").read_text())
        changes = {"model": {"model": str(self.folder)}, "training": {"output_dir": str(self.folder / "run")}}
        return parse_job(merged(job, {"spec": {"config": changes}})).spec.config

    @property
    def tokens(self) -> int:
        """The tokens of the row."""
        return int(self.inputs["input_ids"].numel())

    def predicted(self) -> int:
        """Return the bytes that `stage2 doctor` predicts, but for a push."""
        parts = footprint(self.config, str(self.folder), row_tokens=self.tokens).learner
        return total(part for part in parts if part.name != "buckets of a push")

    def forward(self, *, apart: bool = False) -> Any:
        """Run the forward pass; return the loss parts."""
        return self.engine.row(self.inputs, self.targets, apart=apart)

    def gradient(self) -> Tensor:
        """Return all gradients as one vector, and forget them."""
        found = torch.cat([one.grad.flatten().float() for one in self.engine.trained if one.grad is not None])
        self.engine.wrapped.zero_grad()
        return found

    def _policy(self) -> Any:
        """Return the policy as `load_policy` does, but with random weights, of the adapters too."""
        implementation = attention_here(self.config.model.attn_impl)
        with self.size.device:
            model: Any = AutoModelForImageTextToText.from_config(
                self.size.shape, dtype=torch.bfloat16, attn_implementation=implementation
            )
        disable_cache(model)
        pack_vision_tower(model)
        policy = adapt(
            model, frozen_parts(self.config), adapter_options(self.config), regex=self.config.tuner.target_regex
        )
        with torch.no_grad():
            for name, one in policy.named_parameters():
                if "lora_B" in name:  # of zeros, the gradients of the other factors would be 0
                    one.normal_(std=1e-3)
        return policy

    def _row(self, rope: Any) -> tuple[dict[str, Any], LossTargets]:
        sequences = [with_positions(self._sequence(), rope) for _ in range(self.size.sequences)]
        return collate([sequences], pad_token_id=0).model_inputs(), self._targets(sequences)

    def _sequence(self) -> Encoding:
        shape, side, text = self.size.shape, self.size.side, self.size.text
        image = (side // shape.vision_config.spatial_merge_size) ** 2
        answer = int(text * ANSWER_SHARE)
        words = torch.randint(BINS + 1, int(0.9 * shape.text_config.vocab_size), (text - 2,))
        placed = torch.full((image,), shape.image_token_id)
        ids = torch.cat(
            [torch.tensor([shape.vision_start_token_id]), placed, torch.tensor([shape.vision_end_token_id])]
        )
        ids = torch.cat([ids, words])
        vision = shape.vision_config
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return Encoding(
            ids, (ids == shape.image_token_id).long(), torch.randn(side * side, width), torch.tensor([[1, side, side]]),
            len(ids) - answer, answer,
        )  # fmt: skip

    def _targets(self, sequences: Sequence[Placed]) -> LossTargets:
        ends = list(accumulate(len(one) for one in sequences))
        answers = [torch.arange(end - one.encoding.answer_len, end) for end, one in zip(ends, sequences, strict=True)]
        positions = torch.cat(answers)
        coords = int(len(positions) * COORD_SHARE)
        words, device = len(positions) - coords, self.size.device
        return LossTargets(
            positions=positions[torch.randperm(len(positions))].to(device),
            labels=torch.randint(0, BINS, (words,), device=device),
            bins=torch.randint(0, BINS, (coords,), device=device),
            in_prefix=torch.zeros(coords, dtype=torch.bool, device=device),
            prefix_count=0, ce_denominator=words, coord_denominator=coords,
        )  # fmt: skip


@contextmanager
def peak(step: Step) -> Iterator[list[int]]:
    """Yield a list that has the most bytes taken at once within the block, as its last element."""
    device, found = step.size.device, [0]
    weights = [*step.engine.policy.parameters(), *step.engine.policy.buffers()]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        found.append(torch.cuda.max_memory_allocated(device))
        return
    with LiveBytes() as live:
        live.ignore(*weights)
        yield found
    found.append(live.peak + sum(one.nbytes for one in weights))


def clock(step: Step) -> float:
    """Return the time at which the device has nothing left to do."""
    if step.size.device.type == "cuda":
        torch.cuda.synchronize(step.size.device)
    return time.perf_counter()


def steps(step: Step) -> Iterator[str]:
    """Yield a line for each step. Raises RuntimeError where one on a GPU takes more memory than was predicted."""
    predicted = step.predicted()
    yield f"\n## A learner's steps on a row of {step.tokens:,} tokens, {step.size.sequences} images\n\n"
    yield "| step | forward s | backward s | optimizer s | tokens/s | loss | peak GiB | predicted GiB | ratio |\n"
    yield f"|{' ---: |' * 9}\n"
    for number in range(1, STEPS + 1):
        with peak(step) as taken:
            start = clock(step)
            with step.engine.run_pass(last=True):
                loss = step.forward().total
                forward = clock(step)
                step.engine.backward(loss)
            backward = clock(step)
            step.engine.step(float)
            end = clock(step)
        times = f"{forward - start:.2f} | {backward - forward:.2f} | {end - backward:.3f}"
        memory = f"{taken[-1] / GIB:.2f} | {predicted / GIB:.2f} | {taken[-1] / predicted:.2f}"
        yield f"| {number} | {times} | {step.tokens / (end - start):,.0f} | {float(loss.detach()):.3f} | {memory} |\n"
        if step.size is FULL and taken[-1] > MOST_OVER * predicted:
            raise RuntimeError(f"a step took {taken[-1] / predicted:.2f} times the memory that `stage2 doctor` says")


def early_rows(step: Step) -> Iterator[str]:
    """Yield a line for each way to train a row. Raises RuntimeError where their gradients differ by more than rounding.

    Ordinary passes come first, twice: how far they are apart is what the kernels' order of sums makes.
    """
    yield f"\n## A row of {step.tokens:,} tokens that trains before the step's counts are known\n\n"
    yield "| passes | s | peak GiB | gradients differ by |\n| --- | ---: | ---: | ---: |\n"
    kept = early_gradients(step.engine.trained, memory_bytes(step.size.device))
    first: Tensor | None = None
    for how in ("ordinary", "ordinary, once more", "early", "early, once more"):
        with peak(step) as taken:
            start = clock(step)
            _train(step, how.startswith("early"))
            end = clock(step)
        found = step.gradient()
        first = found if first is None else first
        apart = float((found - first).norm() / first.norm())
        yield f"| {how} | {end - start:.2f} | {taken[-1] / GIB:.2f} | {apart:.2g} |\n"
        if apart > MOST_APART:
            raise RuntimeError(f"{how}: the gradient is {apart:.2g} of its norm away from that of ordinary passes")
    yield f"| the learner's choice | {'early' if kept else 'ordinary'} | | |\n"


def _train(step: Step, early: bool) -> None:
    """Leave the row's gradient with the parameters."""
    with step.engine.run_pass(last=True):
        if not early:
            step.engine.backward(step.forward().total)
            return
        gradients = EarlyGradients(step.engine.trained)
        ordinary, coords = step.forward(apart=True)
        gradients.add(ordinary.total, coords.total)
        gradients.apply(step.targets.ce_denominator, step.targets.coord_denominator)


TABLES = {"step": steps, "early": early_rows}


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(prog="bench.learner_step", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=tuple(TABLES))
    parser.add_argument("--tiny", action="store_true", help="rehearse on a CPU, with narrow layers")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        for line in TABLES[options.what](Step(TINY if options.tiny else FULL, Path(folder))):
            print(line, end="", flush=True)


if __name__ == "__main__":
    main()
