"""The `stage2` command. Each command imports what it needs when it runs, so that `stage2 --help` answers at once."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated, Literal

import typer

from stage2_api.errors import EXIT_CONFIG, EXIT_RETRYABLE, EXIT_UNAVAILABLE, ConfigError, refused
from stage2_api.log_lines import escape_errors, print_error
from stage2_cli.cluster import JobError
from stage2_cli.imports import imports
from stage2_cli.jobs import jobs, print_lines
from stage2_cli.options import AsJson, Changes, Cpu, Engine, Follow, JobFile, Longer, Mapped, Overwrite, Servers, spread
from stage2_cli.requests import (
    DataRequest,
    EvaluationRequest,
    InferenceRequest,
    InspectionRequest,
    ProjectOptions,
    RunRequest,
)
from stage2_trainer.process.activity import ACTIVITY

FIRST_LINE_S = 3.0
"""Seconds of a command without a word of what it does."""

app = typer.Typer(name="stage2", no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(imports, name="import")
app.add_typer(jobs, name="job")

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A training YAML, or a job file.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        from stage2_cli.commit import built_from

        commit = built_from()
        typer.echo(f"stage2 {version('stage2')}{f' (commit {commit})' if commit else ''}")
        raise typer.Exit


@app.callback()
def stage2(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show version and commit, and exit."),
    ] = False,
) -> None:
    """Rollout-matching training of vision-language models, on Kubernetes or on one machine."""


@app.command()
def validate(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Job files, training YAMLs, or data files (.jsonl).")
    ],
    mapped: Mapped = None,
    changes: Changes = None,
    all_records: Annotated[
        bool, typer.Option("--all-records", help="Read whole data files instead of the first 1,000 records of each.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check job files and training YAMLs with their local data files, or data files; list mistakes, exit with 64."""
    from stage2_cli.validate import validate_files

    raise typer.Exit(
        validate_files(files, mapped=mapped or [], changes=changes or [], all_records=all_records, as_json=as_json)
    )


@app.command()
def doctor(
    file: ConfigFile,
    mapped: Mapped = None,
    changes: Changes = None,
    cpu: Cpu = False,
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Log or output folder of a run, to compare divisions of the GPUs; default: training.output_dir.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check what a run needs (GPUs, memory, disk, data, packages) on this machine; exit code 64 if any is missing."""
    from stage2_cli.doctor import examine

    raise typer.Exit(examine(file, mapped=mapped or [], changes=changes or [], as_json=as_json, cpu=cpu, log=log))


@app.command()
def env(as_json: AsJson = False) -> None:
    """Print what a bug report needs: versions of stage2 and its packages, system, memory, GPUs."""
    from stage2_cli.environment import show_environment

    raise typer.Exit(show_environment(as_json=as_json))


@app.command()
def prepare(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a stock Qwen3-VL, or its name on a hub.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The new model's folder.")],
) -> None:
    """Add the 1,000 coordinate tokens to a stock Qwen3-VL, and save the model."""
    from stage2_cli.init import prepare_model

    raise typer.Exit(prepare_model(model, output))


@app.command()
@spread
def init(project: ProjectOptions, output: Annotated[Path, typer.Option(metavar="DIR", help="The new folder.")]) -> None:
    """Create a project folder from data: records, prepared model, a job file for each stage, a README."""
    from stage2_cli.init import init_project

    raise typer.Exit(init_project(project.project(output), project.annotation_units))


@app.command()
@spread
def train(
    project: ProjectOptions,
    output: Annotated[Path, typer.Option(metavar="DIR", help="The project's folder, as `init` creates it.")] = Path(
        "out/train"
    ),
    changes: Changes = None,
) -> None:
    """Train both stages on this machine: import, init, run, export, report and infer, each printed as a command."""
    from stage2_cli.train import train as run_steps
    from stage2_trainer.checks.packages import require

    require("trainer")
    raise typer.Exit(run_steps(project.project(output), changes or [], project.annotation_units))


@app.command()
@spread
def data(request: DataRequest) -> None:
    """Describe a data file: counts, classes, sizes, units, lengths of answers, and what looks wrong in it."""
    from stage2_cli.data import show_data

    raise typer.Exit(show_data(request))


@app.command()
def schema(
    kind: Annotated[Literal["job", "training"], typer.Argument(metavar="[job|training]", help="Kind of file.")] = "job",
) -> None:
    """Print the JSON schema by which editors check job files, or training YAMLs."""
    from stage2_api.schema import schema_text

    typer.echo(schema_text(kind), nl=False)


@app.command()
def render(
    file: JobFile,
    namespace: Annotated[str | None, typer.Option(help="Namespace, if the file has none.")] = None,
    changes: Changes = None,
    itself: Annotated[
        bool, typer.Option("--job", help="Print the job instead, with the files of its rewards: for kubectl apply.")
    ] = False,
    trainjob: Annotated[
        bool, typer.Option(help="Print a TrainJob of Kubeflow Trainer, with its runtime, in place of the JobSet.")
    ] = False,
) -> None:
    """Print the objects that the controller would create, as static YAML."""
    from stage2_cli.render import render_itself, render_job

    if itself and trainjob:
        raise typer.BadParameter("--job prints the job, --trainjob its objects: remove one of them")
    if itself:
        text = render_itself(file, namespace=namespace, changes=changes or [])
    else:
        text = render_job(file, namespace=namespace, changes=changes or [], trainjob=trainjob)
    sys.stdout.write(text)


@app.command()
def logs(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's --work-dir.")] = Path("out/run"),
    servers: Servers = False,
    follow: Follow = False,
) -> None:
    """Print the learner's log, or the servers', of a run on this machine; of a cluster's job see `stage2 job logs`."""
    from stage2_cli.processes import log_lines

    print_lines(log_lines(run, servers=servers, follow=follow))


@app.command()
@spread
def run(request: RunRequest) -> None:
    """Run a job on this machine: the controller's containers as processes."""
    from stage2_cli.run import run_job

    raise typer.Exit(run_job(request))


@app.command()
def serve(
    config: ConfigFile,
    server: Annotated[int, typer.Option(help="Index of this server among the configured ones, from 0.")],
    engine: Engine = "vllm",
    host: Annotated[
        str | None, typer.Option(help="Address to bind; by default loopback if the server's base_url is.")
    ] = None,
    pod: Annotated[
        int | None, typer.Option(help="Index of this host among the servers' hosts; --server then counts within it.")
    ] = None,
) -> None:
    """Start rollout server number SERVER of CONFIG in the foreground."""
    from stage2_cli.config_files import load_addressed
    from stage2_trainer.checks.packages import require
    from stage2_trainer.serve.launch import first_of_pod
    from stage2_trainer.serve.launch import serve as start

    found = load_addressed(config)
    require("trainer")
    first = first_of_pod(found, pod) if pod is not None else 0
    if first is None:
        typer.echo(f"host {pod} is not in the list of servers: it was added or removed a moment ago", err=True)
        raise typer.Exit(EXIT_RETRYABLE)
    start(found, server + first, engine=engine, host=host)


@app.command()
def learn(
    config: ConfigFile,
    processes: Annotated[int, typer.Option(min=1, help="Learner processes, one for each GPU (torchrun).")] = 1,
    overwrite: Overwrite = False,
    restarts: Annotated[int, typer.Option(min=0, help="Restarts after failures that a retry may fix.")] = 0,
    node: Annotated[
        str | None,
        typer.Option(
            metavar="INDEX/COUNT@HOST:PORT",
            help="This machine of COUNT, each with --processes; HOST is the first. Not with --restarts.",
        ),
    ] = None,
    changes: Changes = None,
) -> None:
    """Train: connect to the configured rollout servers and run to the end."""
    from stage2_cli.learn import learn_once, learn_with_restarts

    if restarts and node:
        rule = "the Job of a learner on several machines replaces their pods"
        raise refused("--restarts", restarts, rule, "leave out --restarts or --node")
    if restarts:
        raise typer.Exit(learn_with_restarts(config, processes, restarts, overwrite=overwrite, changes=changes or []))
    raise typer.Exit(learn_once(config, processes, overwrite=overwrite, changes=changes or [], node=node))


@app.command()
def wait(config: ConfigFile) -> None:
    """Wait until every configured rollout server answers; the learner's pod runs this first."""
    from stage2_cli.learn import wait_for_servers

    wait_for_servers(config)


@app.command()
@spread
def evaluate(request: EvaluationRequest) -> None:
    """Score answers, or checkpoints: COCO's AP and AR, F1 with and without class, duplicates."""
    from stage2_cli.evaluate import evaluate_request

    raise typer.Exit(evaluate_request(request))


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run's folder: its best one.")
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The new folder.")],
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Base model, a folder or a name on a hub; by default the recorded one."),
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Type of all weights; by default the base model's."),
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Save the adapter alone, for PEFT.")] = False,
    longer: Longer = None,
) -> None:
    """Save a checkpoint as a model folder that transformers and vLLM load without stage2."""
    from stage2_cli.export import export_checkpoint

    raise typer.Exit(
        export_checkpoint(checkpoint, output, model=model, dtype=dtype, adapter=adapter, longer=longer or 0.0)
    )


@app.command()
@spread
def infer(request: InferenceRequest) -> None:
    """List the objects of images: draw them, and write their boxes in pixels."""
    from stage2_cli.infer import infer_images

    raise typer.Exit(infer_images(request))


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="A run's output folder, its stage2_log.jsonl, or saved learner logs."),
    ],
    html: Annotated[
        Path | None,
        typer.Option(metavar="OUT.html", help="Write one page with curves and rollouts, of one or two runs."),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="OUT.png", help="Draw the first and last held-out rollouts; of a second run, its last."),
    ] = None,
    images: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the held-out images, if they have moved.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every step, evaluation and bad sample as a JSON line, without tables.")
    ] = False,
) -> None:
    """Print one or two runs as tables, draw them (--picture), or write a page of them side by side (--html)."""
    if as_json:
        if html is not None or picture is not None:
            rule = "cannot be combined with --html or --picture"
            raise refused("--json", True, rule, "call the command again for --html or --picture")
        from stage2_report.tables import print_records

        print_records(runs)
        return
    if html is not None:
        from stage2_report.html_page import PageRequest, write_html

        write_html(PageRequest(runs, html, images))
        if picture is None:
            return
    if len(runs) > 2:
        raise refused("RUN", f"{len(runs)} runs", "must be one or two", "report two at a time")
    from stage2_report.tables import report_runs

    report_runs(runs, picture=picture, images=images)


@app.command()
def replay(
    records: Annotated[Path, typer.Argument(metavar="RECORDS", help="rollouts.jsonl of a run.")],
    step: Annotated[
        int, typer.Option(metavar="N", min=1, help="Optimizer step, as the log counts it: the first is 1.")
    ],
    tokenizer: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the model, if it has moved.")] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write token ids and labels, as JSON lines.")
    ] = None,
) -> None:
    """Rebuild the targets of a step from the run's records alone; exit code 1 if they differ."""
    from stage2_report.replay import replay_step

    raise typer.Exit(replay_step(records, step, tokenizer=tokenizer, output=output))


@app.command()
@spread
def inspect(request: InspectionRequest) -> None:
    """Show one sample's E-step: the answer, its matches, and the supervision of each token."""
    from stage2_cli.inspect_sample import inspect_rewards, inspect_sample

    raise typer.Exit(inspect_rewards(request) if request.rewards else inspect_sample(request))


def main() -> None:
    """Entry point."""
    call(app)


def call(program: typer.Typer) -> None:
    """Run a command line; print configuration errors and exit with 64, name a missing extra and exit with 69.

    What takes long is named on standard error, again every 15 seconds.
    """
    # Pillow warns about large images; stage2 has its own limit (data.images.MOST_PIXELS).
    escape_errors()
    warnings.filterwarnings("ignore", "Image size .* exceeds limit")
    try:
        with ACTIVITY.reported(_say, first_s=FIRST_LINE_S):
            program()
    except ConfigError as error:
        from stage2_cli.console import show_config_error

        show_config_error(error)
        sys.exit(EXIT_CONFIG)
    except JobError as error:
        print_error(f"{error}")
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        from stage2_trainer.checks.packages import requirement_of

        requirement = requirement_of(error.name or "")
        if requirement is None:
            raise
        print_error(f"this command needs {error.name}, which is not installed: pip install '{requirement}'")
        sys.exit(EXIT_UNAVAILABLE)


def _say(line: str) -> None:
    if line:
        print_error(line)
