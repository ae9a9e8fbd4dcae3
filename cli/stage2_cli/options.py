"""Options that several commands share, and commands that take the options of a dataclass as one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Value of the training YAML: training.seed=1.")
]
Cpu = Annotated[bool, typer.Option("--cpu", help="Use no GPU, even if the job asks for some: for tiny models.")]
Engine = Annotated[Literal["vllm", "stub"], typer.Option(help="stub: a fast server on the CPU, for trials.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Stream new lines until the job ends.")]
JobFile = Annotated[Path, typer.Argument(metavar="FILE", help="A RolloutMatchingJob (YAML); - is standard input.")]
Longer = Annotated[
    float | None,
    typer.Option(
        metavar="NATS", min=0, help="Bias against the token that closes the list: the model lists more objects."
    ),
]
Mapped = Annotated[
    list[str] | None, typer.Option("--map", metavar="CONTAINER=LOCAL", help="Local path of a path in the containers.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Remove an earlier run's checkpoints and logs from training.output_dir.")
]
Servers = Annotated[bool, typer.Option("--servers", help="Print the servers' logs instead.")]


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Let typer see the fields of a command's dataclasses as parameters of the command, each in its dataclass's place.

    A field is declared as a parameter is, with Annotated. The command is called with the dataclasses made of them.
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    groups = {name: _fields(one.annotation) for name, one in parameters.items() if is_dataclass(one.annotation)}

    @wraps(command)
    def spread_out(**given: Any) -> None:
        made = {
            name: parameters[name].annotation(**{field.name: given.pop(field.name) for field in fields})
            for name, fields in groups.items()
        }
        command(**given, **made)

    shown = [field for name, one in parameters.items() for field in groups.get(name, [one])]
    keywords = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in shown]
    vars(spread_out)["__signature__"] = inspect.Signature(keywords)  # which typer reads in place of `**given`
    return spread_out


def _fields(group: Any) -> list[inspect.Parameter]:
    """Return the parameters of a dataclass, with the types that its module's names stand for."""
    types = get_type_hints(group, include_extras=True)
    return [one.replace(annotation=types[name]) for name, one in inspect.signature(group).parameters.items()]
