"""The `stage2` command. Each command imports what it needs when it runs, so that `stage2 --help` answers at once."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stage2_api.errors import EXIT_CONFIG, ConfigError
from stage2_cli.import_commands import imports
from stage2_cli.kubectl_options import Context, Namespace, User, where

if TYPE_CHECKING:
    from stage2_api.runconfig import RunConfig

app = typer.Typer(
    name="stage2",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(imports, name="import")

JobFile = Annotated[Path, typer.Argument(metavar="FILE", help="A RolloutMatchingJob (YAML).")]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A training YAML, or a job file.")]
Mapped = Annotated[
    list[str] | None,
    typer.Option("--map", metavar="CONTAINER=LOCAL", help="Where a path of the containers lies on this machine."),
]

Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Remove an earlier run's checkpoints and logs from training.output_dir.")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"stage2 {version('stage2')}")
        raise typer.Exit


@app.callback()
def stage2(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    """Rollout-matching training of vision-language models, on Kubernetes or on one machine."""


@app.command()
def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Job files or training YAMLs.")],
    mapped: Mapped = None,
    all_records: Annotated[
        bool, typer.Option("--all-records", help="Read data files to their end, not the first 1,000 records of each.")
    ] = False,
) -> None:
    """Check job files and training YAMLs, and their data files that are here; exit code 64 names every mistake."""
    from stage2_cli.validate import validate_files

    raise typer.Exit(validate_files(files, mapped=mapped or [], all_records=all_records))


@app.command()
def doctor(file: ConfigFile, mapped: Mapped = None) -> None:
    """Say what a run will need (GPUs, memory, disk, data, packages) and whether it is here; exit code 1 if not."""
    from stage2_cli.doctor import examine

    raise typer.Exit(examine(file, mapped=mapped or []))


@app.command()
def prepare(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a stock Qwen3-VL, or its name on a hub.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The new model's folder.")],
    start: Annotated[str, typer.Option(help="How the new rows begin: numerals, ramp or mean.")] = "numerals",
) -> None:
    """Add the 1,000 coordinate tokens to a stock Qwen3-VL, and save it as a model that a run takes."""
    from stage2_cli.prepare import prepare_model

    raise typer.Exit(prepare_model(model, output, start=start))


@app.command()
def init(  # noqa: PLR0913 - one parameter for each option
    coco: Annotated[Path, typer.Option(metavar="FILE", help="Annotations to train on, as COCO has them.")],
    images: Annotated[Path, typer.Option(metavar="DIR", help="Folder of their images.")],
    model: Annotated[str, typer.Option(metavar="MODEL", help="A Qwen3-VL: a folder, or its name on a hub.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The new folder.")],
    val_coco: Annotated[Path | None, typer.Option(metavar="FILE", help="Annotations that are held out.")] = None,
    val_images: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of their images.")] = None,
    gpus: Annotated[int, typer.Option(help="GPUs of the machine; 0 trains a tiny model on its CPU.")] = 4,
    max_objects: Annotated[int | None, typer.Option(min=1, help="Images with more objects are left out.")] = None,
) -> None:
    """Make a folder for both stages of a COCO file: records, prepared model, a job file for each, the commands."""
    from stage2_cli.init import chosen_annotations, init_project
    from stage2_trainer.prepare.project.folder import ProjectRequest

    train, held_out = chosen_annotations(coco, images, val_coco, val_images)
    raise typer.Exit(init_project(ProjectRequest(train, held_out, model, gpus, output, max_objects)))


@app.command()
def data(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A data file: JSON lines of records.")],
    units: Annotated[
        Literal["bins", "pixels"] | None, typer.Option(help="What plain numbers are, where the records do not say it.")
    ] = None,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="A model's folder: its tokenizer counts.")] = None,
    pictures: Annotated[Path | None, typer.Option(metavar="OUT.png", help="Draw some records on a page.")] = None,
    coco: Annotated[Path | None, typer.Option(metavar="OUT.json", help="Write the records as a COCO file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """Show what a data file holds: counts, classes, sizes, units, lengths of answers, and what looks wrong in it."""
    from stage2_cli.data_report import DataRequest, show_data

    raise typer.Exit(show_data(DataRequest(file, units, model, pictures, coco, as_json)))


@app.command()
def render(
    file: JobFile,
    namespace: Annotated[str | None, typer.Option(help="Namespace, where the file names none.")] = None,
) -> None:
    """Print what the controller would create, as static YAML."""
    from stage2_cli.render import render_job

    sys.stdout.write(render_job(file, namespace=namespace))


@app.command()
def explain(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name of a RolloutMatchingJob in the cluster.")],
    namespace: Namespace = None,
    context: Context = None,
    user: User = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """Say why a job of the cluster does not train, and which field to change; exit code 1 if something is missing."""
    from stage2_cli.explain import explain_job

    raise typer.Exit(explain_job(job, where(namespace, context, user), as_json=as_json))


@app.command()
def run(
    file: JobFile,
    mapped: Mapped = None,
    work_dir: Annotated[Path, typer.Option(help="Where configuration, token, logs and empty volumes go.")] = Path(
        "out/run"
    ),
    engine: Annotated[str, typer.Option(help="vllm, or the CPU stub (quick, for trying things).")] = "vllm",
    overwrite: Overwrite = False,
) -> None:
    """Run a job on this machine: the containers that the controller would create, as processes."""
    from stage2_cli.run import run_job

    raise typer.Exit(run_job(file, mapped=mapped or [], work_dir=work_dir, engine=engine, overwrite=overwrite))


@app.command()
def serve(
    config: ConfigFile,
    server: Annotated[int, typer.Option(help="Which of the configured servers this is, from 0.")],
    engine: Annotated[str, typer.Option(help="vllm or stub.")] = "vllm",
    host: Annotated[str | None, typer.Option(help="Address to bind; loopback when the server's base_url is.")] = None,
) -> None:
    """Start rollout server number SERVER of CONFIG and stay in the foreground."""
    from stage2_cli.config_files import load_config
    from stage2_trainer.serve.launch import serve as start

    start(load_config(config), server, engine=engine, host=host)


@app.command()
def learn(
    config: ConfigFile,
    processes: Annotated[int, typer.Option(min=1, help="Learner processes, one for each GPU (torchrun).")] = 1,
    overwrite: Overwrite = False,
    restarts: Annotated[
        int, typer.Option(min=0, help="Times that it is started again, in this process, after an end that may pass.")
    ] = 0,
) -> None:
    """Train: connect to the configured rollout servers and run to the end."""
    if restarts:
        raise typer.Exit(_learn_again(config, processes, restarts, overwrite=overwrite))
    from stage2_cli.config_files import load_config

    loaded = load_config(config)
    if processes > 1:
        raise typer.Exit(_learn_in_processes(loaded, config, processes, overwrite=overwrite))
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's processes lead sessions of their own, which nobody else ends
        from stage2_cli.processes import end_with_parent

        end_with_parent()
    from stage2_trainer.main import learn as train

    raise typer.Exit(train(loaded, overwrite=overwrite))


@app.command()
def wait(config: ConfigFile) -> None:
    """Wait until every configured rollout server answers; in a learner's pod, before its learner starts."""
    from stage2_cli.config_files import load_config
    from stage2_cli.waiting import wait_for_servers

    wait_for_servers(load_config(config))


@app.command()
def evaluate(  # noqa: PLR0913 - one parameter for each option
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="A training YAML, or a job file.", show_default=False)
    ] = None,
    checkpoint: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Answers the held-out records of CONFIG; several compared.")
    ] = None,
    rollouts: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE[@STEP]", help="Answers, JSON lines; several are compared with the first."),
    ] = None,
    records: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Data file of the records that were asked about.")
    ] = None,
    names: Annotated[
        Literal["exact", "normalised"], typer.Option(help="Classes: descriptions as they are, or in a common form.")
    ] = "exact",
    units: Annotated[
        Literal["bins", "pixels"] | None, typer.Option(help="What plain numbers are, where the records do not say it.")
    ] = None,
    answered_only: Annotated[
        bool, typer.Option("--answered-only", help="Leave out records that one of the files does not answer.")
    ] = False,
    resamples: Annotated[int, typer.Option(min=0, help="Draws of the bootstrap over images; 0: no intervals.")] = 500,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """Score answers, or checkpoints, as the field does: COCO's AP and AR, F1 with and without class, duplicates."""
    from stage2_cli.evaluate import EvaluationRequest, evaluate_rollouts, require_one_kind

    require_one_kind(config, checkpoint, rollouts, records)
    request = EvaluationRequest(
        rollouts or [], records or Path(), names, units, answered_only, resamples, seed, as_json
    )
    if config is None:
        raise typer.Exit(evaluate_rollouts(request))
    from stage2_cli.evaluate_checkpoints import evaluate_checkpoints

    raise typer.Exit(evaluate_checkpoints(config, checkpoint or [], request))


@app.command()
def export(  # noqa: PLR0913 - one parameter for each option
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint folder of a run.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The new folder.")],
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Its base model, a folder or a hub's name; else as it says itself."),
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None, typer.Option(help="Of all weights; else the base model's.")
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Save the adapter for PEFT, not merged.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare log-probabilities with the learner's model, in float32.")
    ] = False,
    records: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Data file whose first record --verify takes.")
    ] = None,
    push: Annotated[str | None, typer.Option(metavar="REPO", help="Send it to a new private repository.")] = None,
) -> None:
    """Save a checkpoint as a model folder that transformers and vLLM load without stage2."""
    from stage2_cli.export import ExportRequest, export_checkpoint

    request = ExportRequest(checkpoint, output, model, dtype, adapter, verify, records, push)
    raise typer.Exit(export_checkpoint(request))


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="A run's output folder, its stage2_log.jsonl, or saved learner logs."),
    ],
    html: Annotated[
        Path | None, typer.Option(metavar="OUT.html", help="Write one page with curves and pictures; of two runs too.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Write first and last held-out rollouts here, or reward curves.")
    ] = None,
    curve: Annotated[Path | None, typer.Option(help="Write loss and held-out scores over the steps here.")] = None,
    images: Annotated[Path | None, typer.Option(help="The folder of the held-out records' images.")] = None,
    watch: Annotated[
        int | None, typer.Option(min=1, metavar="SECONDS", help="Write the page anew as the run goes on.")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Follow the run in the terminal until it has ended.")] = False,
) -> None:
    """Print a run as a table, draw it, or write a page of it (--html), or of two runs side by side."""
    from stage2_report.tables import report_run, reported_run

    if live:
        from stage2_cli.live_report.following import follow_run, followed_run

        follow_run(followed_run(runs, html=html, picture=picture, curve=curve, watch=watch))
        return
    if html is None:
        report_run(reported_run(runs, watch=watch), picture=picture, images=images, curve=curve)
        return
    from stage2_report.html_page import PageRequest, write_page_of_runs

    write_page_of_runs(PageRequest(runs, html, images, watch))


@app.command()
def replay(
    records: Annotated[Path, typer.Argument(metavar="RECORDS", help="rollouts.jsonl of a run.")],
    step: Annotated[int, typer.Option(metavar="N", help="Optimizer step as the records count: the first is 0.")],
    tokenizer: Annotated[Path | None, typer.Option(metavar="DIR", help="Model folder, where it lies now.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write ids and labels here, JSON lines.")] = None,
) -> None:
    """Rebuild what a step was trained on from the records alone; exit code 1 if it differs."""
    from stage2_report.replay import replay_step

    raise typer.Exit(replay_step(records, step, tokenizer=tokenizer, output=output))


@app.command()
def inspect(  # noqa: PLR0913 - one parameter for each option
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="A training YAML, or a job file.", show_default=False)
    ] = None,
    sample: Annotated[int | None, typer.Option(metavar="N", help="Training record of CONFIG, from 0.")] = None,
    record: Annotated[Path | None, typer.Option(metavar="FILE", help="Take records from this JSONL instead.")] = None,
    line: Annotated[int | None, typer.Option(metavar="N", help="Record of --record, from 0.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(metavar="DIR", help="Model folder instead of CONFIG's.")] = None,
    response_ids: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take the answer from here, a JSON list of ids: no server.")
    ] = None,
    response_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take the answer from here, as text: no server.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
    picture: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw ground truth and answer here.")] = None,
    rewards: Annotated[bool, typer.Option("--rewards", help="Score the answer with a GRPO run's rewards.")] = False,
) -> None:
    """Show one sample's E-step: the answer, its matches, and what is trained on each token."""
    if rewards:
        from stage2_cli.inspect.rewards import inspect_rewards

        raise typer.Exit(inspect_rewards(config, sample=sample, answer=response_file, as_json=as_json))
    from stage2_cli.inspect.command import Request, inspect_sample

    request = Request(
        config=config,
        sample=sample,
        record=record,
        line=line,
        tokenizer=tokenizer,
        response_ids=response_ids,
        response_file=response_file,
        as_json=as_json,
        picture=picture,
    )
    raise typer.Exit(inspect_sample(request))


def _learn_again(path: Path, processes: int, restarts: int, *, overwrite: bool) -> int:
    import logging

    from stage2_api import log_lines
    from stage2_cli.restarts import Restarts

    log_lines.configure(logging.INFO)
    command = [sys.executable, "-m", "stage2_cli", "learn", str(path), f"--processes={processes}"]
    return Restarts(command, ["--overwrite"] if overwrite else []).run(restarts)


def _learn_in_processes(loaded: RunConfig, path: Path, processes: int, *, overwrite: bool) -> int:
    """Start torchrun's processes, unless all of them would end with one mistake that this one can find."""
    from stage2_trainer.main import check

    if code := check(loaded, world_size=processes, overwrite=overwrite):
        return code
    from stage2_trainer.process.torchrun import run_processes

    return run_processes("stage2_cli", ["learn", str(path)], processes=processes)


def main() -> None:
    """Entry point."""
    call(app)


def call(program: typer.Typer) -> None:
    """Run a command line: configuration errors end with exit code 64 and sentences, not with a traceback."""
    # Pillow's words on images of many pixels; stage2 has a limit and words of its own (data.images.MOST_PIXELS).
    warnings.filterwarnings("ignore", "Image size .* exceeds limit")
    try:
        program()
    except ConfigError as error:
        from stage2_cli.errors import show_config_error

        show_config_error(error)
        sys.exit(EXIT_CONFIG)
