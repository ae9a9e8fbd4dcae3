"""A dataclass of options is one parameter of a command, and as many options of its command line as it has fields."""

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from stage2_cli.options import spread


@dataclass(frozen=True)
class Pair:
    low: Annotated[int, typer.Option(help="The lower one.")]
    high: Annotated[int, typer.Option("--top", min=2)] = 9


program = typer.Typer()


@program.command()
@spread
def show(
    name: Annotated[str, typer.Argument()], pair: Pair, loud: Annotated[bool, typer.Option("--loud")] = False
) -> None:
    """Print what was given."""
    typer.echo(f"{name} {pair} {loud}")


def test_fields_stand_in_the_place_of_their_dataclass() -> None:
    options = typer.main.get_command(program).params[:4]  # without --help and those about completion
    assert [one.name for one in options] == ["name", "low", "high", "loud"]
    assert [one.required for one in options] == [True, True, False, False]


def test_a_command_gets_the_dataclass() -> None:
    assert CliRunner().invoke(program, ["a", "--low", "1"]).output == "a Pair(low=1, high=9) False\n"
    given = CliRunner().invoke(program, ["--top=3", "--low=2", "--loud", "a"])
    assert given.output == "a Pair(low=2, high=3) True\n"


def test_a_field_is_checked_as_an_option_is() -> None:
    assert "--low" in CliRunner().invoke(program, ["a"]).output
    assert "--top" in CliRunner().invoke(program, ["a", "--low", "1", "--top", "1"]).output
