"""`kubectl stage2 …`: commands about a job on a cluster. kubectl finds this program as `kubectl-stage2`.

All requests go through kubectl, with its context, namespace and credentials.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stage2_cli.jobs import Context, Follow, Namespace, Servers, User, explain, job_logs, job_report, kubectl_options
from stage2_cli.main import call

app = typer.Typer(name="kubectl-stage2", no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def kubectl_stage2() -> None:
    """RolloutMatchingJobs: why one is not training, its logs, and its progress."""


app.command()(explain)


@app.command()
def logs(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name of a RolloutMatchingJob.")],
    namespace: Namespace = None,
    context: Context = None,
    user: User = None,
    servers: Servers = False,
    follow: Follow = False,
) -> None:
    """Print the log of a job's learner, or of its servers."""
    raise typer.Exit(job_logs(job, kubectl_options(namespace, context, user), servers=servers, follow=follow))


@app.command()
def report(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name of a RolloutMatchingJob.")],
    namespace: Namespace = None,
    context: Context = None,
    user: User = None,
    html: Annotated[Path | None, typer.Option(metavar="OUT.html", help="Write one page with curves.")] = None,
) -> None:
    """Print a job's steps and evaluations as tables, from the learner's logs so far."""
    raise typer.Exit(job_report(job, kubectl_options(namespace, context, user), html))


def main() -> None:
    """Entry point."""
    call(app)
