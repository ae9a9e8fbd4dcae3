"""Commands about a job of a cluster, or a run of this machine: `explain` and `logs`.

`stage2` and kubectl's plugin have both. What is imported here is light: the command line itself stands on it.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import IO, Annotated

import typer

from stage2_api.errors import refused
from stage2_api.log_lines import print_error
from stage2_cli.kubectl import kubectl, print_lines

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="The current one by default.")]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig.")]
User = Annotated[str | None, typer.Option("--as", help="User that kubectl impersonates.")]
Servers = Annotated[bool, typer.Option("--servers", help="Print the servers' logs instead.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Stream new lines.")]

MOST_PODS = 64
"""Maximum number of concurrent log streams; kubectl's default is 5."""


def kubectl_options(namespace: str | None, context: str | None, user: str | None) -> list[str]:
    """Return kubectl's own options for those that are set."""
    options = {"namespace": namespace, "context": context, "as": user}
    return [f"--{name}={value}" for name, value in options.items() if value]


def explain(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name of a RolloutMatchingJob in the cluster.")],
    namespace: Namespace = None,
    context: Context = None,
    user: User = None,
    as_json: AsJson = False,
) -> None:
    """Explain why a job is not training and which field to change; exit code 1 if it is not training."""
    from stage2_cli.explain import explain_job

    raise typer.Exit(explain_job(job, kubectl_options(namespace, context, user), as_json=as_json))


def logs(
    run: Annotated[
        str, typer.Argument(metavar="[RUN]", help="A run's --work-dir, written with a slash (./work), or a job's name.")
    ] = "out/run",
    namespace: Namespace = None,
    context: Context = None,
    user: User = None,
    servers: Servers = False,
    follow: Follow = False,
) -> None:
    """Print the learner's log, or the servers', of a run on this machine or of a job in the cluster."""
    options = kubectl_options(namespace, context, user)
    if "/" not in run:  # every folder is written with one, and no job
        raise typer.Exit(job_logs(run, options, servers=servers, follow=follow))
    if options:
        option, _, value = options[0].partition("=")
        rule = f"is for a job of the cluster, and {run} is a folder"
        raise refused(option, value, rule, "leave it out, or give a job's name")
    raise typer.Exit(_local_logs(Path(run), servers=servers, follow=follow))


def job_logs(job: str, options: list[str], *, servers: bool = False, follow: bool = False) -> int:
    """Print the logs of all pods of a job's learner or servers; return kubectl's exit code. options: of kubectl."""
    code, error = write_logs(job, options, None, servers=servers, follow=follow)
    _print_reason(job, error)
    return code


def _print_reason(job: str, error: str) -> None:
    if error:
        local = f" (for the run in this folder, write ./{job})" if Path(job, "logs").is_dir() else ""
        print_error(f"kubectl logs of {job}: {error}{local}")


def write_logs(
    job: str, options: list[str], file: IO[bytes] | None, *, servers: bool = False, follow: bool = False
) -> tuple[int, str]:
    """Write the logs of a job's pods into a file as they are, or print them; return kubectl's exit code and error."""
    from stage2_controller.job import names

    role = names.ROLE_ROLLOUT if servers else names.ROLE_LEARNER
    selector = f"--selector={names.LABEL_JOB}={names.short_name(job)},{names.LABEL_ROLE}={role}"
    whose = ["--all-containers", "--prefix"] if servers else [f"--container={role}"]
    words = [
        "logs",
        selector,
        *whose,
        "--tail=-1",
        f"--max-log-requests={MOST_PODS}",
        *options,
        *(["--follow"] if follow else []),
    ]
    code, _, error = kubectl(words, stdout=file, on_output=print_lines if file is None else None)
    return code, error


def job_report(job: str, options: list[str], html: Path | None) -> int:
    """Print a job's steps and evaluations as tables, or write them as one page; return kubectl's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / f"{job}.log"
        with log.open("wb") as file:
            code, error = write_logs(job, options, file)
        if code:
            _print_reason(job, error)
            return code
        if not log.stat().st_size:
            raise refused("JOB", job, "its learner has logged nothing yet", f"run: kubectl stage2 explain {job}")
        if html is not None:
            from stage2_report.html_page import PageRequest, write_html

            write_html(PageRequest([log], html))
        else:
            from stage2_report.tables import report_runs

            report_runs([log])
    return code


def _local_logs(work_dir: Path, *, servers: bool, follow: bool) -> int:
    """Print the logs of a local run from their beginning; return the exit code. Raises ConfigError without any."""
    pattern = "server-*.log" if servers else "learner.log"
    files = sorted(work_dir.glob(f"logs/{pattern}"))
    if not files:
        way_out = "name the --work-dir of a run, or a job of the cluster"
        raise refused("RUN", str(work_dir), f"must be a folder with logs/{pattern}", way_out)
    more = ["--follow=name"] if follow else []
    with subprocess.Popen(["tail", "--lines=+1", *more, *files], stdout=subprocess.PIPE) as tail:
        assert tail.stdout is not None
        print_lines(tail.stdout)
    return tail.returncode
