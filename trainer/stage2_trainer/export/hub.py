"""A hub to which an exported folder is sent: looked at before the work begins, for most of what fails there."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.export.errors import ExportError


def check_hub(repo: str) -> None:
    """Look whether a repository can be made. Raises ConfigError where nobody is logged in, or where it is there."""
    api = HfApi()
    try:
        api.whoami()
        taken = api.repo_exists(repo)
    except Exception as error:  # of the hub's library, or of the HTTP library that it brings
        rule = f"must be the name of a repository, on a hub that can be reached ({_first_line(error)})"
        way_out = "log in with `hf auth login`, or leave --push out and send the folder later"
        raise ConfigError([Problem("--push", repo, rule, way_out)]) from error
    if taken:
        rule = "must be a new repository, and there is one of this name"
        raise ConfigError([Problem("--push", repo, rule, "name another one: nothing is overwritten")])


def push(folder: Path, repo: str) -> str:
    """Send a folder to a new private repository; return its address.

    Raises:
        ExportError: the hub did not take it. The folder stays.
    """
    api = HfApi()
    try:
        address = api.create_repo(repo, private=True)
        api.upload_folder(repo_id=repo, folder_path=folder)
    except Exception as error:  # of the hub's library, or of the HTTP library that it brings
        later = f"{folder} is whole; `hf upload {repo} {folder}` sends it"
        raise ExportError(f"{repo} was not sent: {_first_line(error)}. {later}") from error
    return str(address)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
