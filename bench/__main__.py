"""Prints the benchmarks' tables: `bench/run [--write] [NAME ...]`; --write keeps them in bench/results/NAME.md.

`gpu` needs a CUDA device, and runs only where it is named.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from datetime import date
from importlib import metadata
from pathlib import Path

import torch
from bench import (
    assignment,
    division,
    draft_equality,
    estep,
    frame_kernels,
    gpu,
    links,
    loss,
    memory,
    merge,
    overlap,
    packing,
    parsing,
    pipeline,
    probe_gap,
    rollouts,
    saves,
    scale_model,
    scale_step,
    scale_sync,
    schedule,
    served_adapter,
    sparse_pushes,
    speculation,
    starts,
    strangers,
    sync,
    sync_model,
    transport,
)
from bench.tables import Lines

from stage2_api.errors import EXIT_CONFIG

RESULTS = Path(__file__).parent / "results"
GPU = "gpu"
BENCHMARKS: Mapping[str, tuple[Lines, ...]] = {
    "overlap": (overlap.TABLE,),
    "assignment": (assignment.TABLE,),
    "transport": (transport.TABLE,),
    "parse": (parsing.TABLE,),
    "estep": (estep.TABLE,),
    "loss": (loss.MEASURED, loss.WORDS, loss.MEMORY),
    "memory": (memory.TABLE,),
    "merge": (merge.TABLE, merge.ROUNDING),
    "strangers": (strangers.FLOODED, strangers.COST),
    "sync": (sync.TABLE,),
    "links": (links.TABLE,),
    "sync_model": (sync_model.ModelTable(),),
    "sparse_pushes": sparse_pushes.TABLES,
    "scale": (scale_step.StepTable(), scale_sync.SyncTable(), scale_sync.LostTable(), scale_model.ModelTable()),
    "probe_gap": (probe_gap.TABLE,),
    "rollouts": (rollouts.TABLE,),
    "starts": (starts.TABLE,),
    "speculation": (
        speculation.REPLAYED,
        speculation.BY_LENGTH,
        frame_kernels.TABLE,
        speculation.DECODED,
        draft_equality.TABLE,
        speculation.SCHEDULED,
    ),
    "pipeline": (pipeline.TABLE,),
    "served_adapter": (served_adapter.TABLE,),
    "saves": (saves.TABLE,),
    "schedule": (schedule.TABLE,),
    "division": (division.RolloutTable(), division.StepTable()),
    "packing": (packing.ROW_TABLE, packing.WINDOW_TABLE),
    GPU: tuple(table for tables in gpu.tables(gpu.AN_8B).values() for table in tables),
}
PACKAGES = ("numpy", "scipy", "torch", "pycocotools", "shapely", "POT", "binpacking")


def main(arguments: list[str] | None = None) -> int:
    """Run the requested benchmarks; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench/run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which: {', '.join(BENCHMARKS)}; all but gpu without one"
    )
    parser.add_argument("--write", action="store_true", help="keep the tables in bench/results/NAME.md")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    if GPU in options.names and not torch.cuda.is_available():
        sys.stderr.write(f"{gpu.NO_GPU}\n")
        return EXIT_CONFIG
    missing = [name for name in PACKAGES if version(name) is None]
    if missing:
        sys.stderr.write(
            f"left out, not installed: {', '.join(missing)}; uv pip install -e '.[trainer]' --group bench\n"
        )
    gc.disable()  # what the collector costs depends on all that is loaded, peers included
    for name in options.names or [name for name in BENCHMARKS if name != GPU]:
        head = gpu.header() if name == GPU else header()
        sys.stdout.write(head)
        text = "".join(shown(name))
        if options.write:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{name}.md").write_text(f"{head}{text}", encoding="utf-8")
    return 0


def shown(name: str) -> Iterator[str]:
    """The parts of a benchmark's text, each printed as soon as it is there."""
    for table in BENCHMARKS[name]:
        for part in table.lines():
            sys.stdout.write(part)
            sys.stdout.flush()
            yield part


def header() -> str:
    """When, with what and on what the figures were taken."""
    versions = [f"{name} {version(name) or 'not installed'}" for name in PACKAGES]
    machine = f"cores: {os.cpu_count()}, threads: {torch.get_num_threads()}; Python {platform.python_version()}"
    return (
        f"{date.today().isoformat()}, {machine}, {platform.machine()}; {', '.join(versions)}.\n"
        "Machines differ and are busy: read the ratios (peer / ours; above 1 means that ours is faster or smaller).\n"
    )


def version(name: str) -> str | None:
    """The installed version of a distribution, None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
