"""What a learner does on a GPU, beside what the device can do and what a user would pick instead.

    bench/run [--write] gpu
    python -m bench.gpu [--tiny] look|merge|pack|offload|push|loss ...

Wall times, the best of several, between two points at which the device has nothing left to do. `where` says on which
device and at which sizes: with --tiny, and in unit tests, the same code runs on a CPU. `look` says what machine it is.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from importlib import metadata
from pathlib import Path

import torch
from bench import gpu_push, loss
from bench.loss import Case, portions
from bench.merge import layer, served
from bench.tables import Lines, Row, Table, installed
from torch import Tensor

from stage2_api.vllm import Transport
from stage2_trainer.model.attention import PACKED, attention_words
from stage2_trainer.model.offload import DeviceMover, moved_away
from stage2_trainer.process.cuda_driver import loaded_driver
from stage2_trainer.sync.fleet.delivery import Packer
from stage2_trainer.sync.tensors.announcement import plan_buckets
from stage2_trainer.sync.tensors.merge_math import Adapter

RUNS = 5
GIB = 2**30
PACKAGES = ("torch", "triton", "vllm", "transformers", "liger-kernel", "cut-cross-entropy")
NO_GPU = "bench/run gpu: PyTorch finds no CUDA device here. Run it on a machine with an NVIDIA GPU and its driver"


@dataclass(frozen=True)
class Where:
    """A device, and sizes at which it is measured.

    layers: shapes of merged weights, with rank 16. bytes: of the tensors that are packed, moved or pushed. bucket:
    bytes of a bucket. tokens: of the loss, by tokens, vocabulary and hidden width.
    """

    device: torch.device
    layers: Sequence[tuple[int, int]]
    bytes: int
    bucket: int
    tokens: tuple[int, int, int]

    @property
    def is_gpu(self) -> bool:
        """Whether it is a CUDA device."""
        return self.device.type == "cuda"


AN_8B = Where(
    device=torch.device("cuda:0"),
    layers=((1024, 4096), (4096, 4096), (12288, 4096), (151936, 4096)),
    bytes=8 * GIB,
    bucket=GIB // 2,
    tokens=(16384, 151936, 4096),
)
TINY = Where(
    device=torch.device("cpu"), layers=((32, 16), (48, 16)), bytes=64 * 2**10, bucket=2**14, tokens=(64, 1200, 8)
)


def merge_rows(where: Where) -> Iterator[Row]:
    """Merging an adapter of rank 16, beside a copy of as many bytes: the weight is read and written once."""
    for shape in where.layers:
        for dora in (False, True):
            base, adapter = layer(shape, 16, dora=dora)
            there = base.to(where.device)
            moved = to_device(adapter, where.device)
            ours = seconds(lambda: served(there, moved), where)  # noqa: B023 called at once
            copied = seconds(lambda: torch.empty_like(there).copy_(there), where)  # noqa: B023
            what = f"{'DoRA' if dora else 'LoRA'}, {shape[0]} x {shape[1]}, {2 * base.nbytes / ours / 1e9:.0f} GB/s"
            differ = int((served(there, moved).cpu() != served(base, adapter)).sum())
            yield Row(what, "copy of the weight", ours, copied, f"{differ} weights differ from a CPU's")


def to_device(adapter: Adapter, device: torch.device) -> Adapter:
    """Return the same adapter on a device."""
    magnitude = None if adapter.magnitude is None else adapter.magnitude.to(device)
    return replace(adapter, up=adapter.up.to(device), down=adapter.down.to(device), magnitude=magnitude)


def pack_rows(where: Where) -> Iterator[Row]:
    """Filling buckets, beside one copy of as many bytes to the same place."""
    weights = tensors(where)
    for transport, staging in (("nccl", where.device), ("tcp", torch.device("cpu"))):
        packer, metas = Packer(where.device, staging), gpu_push.metas_of(weights)
        plan = list(plan_buckets(metas, where.bucket))
        (slot,) = packer.slots(plan, 1)

        def pack() -> None:
            stream = iter(weights.items())
            for bucket in plan:  # noqa: B023 called at once
                packed = packer.pack(bucket, stream, slot)  # noqa: B023
                if packed.ready is not None:
                    packed.ready.synchronize()

        ours = seconds(pack, where)
        whole = torch.empty(where.bucket, dtype=torch.uint8, device=where.device)
        place = torch.empty(where.bucket, dtype=torch.uint8, device=staging, pin_memory=_leaves(where, staging))
        copied = seconds(lambda: place.copy_(whole, non_blocking=True), where) * where.bytes / where.bucket  # noqa: B023
        what = f"for {transport}, {where.bytes / 1e9:.2f} GB in {len(weights)} tensors, {_rate(where, ours)}"
        yield Row(what, f"one copy, {_rate(where, copied)}", ours, copied)


def offload_rows(where: Where) -> Iterator[Row]:
    """State to main memory and back, beside the same through memory that is not page-locked."""
    away, mover = list(tensors(where).values()), DeviceMover(where.device)

    def ours() -> None:
        with moved_away(away, mover):
            pass

    def pageable() -> None:
        there = [one.to("cpu", copy=True) for one in away]
        for one, other in zip(away, there, strict=True):
            one.copy_(other)

    before = [one.clone() for one in away]
    took, peer = seconds(ours, where), seconds(pageable, where)
    differ = sum(not torch.equal(one, other) for one, other in zip(before, away, strict=True))
    what = f"there and back, {where.bytes / 1e9:.2f} GB, {2 * where.bytes / took / 1e9:.1f} GB/s"
    yield Row(what, f"pageable, {2 * where.bytes / peer / 1e9:.1f} GB/s", took, peer, f"{differ} tensors differ")


def push_rows(where: Where) -> Iterator[Row]:
    """A push into another process on the same device, over NCCL's sockets and over TCP, on loopback."""
    weights = tensors(where)
    first, took_first = "", 0.0
    for name in transports(where):
        took = gpu_push.seconds(name, weights, where.device, where.bucket)
        first, took_first = first or name, took_first or took
        what = f"{where.bytes / 1e9:.2f} GB over {first}, {_rate(where, took_first)}"
        yield Row(what, f"over {name}, {_rate(where, took)}", took_first, took)


def transports(where: Where) -> tuple[Transport, ...]:
    """Return what two processes can push over here."""
    return ("nccl", "tcp") if where.is_gpu else ("tcp",)


def loss_forms(*, coords: bool) -> dict[str, Callable[[Case], Tensor]]:
    """Return other forms of the loss, by name; those of packages where they are installed and there are no coords."""
    if coords:
        return dict(loss.PEERS)
    forms: dict[str, Callable[[Case], Tensor]] = {"supervised": loss.supervised}
    if cce := installed("cut_cross_entropy"):
        forms["cut-cross-entropy"] = lambda case: cce.linear_cross_entropy(
            case.hidden[case.targets.logit_positions], case.weight, case.targets.labels, impl="cce"
        )
    if liger := installed("liger_kernel.transformers"):
        forms["Liger"] = lambda case: liger.LigerFusedLinearCrossEntropyLoss()(
            case.weight, case.hidden[case.targets.logit_positions], case.targets.labels
        )
    return forms


def loss_rows(where: Where, measure: Callable[[Callable[[], object], Where], float]) -> Iterator[Row]:
    """Forward and backward pass in bfloat16: what `measure` says, seconds or bytes."""
    for coords in (True, False):
        case = bfloat16(Case.random(*where.tokens, str(where.device), coords=coords))
        ours, found = measure(lambda: portions(case).backward(), where), portions(case).detach()  # noqa: B023
        what = loss.described(where.tokens) + ("" if coords else ", no coordinates")
        for name, form in loss_forms(coords=coords).items():
            try:
                theirs = measure(lambda: form(case).backward(), where)  # noqa: B023
                difference = f"{abs(form(case).detach() - found).item():.2g}"
            except torch.OutOfMemoryError:
                theirs, difference = float("inf"), "out of memory"
            yield Row(what, name, ours, theirs, difference)


def bfloat16(case: Case) -> Case:
    """Return a case in the precision of training."""
    hidden, weight = (one.detach().bfloat16().requires_grad_() for one in (case.hidden, case.weight))
    return replace(case, hidden=hidden, weight=weight)


def seconds(call: Callable[[], object], where: Where) -> float:
    """Return the least wall time of several runs, after one that compiles and takes memory."""
    times = []
    for _ in range(RUNS + 1):
        wait(where)
        start = time.perf_counter()
        call()
        wait(where)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def peak(call: Callable[[], object], where: Where) -> float:
    """Return the most bytes that a call takes beside what there is; on a CPU as `bench.loss` counts them."""
    if not where.is_gpu:
        with loss.LiveBytes() as tracked:
            call()
        return float(tracked.peak)
    call()  # kernels are tried out at the first call, and gradients are there after it
    wait(where)
    torch.cuda.reset_peak_memory_stats(where.device)
    before = torch.cuda.memory_allocated(where.device)
    call()
    return float(torch.cuda.max_memory_allocated(where.device) - before)


def wait(where: Where) -> None:
    """Wait until the device has nothing left to do."""
    if where.is_gpu:
        torch.cuda.synchronize(where.device)


def tensors(where: Where) -> dict[str, Tensor]:
    """Return as many bytes of weights, in 64 tensors."""
    count = where.bytes // 64 // 2
    return {f"layer.{i}": torch.randn(count, device=where.device, dtype=torch.bfloat16) for i in range(64)}


def _leaves(where: Where, staging: torch.device) -> bool:
    return where.is_gpu and staging.type == "cpu"


def _rate(where: Where, took: float) -> str:
    return f"{where.bytes / took / 1e9:.1f} GB/s"


def header() -> str:
    """Return when the figures were taken, and how to read them."""
    return f"{date.today().isoformat()}. Ratios are peer / ours; above 1 means that ours is faster or smaller.\n"


def _version(name: str) -> str:
    """Return the version of a package, or of its build for CPUs, which may have a name of its own."""
    for one in (name, f"{name}-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(one)
    return "not installed"


def looks(where: Where) -> Iterator[tuple[str, str]]:
    """Return what this machine is, by what was looked at."""
    if where.is_gpu:
        device = torch.cuda.get_device_properties(where.device)
        free, whole = torch.cuda.mem_get_info(where.device)
        yield "GPU", f"{device.name}, capability {device.major}.{device.minor}, driver {loaded_driver() or 'unknown'}"
        yield "its memory, free of all", f"{free / GIB:.1f} of {whole / GIB:.1f} GiB"
        yield "CUDA", str(torch.version.cuda)
    else:
        yield "GPU", "not used"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield "cores, main memory", f"{os.cpu_count()}, {memory / GIB:.0f} GiB"
    yield "/dev/shm, disk, free", ", ".join(f"{shutil.disk_usage(one).free / GIB:.0f} GiB" for one in ("/dev/shm", "."))
    yield "Python", f"{platform.python_version()}, {platform.machine()}, {platform.platform()}"
    yield "packages", ", ".join(f"{name} {_version(name)}" for name in (*PACKAGES, "torchvision", "numpy", "peft"))
    headers = Path(sysconfig.get_path("include"), "Python.h").is_file()
    yield (
        "for Triton",
        f"C compiler {shutil.which('cc') or shutil.which('gcc')}, Python.h {'there' if headers else 'missing'}",
    )
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary  # as the learner does

    yield "NCCL", NCCLLibrary().ncclGetVersion()
    yield "the learner's attention", attention_words(PACKED, on_gpu=where.is_gpu)


class Looks:
    """What this machine is."""

    def __init__(self, where: Where) -> None:
        self._where = where

    def lines(self) -> Iterator[str]:
        """The table's lines."""
        yield "\n## This machine\n\n| what | found |\n| --- | --- |\n"
        for what, found in looks(self._where):
            yield f"| {what} | {found} |\n"


def tables(where: Where) -> Mapping[str, tuple[Lines, ...]]:
    """Return the tables at these sizes, by name."""
    return {
        "look": (Looks(where),),
        "merge": (Table("Merging an adapter", "ms", 1e3, lambda: merge_rows(where)),),
        "pack": (Table("Packing buckets", "ms", 1e3, lambda: pack_rows(where)),),
        "loss": (
            Table("Loss: time of a forward and backward pass", "ms", 1e3, lambda: loss_rows(where, seconds)),
            Table("Loss: memory of a forward and backward pass", "GiB", 1 / GIB, lambda: loss_rows(where, peak)),
        ),
        "offload": (Table("Offload to main memory", "ms", 1e3, lambda: offload_rows(where)),),
        "push": (Table("A push to another process", "ms", 1e3, lambda: push_rows(where)),),
    }


def main() -> None:
    """Print some of the tables."""
    parser = argparse.ArgumentParser(prog="bench.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="+", choices=tuple(tables(TINY)), metavar="NAME", help="of a table")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, at tiny sizes")
    options = parser.parse_args()
    found = tables(TINY if options.tiny else AN_8B)
    for line in (line for name in options.names for table in found[name] for line in table.lines()):
        print(line, end="", flush=True)


if __name__ == "__main__":
    main()
