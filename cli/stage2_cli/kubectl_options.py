"""What every command that asks kubectl hands on to it: where, and with whose rights."""

from __future__ import annotations

from typing import Annotated

import typer

Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="The current one if not given.")]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig.")]
User = Annotated[str | None, typer.Option("--as", help="Whose rights kubectl asks with.")]


def where(namespace: str | None, context: str | None, user: str | None) -> list[str]:
    """Return kubectl's own options for what is given."""
    given = {"namespace": namespace, "context": context, "as": user}
    return [f"--{name}={value}" for name, value in given.items() if value]
