"""Time and memory of the loss in portions beside plainer forms.

`supervised` makes the logits of the supervised positions at once; `everything` is the usual form, logits of all
positions and cross entropy that skips labels of -100. Memory is the most that all tensors of a forward and backward
pass take together, inputs left out; it depends on shapes alone, so the large case is counted on the meta device.
Cross entropy alone is compared with cut-cross-entropy too, where that is installed: on a CPU with the form that it
compiles for one, for its kernels, and Liger's, are Triton's and run on GPUs alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from bench.tables import Row, Table, installed, seconds
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stage2_api.coordinates import BINS
from stage2_api.rollout_matching import RolloutMatching
from stage2_trainer.learner.loss import LossTargets, coord_losses, stage2_loss, stage2_loss_from_hidden

TIMED = (512, 32768, 4096)
LARGE = (16384, 151936, 4096)
SHARE = 0.5  # of the tokens are supervised, a third of those are coordinates
OPTIONS = RolloutMatching()


@dataclass(frozen=True)
class Case:
    """Hidden states (T, H), output layer (V, H) and what the second half of T tokens is taught."""

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: LossTargets
    coord_ids: torch.Tensor

    @classmethod
    def random(cls, tokens: int, vocabulary: int, width: int, device: str, *, coords: bool = True) -> Case:
        """A case with random values (none on the meta device). coords: whether some tokens are coordinates."""
        torch.manual_seed(0)
        count = int(tokens * SHARE)
        split = count * 2 // 3 if coords else count
        targets = LossTargets(
            positions=torch.arange(tokens - count, tokens, device=device),
            labels=torch.randint(0, vocabulary, (split,), device=device),
            bins=torch.randint(0, BINS, (count - split,), device=device),
            in_prefix=torch.zeros(count - split, dtype=torch.bool, device=device),
            prefix_count=0,
            ce_denominator=split,
            coord_denominator=max(count - split, 1),
        )
        hidden = torch.randn(tokens, width, device=device, requires_grad=True)
        weight = (torch.randn(vocabulary, width, device=device) / width**0.5).requires_grad_()
        return cls(hidden, weight, targets, torch.arange(BINS, device=device))


def portions(case: Case) -> torch.Tensor:
    """The form that training uses."""
    hidden = case.hidden[case.targets.logit_positions]
    return stage2_loss_from_hidden(hidden, case.weight, case.targets, case.coord_ids, OPTIONS).total


def supervised(case: Case) -> torch.Tensor:
    """All supervised positions at once."""
    logits = case.hidden[case.targets.logit_positions] @ case.weight.T
    return stage2_loss(logits, case.targets, case.coord_ids, OPTIONS).total


def everything(case: Case) -> torch.Tensor:
    """The usual form."""
    logits = (case.hidden @ case.weight.T).float()
    split = len(case.targets.labels)
    labels = torch.full((len(logits),), -100, device=logits.device)
    labels[case.targets.logit_positions[:split]] = case.targets.labels
    ce = functional.cross_entropy(logits, labels, ignore_index=-100)
    coords = logits[case.targets.logit_positions[split:]]
    return ce + coord_losses(coords, case.targets.bins, case.coord_ids, OPTIONS).mean()


PEERS: dict[str, Callable[[Case], torch.Tensor]] = {"supervised": supervised, "everything": everything}


def timed_rows() -> Iterator[Row]:
    """Forward and backward pass on the CPU."""
    case = Case.random(*TIMED, "cpu")
    ours, found = seconds(lambda: portions(case).backward()), portions(case)
    for name, form in PEERS.items():
        theirs = seconds(lambda: form(case).backward())  # noqa: B023 called at once
        yield Row(described(TIMED), name, ours, theirs, f"{abs(form(case) - found).item():.2g}")


def words_rows() -> Iterator[Row]:
    """Cross entropy alone, with other packages' forms."""
    peer = installed("cut_cross_entropy")
    if peer is None:
        return
    case = Case.random(*TIMED, "cpu", coords=False)

    def theirs() -> torch.Tensor:
        hidden = case.hidden[case.targets.logit_positions]
        found: torch.Tensor = peer.linear_cross_entropy(hidden, case.weight, case.targets.labels, impl="torch_compile")
        return found

    difference = abs(theirs() - portions(case)).item()  # the first call compiles
    ours = seconds(lambda: portions(case).backward())
    what = f"{described(TIMED)}, no coordinates"
    yield Row(what, "cut-cross-entropy, torch_compile", ours, seconds(lambda: theirs().backward()), f"{difference:.2g}")


def memory_rows() -> Iterator[Row]:
    """The shapes of a large model: 16k tokens, a vocabulary of 150k."""
    ours = peak_bytes(portions, LARGE)
    for name, form in PEERS.items():
        yield Row(described(LARGE), name, ours, peak_bytes(form, LARGE))


def described(shape: tuple[int, int, int]) -> str:
    """The case in words."""
    tokens, vocabulary, width = shape
    return f"{tokens} tokens, vocabulary {vocabulary}, hidden {width}, {SHARE:.0%} supervised"


def peak_bytes(form: Callable[[Case], torch.Tensor], shape: tuple[int, int, int]) -> int:
    """The most bytes that tensors made by one forward and backward pass take at once."""
    case = Case.random(*shape, "meta")
    with LiveBytes() as tracked:
        form(case).backward()
    return int(tracked.peak)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations return, for as long as they live."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.peak = 0
        self._live = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count its results."""
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, torch.Tensor) and one.untyped_storage() not in self._seen:
                storage = one.untyped_storage()
                self._seen.add(storage)
                self._live += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
                self.peak = max(self.peak, self._live)
        return found

    def _freed(self, count: int) -> None:
        self._live -= count


MEASURED = Table("Loss: time of a forward and backward pass", "ms", 1e3, timed_rows)
WORDS = Table("Cross entropy alone: time of a forward and backward pass", "ms", 1e3, words_rows)
MEMORY = Table("Loss: memory of a forward and backward pass", "GiB", 2**-30, memory_rows)
