"""The bytes of a push of changed weights alone, in full training with servers in bfloat16.

vLLM's `sparse_nccl` takes, for each weight that changed, its place in the checkpoint's tensor (int32) and its new
value. How many change depends on the size of weights beside the learning rate: an update shows in bfloat16 once it
carries the float32 copy, which DeepSpeed keeps, over the middle between two values. So a share is measured on a tiny
model in our own training, and computed for weights of other sizes with the same updates. Seconds are modelled: no GPU
and no network is measured.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from bench.memory import AN_8B
from bench.sync_model import MEASURED, NETWORKS, RANK, adapter_bytes
from bench.timed_learner import SYNC_S
from torch import Tensor
from transformers import AutoModelForImageTextToText

from stage2_api.runconfig import RunConfig
from stage2_trainer.checks.preflight import checked_records
from stage2_trainer.learner.build import build_learner
from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.run_context import RunContext
from stage2_trainer.telemetry.run_log import JsonLines, SilentLog

if TYPE_CHECKING:
    from vllm.model_executor.model_loader.checkpoint_weight_patch import CheckpointWeightPatch

EXAMPLES = Path(__file__).parents[1] / "examples"
RATES = (1e-5, 2e-6)
WARM_UP, STEPS, COUNTED = 3, 40, 8  # steps of a run; the last ones are counted
MISSED = (1, 2, 4, 8)  # pushes since the one that a server holds
_TEXT: Any = AN_8B.text_config
INIT_SCALE: float = _TEXT.initializer_range
SCALES = (INIT_SCALE, 2 * INIT_SCALE)
VISIBLE_BITS = 7  # of a bfloat16's mantissa
LARGEST, SMALLEST = 8, -60  # powers of two between which weights lie
INDEX = torch.int32  # as the engine demands
CHANGED_BYTES, DENSE_BYTES = INDEX.itemsize + torch.bfloat16.itemsize, torch.bfloat16.itemsize
STEP_S = 11.4  # of job-3v1, pipelined, with drafts (speculation.md), the push of an adapter included


def patch(name: str, before: Tensor, after: Tensor) -> CheckpointWeightPatch:
    """Return what is sent of a tensor in bfloat16 to a server that holds what it was before."""
    from vllm.model_executor.model_loader.checkpoint_weight_patch import CheckpointWeightPatch

    flat = after.flatten()
    places = torch.nonzero(differs(before, after).flatten()).flatten()
    return CheckpointWeightPatch(name, tuple(after.shape), after.dtype, flat[places], places.to(INDEX))


def differs(before: Tensor, after: Tensor) -> Tensor:
    """Return where the bits of two tensors in bfloat16 differ."""
    return before.view(torch.int16) != after.view(torch.int16)


def patch_bytes(sent: CheckpointWeightPatch) -> int:
    """Return the bytes of a patch on the wire."""
    assert sent.indices is not None
    return sent.indices.nbytes + sent.values.nbytes


@dataclass
class Run:
    """The trained weights of a run after each of its steps: of each tensor, in float32. rate: of its learning."""

    rate: float
    names: tuple[str, ...] = ()
    after: list[list[Tensor]] = field(default_factory=list)

    def share(self, pushes: int = 1) -> float:
        """Return the share of bfloat16 weights that change in so many steps, in the mean over the counted ones."""
        starts = range(len(self.after) - COUNTED - 1, len(self.after) - pushes)
        changed = sum(self._sent(start, start + pushes) for start in starts) / CHANGED_BYTES
        return changed / len(starts) / len(self.weights())

    def wide_share(self) -> float:
        """Return the share of float32 weights that change in the last step."""
        return float((self.weights(-2) != self.weights()).double().mean())

    def weights(self, step: int = -1) -> Tensor:
        """Return all weights after a step."""
        return torch.cat([one.flatten() for one in self.after[step]])

    def updates(self) -> Tensor:
        """Return the sizes of the last step's updates, in learning rates."""
        return (self.weights() - self.weights(-2)).abs() / self.rate

    def _sent(self, first: int, last: int) -> int:
        pairs = zip(self.names, self.after[first], self.after[last], strict=True)
        sent = (patch(name, before.bfloat16(), after.bfloat16()) for name, before, after in pairs)
        return sum(map(patch_bytes, sent))


@cache
def trained(rate: float, steps: int = STEPS) -> Run:
    """Train the tiny model in full, on its own answers as matching corrects them; return each step's weights."""
    run = Run(rate)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        config = _config(Path(folder), rate, steps)
        context = RunContext("", Reporter(), Interrupt(), SilentLog(), JsonLines(Path(folder) / "rollouts.jsonl"))
        learner = build_learner(config, checked_records(config, world_size=1), context, stack)
        policy: Any = learner.engine.policy
        named = [(name, one) for name, one in policy.named_parameters() if one.requires_grad]
        run.names = tuple(name for name, _ in named)

        def note(*_: object) -> None:
            run.after = [*run.after[-COUNTED:], [one.detach().clone() for _, one in named]]

        learner.engine.optimizer.optimizer.register_step_post_hook(note)
        learner.train()
    return run


def _config(folder: Path, rate: float, steps: int) -> RunConfig:
    made = [sys.executable, str(EXAMPLES / "make_shapes.py"), str(folder), "--train", "64", "--held-out", "1"]
    subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
    matching = {"rollout_backend": "hf", "max_new_tokens": 172, "recipe": "recommended"}
    return RunConfig.model_validate({
        "global_max_length": 1024,
        "model": {"model": str(EXAMPLES / "tiny-qwen3-vl"), "torch_dtype": "float32"},
        "tuner": {"train_type": "full", "freeze_vit": False, "freeze_aligner": False},
        "training": {
            "output_dir": str(folder / "run"), "max_steps": steps, "learning_rate": rate, "warmup_steps": WARM_UP,
            "lr_scheduler_type": "constant_with_warmup", "per_device_train_batch_size": 8, "effective_batch_size": 8,
            "packing": True, "packing_min_fill_ratio": 0.1, "save_strategy": "no", "eval_strategy": "no",
        },
        "custom": {
            "train_jsonl": str(folder / "train.jsonl"), "user_prompt": "List the shapes.",
            "extra": {"rollout_matching": matching},
        },
    })  # fmt: skip


def expected_share(rate: float, updates: Tensor, binades: Sequence[tuple[int, float]]) -> float:
    """Return the share of bfloat16 weights that change in a step, once training has spread their float32 copies.

    updates: their sizes, in learning rates, alike for weights of any size. binades: for each power of two, the share
    of weights between it and the next; there a weight's last bit is its 2**-7, and the float32 weight is anywhere
    between two values.
    """
    moved = updates.double() * rate
    return sum(share * float((moved * 2.0 ** (VISIBLE_BITS - power)).clamp(max=1).mean()) for power, share in binades)


def normal_binades(scale: float) -> list[tuple[int, float]]:
    """Return the binades of normal weights of this standard deviation."""
    below = pairwise(math.erf(2.0**power / scale / math.sqrt(2)) for power in range(SMALLEST, LARGEST + 1))
    return [(power, high - low) for power, (low, high) in enumerate(below, SMALLEST)]


def binades_of(weights: Tensor) -> list[tuple[int, float]]:
    """Return the binades of these weights."""
    powers, counts = torch.unique(torch.frexp(weights.abs())[1] - 1, return_counts=True)
    return list(zip(powers.tolist(), (counts / len(weights)).tolist(), strict=True))


@dataclass(frozen=True)
class Costs:
    """What both ends do beside sending, in picoseconds of one GPU.

    find: to compare a weight with what servers hold, to collect what changed and keep it for the next push. found, to
    collect a weight that changed. apply, applied: the same at the server. load: to load a weight that is sent whole,
    which it does while others arrive. sends: seconds of one broadcast; a tensor takes two.
    """

    find: float
    found: float
    apply: float
    applied: float
    load: float
    sends: float = 20e-6

    def in_words(self) -> str:
        """Return all but the broadcasts."""
        found = f"{self.find:.1f} to find what changed, {self.found:.1f} more for a weight that did"
        applied = f"{self.apply:.1f} to apply it, {self.applied:.1f} more for a weight that changed"
        return f"{found}; {applied}; {self.load:.1f} to load a weight that is sent whole"


H100_BYTES_PER_PS = 3.35 / 2  # half of what its memory moves in theory
BY_MEMORY = Costs(
    find=8 / H100_BYTES_PER_PS,  # read new and held weights, write and read the comparison, write what is held now
    found=14 / H100_BYTES_PER_PS,  # write an index in 64 and in 32 bits, and a value
    apply=12 / H100_BYTES_PER_PS,  # write NaN, read them twice and the weight, write and read the comparison, write
    applied=100 / H100_BYTES_PER_PS,  # sort indices, which proves that none comes twice, and write values
    load=4 / H100_BYTES_PER_PS,
)
_TIMED = 3.9045 * 2**30 / 2  # weights
ELSEWHERE = Costs(
    find=39e9 / _TIMED,
    found=0.072 * 100,
    apply=92e9 / _TIMED,
    applied=37e9 / 0.32 / _TIMED,
    load=345e9 / _TIMED,
)
"""vLLM's own engine on two H100s, timed in https://github.com/marin-community/marin/issues/9127, for each weight."""
COSTS = {"by memory": BY_MEMORY, "timed elsewhere": ELSEWHERE}
MATTERS = "100 Gbit/s"
LINKS = {"25 Gbit/s": 25e9 / 8, MATTERS: NETWORKS[MATTERS], "400 Gbit/s": 4e11 / 8}


@dataclass(frozen=True)
class Shape:
    """A model: its weights, and its tensors."""

    weights: int
    tensors: int

    def dense_s(self, network: float, costs: Costs) -> float:
        """Return the seconds of a push of all weights, to servers of one group."""
        return max(DENSE_BYTES * self.weights / network, self.weights * costs.load * 1e-12) + MEASURED.control_s

    def sparse_s(self, share: float, network: float, costs: Costs) -> float:
        """Return those of a push of this share of them: it is found, then sent, then applied."""
        once = costs.find + costs.apply + share * (costs.found + costs.applied)
        sent = self.sparse_bytes(share) / network + 2 * self.tensors * costs.sends
        return self.weights * once * 1e-12 + sent + MEASURED.control_s

    def even_share(self, network: float, costs: Costs) -> float:
        """Return the share at which both take as long."""
        none, every = (self.sparse_s(share, network, costs) for share in (0.0, 1.0))
        return (self.dense_s(network, costs) - none) / (every - none)

    def sparse_bytes(self, share: float) -> float:
        """Return the bytes of this share."""
        return CHANGED_BYTES * self.weights * share


@cache
def an_8b() -> Shape:
    """Return the shape of an 8B."""
    with torch.device("meta"):
        sizes = [one.numel() for one in AutoModelForImageTextToText.from_config(AN_8B).parameters()]
    return Shape(sum(sizes), len(sizes))


class Measured:
    """What changes in the tiny model."""

    def lines(self) -> Iterator[str]:
        """The table's lines; each row is trained when it is read."""
        import vllm

        columns = "".join(f" after {pushes} |" for pushes in MISSED)
        yield f"\nvLLM {vllm.__version__}, transformers {metadata.version('transformers')}.\n"
        yield "\n## Share of bfloat16 weights that change, measured on a tiny Qwen3-VL in full training\n\n"
        yield f"AdamW, {STEPS} steps of 8 images, {WARM_UP} of them to warm up; the mean over the last {COUNTED}. "
        yield "`After n`: against what a server holds that has missed n - 1 pushes. "
        yield "By the model: from the sizes of the weights and of their last updates alone. "
        yield f"Bytes: of a push of what changed, {CHANGED_BYTES} for each, over those of all weights.\n\n"
        yield f"| learning rate |{columns} by the model | bytes | of float32 weights change |\n"
        yield f"| ---: |{' ---: |' * len(MISSED)} ---: | ---: | ---: |\n"
        for rate in RATES:
            run = trained(rate)
            shares = "".join(f" {run.share(pushes):.1%} |" for pushes in MISSED)
            model = expected_share(rate, run.updates(), binades_of(run.weights(-2)))
            ratio = run.share() * CHANGED_BYTES / DENSE_BYTES
            yield f"| {rate:g} |{shares} {model:.1%} | {ratio:.2f} | {run.wide_share():.2%} |\n"
        sizes, moved = trained(RATES[0]).weights().abs().median(), trained(RATES[0]).updates()
        yield f"\nThe median weight is {sizes:.3f}; the last update at {RATES[0]:g} has a root mean square of "
        yield f"{moved.square().mean().sqrt():.2f} learning rates.\n"


class Modelled:
    """What changes in an 8B, and the seconds of both pushes."""

    def lines(self) -> Iterator[str]:
        """The table's lines."""
        shape = an_8b()
        dense = DENSE_BYTES * shape.weights / 1e9
        yield "\n## A push of an 8B in full training, modelled, not measured\n\n"
        yield f"{shape.weights / 1e9:.2f} billion weights in {shape.tensors} tensors, {dense:.1f} GB in bfloat16, to "
        yield "servers of one group; all of them train. Weights are normal, of this standard deviation "
        yield f"({INIT_SCALE:g} is what the 8B's configuration begins with), and updates are those of the tiny model "
        yield "at the same rate. What changed is found, sent and applied one after the other; all weights load while "
        yield "they arrive.\n\nPicoseconds of a GPU for each weight:\n\n"
        for how, costs in COSTS.items():
            yield f"- {how}: {costs.in_words()}\n"
        yield "\n`by memory` counts the bytes that are read and written, at half of what an H100's memory moves in "
        yield "theory; `timed elsewhere` is vLLM's own engine on two H100s, in marin-community/marin issue 9127. Each "
        yield f"of two broadcasts of a tensor takes {1e6 * BY_MEMORY.sends:g} us more. Of a step: what is saved, in a "
        yield f"step of {STEP_S:g} s (job-3v1, pipelined, with drafts) with this push in place of an adapter's. An "
        yield f"adapter of rank {RANK} on all linear layers has {adapter_bytes() / 1e9:.2f} GB.\n\n"
        yield "| rate | deviation | changed | GB | network | costs | all s | changed s | saved s | of a step |\n"
        yield "| ---: | ---: | ---: | ---: | --- | --- | ---: | ---: | ---: | ---: |\n"
        for rate in RATES:
            for scale in SCALES:
                share = expected_share(rate, trained(rate).updates(), normal_binades(scale))
                yield from self._rows(f"| {rate:g} | {scale:g} | {share:.1%} |", share)
        even = " and ".join(f"{shape.even_share(NETWORKS[MATTERS], costs):.0%} ({how})" for how, costs in COSTS.items())
        yield f"\nAt {MATTERS} both pushes take as long where this share changes: {even}.\n"

    def _rows(self, begin: str, share: float) -> Iterator[str]:
        """Yield the rows of one share."""
        shape = an_8b()
        for name, network in LINKS.items():
            for how, costs in COSTS.items():
                dense, sparse = shape.dense_s(network, costs), shape.sparse_s(share, network, costs)
                saved = dense - sparse
                cells = f"{shape.sparse_bytes(share) / 1e9:.1f} | {name} | {how} | {dense:.2f} | {sparse:.2f}"
                yield f"{begin} {cells} | {saved:.2f} | {saved / (STEP_S - SYNC_S + dense):.0%} |\n"


TABLES = (Measured(), Modelled())
