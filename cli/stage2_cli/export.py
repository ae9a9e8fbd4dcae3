"""`stage2 export`: a checkpoint as a model folder, or as an adapter, that loads without stage2.

`--push` uploads it to a hub. The hub is checked first, because an export takes minutes.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from stage2_api.errors import EXIT_FAILURE, ConfigError, Problem
from stage2_cli.console import plain_console
from stage2_trainer.data.files import check_folder


@dataclass(frozen=True)
class ExportRequest:
    """The options of the command line; None where one is missing."""

    checkpoint: Path
    output: Path
    model: str | None = None
    dtype: str | None = None
    adapter: bool = False
    verify: bool = False
    records: Path | None = None
    push: str | None = None


class PushError(RuntimeError):
    """The hub did not accept the folder. The folder remains."""


def export_checkpoint(request: ExportRequest) -> int:
    """Export, and print the result; return 0, or EXIT_FAILURE where the export failed. Raises ConfigError."""
    _check(request)
    if request.push:
        _check_hub(request.push)
    from stage2_trainer.export.model_export import ExportError

    try:
        _export(request)
    except (ExportError, PushError) as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(str(error), style="bold red", markup=False)
        return EXIT_FAILURE
    return os.EX_OK


def _check(request: ExportRequest) -> None:
    """Raise ConfigError for options that contradict each other."""
    way_out = "remove one of the two options"
    rules = [
        (request.adapter and request.dtype, "--dtype", "an adapter is copied as it is (--adapter)"),
        (request.adapter and request.verify, "--verify", "an adapter is copied as it is (--adapter)"),
        (request.records and not request.verify, "--records", "is used by --verify alone"),
    ]
    problems = [Problem(option, None, rule, way_out) for broken, option, rule in rules if broken]
    if problems:
        raise ConfigError(problems)
    check_folder("--output", request.output)


def _export(request: ExportRequest) -> None:
    import torch

    from stage2_trainer.export.comparison import compare
    from stage2_trainer.export.model_export import export_adapter, export_model
    from stage2_trainer.export.trained_checkpoint import open_checkpoint

    console = plain_console()
    checkpoint = open_checkpoint(request.checkpoint, model=request.model)
    with console.status(Text(f"exporting {request.checkpoint}")):
        if request.adapter:
            exported = export_adapter(checkpoint, request.output)
        else:
            verify = functools.partial(compare, records=request.records) if request.verify else None
            dtype = getattr(torch, request.dtype) if request.dtype else None
            exported = export_model(checkpoint, request.output, dtype=dtype, verify=verify)
    console.print(f"{exported.folder}: {exported.tensors:,} tensors, {exported.bytes / 1e9:.2f} GB, verified")
    if exported.untied:
        console.print("  its output head is a separate tensor, because head and embeddings were trained separately")
    if exported.obstacle:
        console.print(f"  vLLM cannot serve it as an adapter: {exported.obstacle}; export without --adapter")
    if exported.compared:
        console.print(f"  {exported.compared}")
    if request.push:
        console.print(f"  {_push(exported.folder, request.push)}")


def _check_hub(repo: str) -> None:
    """Raise ConfigError if nobody is logged in to the hub, or if the repository exists."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.whoami()
        exists = api.repo_exists(repo)
    except Exception as error:  # of the hub's library, or of its HTTP library
        rule = f"must be the name of a repository, on a hub that can be reached ({_first_line(error)})"
        way_out = "log in with `hf auth login`, or export without --push and upload the folder later"
        raise ConfigError([Problem("--push", repo, rule, way_out)]) from error
    if exists:
        rule = "must be a new repository, but this one exists"
        raise ConfigError([Problem("--push", repo, rule, "choose another name: nothing is overwritten")])


def _push(folder: Path, repo: str) -> str:
    """Upload a folder to a new private repository; return its address. Raises PushError."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repo, private=True)
        api.upload_folder(repo_id=repo, folder_path=folder)
    except Exception as error:  # of the hub's library, or of its HTTP library
        later = f"{folder} is complete; `hf upload {repo} {folder}` uploads it"
        raise PushError(f"{repo} was not uploaded: {_first_line(error)}. {later}") from error
    return str(address)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
