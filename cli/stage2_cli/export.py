"""`stage2 export`: a checkpoint as a model folder, or as an adapter, that loads without stage2."""

from __future__ import annotations

import os
from pathlib import Path

from stage2_api.errors import EXIT_FAILURE, refused
from stage2_report.terminal import Terminal
from stage2_trainer.data.files import check_folder
from stage2_trainer.export.checkpoint_folder import TrainedCheckpoint, open_checkpoint
from stage2_trainer.process.activity import ACTIVITY, LIBRARIES


def export_checkpoint(
    source: Path, output: Path, *, model: str | None, dtype: str | None, adapter: bool, longer: float = 0.0
) -> int:
    """Export, and print the result; return 0, or EXIT_FAILURE where the export failed. Raises ConfigError."""
    if adapter and dtype:
        rule = "an adapter is copied as it is (--adapter)"
        raise refused("--dtype", dtype, rule, "remove one of the two options")
    if adapter and longer:
        rule = "an adapter has no generation configuration (--adapter)"
        raise refused("--longer", longer, rule, "export without --adapter, or give --longer to `stage2 infer`")
    check_folder("--output", output)
    checkpoint = open_checkpoint(source, model=model)
    with ACTIVITY.doing(LIBRARIES):
        from stage2_trainer.export.model_export import ExportError

    try:
        _export(checkpoint, output, dtype=dtype, adapter=adapter, longer=longer)
    except ExportError as error:
        Terminal(stderr=True).print(str(error), style="bold red")
        return EXIT_FAILURE
    return os.EX_OK


def _export(checkpoint: TrainedCheckpoint, output: Path, *, dtype: str | None, adapter: bool, longer: float) -> None:
    with ACTIVITY.doing(LIBRARIES):
        import torch

        from stage2_trainer.export.model_export import export_adapter, export_model

    console = Terminal()
    with ACTIVITY.doing(f"exporting {checkpoint.folder}"):
        if adapter:
            exported = export_adapter(checkpoint, output)
        else:
            weights_dtype = getattr(torch, dtype) if dtype else None
            exported = export_model(checkpoint, output, dtype=weights_dtype, longer=longer)
    console.print(f"from {checkpoint.folder}")
    console.print(f"{exported.folder}: {exported.tensors:,} tensors, {exported.bytes / 1e6:,.0f} MB, verified")
    if longer:
        console.print(f"  it closes a list of objects later, by {longer:g} nats, in its generation configuration")
    if exported.untied:
        console.print("  its output head is a separate tensor, because head and embeddings were trained separately")
    if exported.obstacle:
        console.print(f"  vLLM cannot serve it as an adapter: {exported.obstacle}; export without --adapter")
