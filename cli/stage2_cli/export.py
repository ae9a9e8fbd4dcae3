"""`stage2 export`: a checkpoint as a model folder, or as an adapter, that loads without stage2."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from stage2_api.errors import EXIT_FAILURE, refused
from stage2_cli.console import plain_console
from stage2_trainer.data.files import check_folder
from stage2_trainer.export.checkpoint_folder import TrainedCheckpoint, open_checkpoint


@dataclass(frozen=True)
class ExportRequest:
    """The options of the command line; None where one is missing."""

    checkpoint: Path
    output: Path
    model: str | None = None
    dtype: str | None = None
    adapter: bool = False


def export_checkpoint(request: ExportRequest) -> int:
    """Export, and print the result; return 0, or EXIT_FAILURE where the export failed. Raises ConfigError."""
    if request.adapter and request.dtype:
        rule = "an adapter is copied as it is (--adapter)"
        raise refused("--dtype", request.dtype, rule, "remove one of the two options")
    check_folder("--output", request.output)
    checkpoint = open_checkpoint(request.checkpoint, model=request.model)
    from stage2_trainer.export.model_export import ExportError

    try:
        _export(request, checkpoint)
    except ExportError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(str(error), style="bold red", markup=False)
        return EXIT_FAILURE
    return os.EX_OK


def _export(request: ExportRequest, checkpoint: TrainedCheckpoint) -> None:
    import torch

    from stage2_trainer.export.model_export import export_adapter, export_model

    console = plain_console()
    with console.status(Text(f"exporting {checkpoint.folder}")):
        if request.adapter:
            exported = export_adapter(checkpoint, request.output)
        else:
            dtype = getattr(torch, request.dtype) if request.dtype else None
            exported = export_model(checkpoint, request.output, dtype=dtype)
    console.print(f"from {checkpoint.folder}")
    console.print(f"{exported.folder}: {exported.tensors:,} tensors, {exported.bytes / 1e6:,.0f} MB, verified")
    if exported.untied:
        console.print("  its output head is a separate tensor, because head and embeddings were trained separately")
    if exported.obstacle:
        console.print(f"  vLLM cannot serve it as an adapter: {exported.obstacle}; export without --adapter")
