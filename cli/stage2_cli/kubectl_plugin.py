"""`kubectl stage2 …`: commands about a job on a cluster. kubectl finds this program as `kubectl-stage2`.

All requests go through kubectl, with its context, namespace and credentials.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from stage2_api.errors import ConfigError, Problem
from stage2_cli.main import Context, Namespace, User, call, explain, kubectl_options
from stage2_controller.spec import names

app = typer.Typer(name="kubectl-stage2", no_args_is_help=True, pretty_exceptions_enable=False)

Job = Annotated[str, typer.Argument(metavar="JOB", help="Name of a RolloutMatchingJob.")]

MOST_PODS = 64
"""Maximum number of concurrent log streams; kubectl's default is 5."""


@app.callback()
def kubectl_stage2() -> None:
    """RolloutMatchingJobs: why one is not training, its logs, and its progress."""


app.command()(explain)


@app.command()
def logs(
    job: Job,
    namespace: Namespace = None,
    context: Context = None,
    user: User = None,
    servers: Annotated[bool, typer.Option("--servers", help="Print the servers' logs instead.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stream new lines.")] = False,
) -> None:
    """Print the logs of a job's learner, or of its servers."""
    more = ["--follow"] if follow else []
    command = [*_logs(job, kubectl_options(namespace, context, user), servers=servers), *more]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@app.command()
def report(
    job: Job,
    namespace: Namespace = None,
    context: Context = None,
    user: User = None,
    html: Annotated[Path | None, typer.Option(metavar="OUT.html", help="Write one page with curves.")] = None,
) -> None:
    """Print a job's steps and evaluations as tables, from the learner's logs so far."""
    command = _logs(job, kubectl_options(namespace, context, user), servers=False)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / f"{job}.log"
        with log.open("wb") as file:
            code = subprocess.run(command, stdout=file, check=False).returncode
        if code:
            raise typer.Exit(code)
        if not log.stat().st_size:
            way_out = f"run: kubectl stage2 explain {job}"
            raise ConfigError([Problem("JOB", job, "its learner has logged nothing yet", way_out)])
        if html is not None:
            from stage2_report.html_page import PageRequest, write_html

            write_html(PageRequest([log], html))
            return
        from stage2_report.tables import report_runs

        report_runs([log])


def _logs(job: str, options: list[str], *, servers: bool) -> list[str]:
    """Return the command that prints the logs of all pods of a role."""
    role = names.ROLE_ROLLOUT if servers else names.ROLE_LEARNER
    selector = f"--selector={names.LABEL_JOB}={names.short_name(job)},{names.LABEL_ROLE}={role}"
    whose = ["--all-containers", "--prefix"] if servers else [f"--container={role}"]
    return ["kubectl", "logs", selector, *whose, "--tail=-1", f"--max-log-requests={MOST_PODS}", *options]


def main() -> None:
    """Entry point."""
    call(app)
