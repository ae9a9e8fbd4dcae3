"""Commands about jobs of a cluster: `stage2 job VERB` and `kubectl stage2 VERB` are the same.

What is imported here is light: the command line itself stands on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stage2_api.errors import EXIT_RETRYABLE, ConfigError
from stage2_api.log_lines import one_line, print_error, without_colours
from stage2_cli.cluster import JobError
from stage2_cli.options import AsJson, Changes, Follow, JobFile, Servers, spread

if TYPE_CHECKING:
    from stage2_cli.job import Job

STDOUT = 1

jobs = typer.Typer(name="job", no_args_is_help=True, pretty_exceptions_enable=False)


def _names(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the name of a job; without a cluster there is none."""
    from stage2_cli.job import Job

    given = context.params.get
    try:
        found = Job.list(namespace=given("namespace"), context=given("context"), user=given("user"))
    except (JobError, ConfigError):
        return []
    return [job.name for job, _ in found if job.name.startswith(incomplete)]


Name = Annotated[
    str, typer.Argument(metavar="JOB", help="Name of a RolloutMatchingJob in the cluster.", autocompletion=_names)
]


@dataclass(frozen=True)
class Where:
    """Options that say in which namespace of which cluster a job is, and who asks."""

    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="The current one by default.")] = None
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig.")] = None
    user: Annotated[str | None, typer.Option("--as", help="User to impersonate.")] = None

    def job(self, name: str) -> Job:
        """Raises ConfigError for a name that no job can have."""
        from stage2_cli.job import Job

        return Job(name, **vars(self))


@jobs.callback()
def job() -> None:
    """Jobs of a cluster: submit, list, watch, suspend, resume, delete."""


@jobs.command()
@spread
def submit(file: JobFile, where: Where, changes: Changes = None) -> None:
    """Check a job file, and create its job or apply what it changes."""
    from stage2_cli.job import Job

    job = Job.from_file(file, **vars(where), changes=changes or [])
    typer.echo(f"{job.submit().name} submitted")


@jobs.command("list")
@spread
def list_jobs(
    where: Where,
    all_namespaces: Annotated[bool, typer.Option("--all-namespaces", "-A", help="List those of all.")] = False,
    as_json: AsJson = False,
) -> None:
    """List jobs with their phase and progress."""
    from stage2_cli.job import Job
    from stage2_report.terminal import print_json

    rows = [
        {
            "namespace": job.namespace or "",
            "name": job.name,
            "phase": status.phase or "",
            "progress": status.progress or "",
        }
        for job, status in Job.list(**vars(where), all_namespaces=all_namespaces)
    ]
    if as_json:
        print_json(rows, indent=2)
    else:
        _print_rows(["namespace", "name", "phase", "progress"], [list(row.values()) for row in rows])


@jobs.command()
@spread
def status(job: Name, where: Where, as_json: AsJson = False) -> None:
    """Print a job's phase, progress and message, or its whole status (--json)."""
    from stage2_report.terminal import Terminal, print_json

    found = where.job(job).status()
    if as_json:
        print_json(found.model_dump(mode="json", by_alias=True, exclude_none=True), indent=2)
        return
    terminal = Terminal()
    values = {"phase": found.phase, "progress": found.progress, "node": found.node, "message": found.message}
    for name, value in values.items():
        terminal.print(f"{name}: {value or 'not reported yet'}")


@jobs.command()
@spread
def explain(job: Name, where: Where, as_json: AsJson = False) -> None:
    """Explain why a job is not training and which field to change; exit code 1 if it is not training."""
    found = where.job(job).read()
    from stage2_cli.explain import show

    raise typer.Exit(show(found, as_json=as_json))


@jobs.command()
@spread
def events(job: Name, where: Where, as_json: AsJson = False) -> None:
    """Print what the controller reported about a job in the last hour."""
    from stage2_report.terminal import print_json

    found = where.job(job).events()
    if as_json:
        print_json([vars(event) for event in found], indent=2)
    else:
        rows = [[event.at, event.type, event.reason, f"{event.count}x", event.message] for event in found]
        _print_rows(["last", "type", "reason", "", "message"], rows)


@jobs.command("logs")
@spread
def job_logs(job: Name, where: Where, servers: Servers = False, follow: Follow = False) -> None:
    """Print the log of a job's learner, or of its servers."""
    print_lines(where.job(job).logs(servers=servers, follow=follow))


@jobs.command()
@spread
def wait(
    job: Name,
    where: Where,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", min=0, help="Exit with 75 then.")] = None,
) -> None:
    """Wait until a job has succeeded; exit code 1 if it fails."""
    try:
        where.job(job).wait(timeout)
    except TimeoutError as error:
        print_error(f"{error}")
        raise typer.Exit(EXIT_RETRYABLE) from None


@jobs.command()
@spread
def suspend(job: Name, where: Where) -> None:
    """Remove a job's pods; it keeps its checkpoints."""
    where.job(job).suspend()


@jobs.command()
@spread
def resume(job: Name, where: Where) -> None:
    """Run a suspended job again, from its last checkpoint."""
    where.job(job).resume()


@jobs.command()
@spread
def delete(job: Name, where: Where) -> None:
    """Delete a job, and in the background its pods."""
    where.job(job).delete()


@jobs.command()
@spread
def report(
    job: Name,
    where: Where,
    html: Annotated[Path | None, typer.Option(metavar="OUT.html", help="Write one page with curves.")] = None,
) -> None:
    """Print a job's steps and evaluations as tables, from the learner's logs so far."""
    where.job(job).report(html)


def _print_rows(columns: list[str], rows: list[list[str]]) -> None:
    from rich.table import Table

    from stage2_report.terminal import Terminal

    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    Terminal(wraps=True).print(table)


def print_lines(lines: Iterable[str]) -> None:
    """Print the lines of a log while they come, without colours, and with what a terminal would obey escaped.

    Each state of a progress bar, which a carriage return begins, is a line.
    """
    try:
        with open(STDOUT, "w", encoding="utf-8", closefd=False) as output:
            for line in lines:
                output.writelines(f"{one_line(without_colours(state))}\n" for state in line.split("\r"))
                output.flush()
    except BrokenPipeError:  # `stage2 logs | head`
        return
