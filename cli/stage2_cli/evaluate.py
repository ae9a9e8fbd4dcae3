"""`stage2 evaluate`: the scores of rollouts in files, or of checkpoints that answer the held-out records first."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from stage2_api.errors import EXIT_RETRYABLE, ConfigError, Problem, counted, refused
from stage2_api.log_lines import print_error
from stage2_api.runconfig import RunConfig
from stage2_cli.config_files import load_config
from stage2_cli.length_curve import ONE_LENGTH, Lengths
from stage2_cli.requests import EvaluationRequest
from stage2_report.terminal import Terminal, print_json
from stage2_trainer.checks.preflight import checked_records
from stage2_trainer.checks.supported import check_supported
from stage2_trainer.data.model_files import with_local_model
from stage2_trainer.data.object_order import ObjectOrder
from stage2_trainer.data.records import Record, RecordRules, load_records, units_by
from stage2_trainer.matching.closing import LONGER
from stage2_trainer.model.checkpoints import flaw_of
from stage2_trainer.process.activity import ACTIVITY, LIBRARIES
from stage2_trainer.scores.advice import advice, summary
from stage2_trainer.scores.answer_file import Answered, Form, Reading, read_rollouts
from stage2_trainer.scores.answer_scores import (
    COORDINATE_SCORES,
    EQUAL_SCORES,
    AnswerScores,
    bootstrap_weights,
    differences,
    without_nan,
)
from stage2_trainer.scores.image_counts import COUNTS, OF_OUTLINES, SHARES_OF_IMAGES
from stage2_trainer.scores.rollout_file import Rollouts, places_in
from stage2_trainer.scores.scored_image import exact, normalised, scored_images
from stage2_trainer.telemetry.run_log import ROLLOUT_LOG
from stage2_trainer.wire.errors import ServerError

NAMINGS = {"exact": exact, "normalised": normalised}
PLAIN_WIDTH = 110
SHOWN = (
    "AP", "AP50", "AP75", "AR", "AP_small", "AP_medium", "AP_large", "AR_small", "AR_medium", "AR_large", "f1@0.5",
    "precision@0.5", "recall@0.5", "f1_class@0.5", "precision_class@0.5", "recall_class@0.5", "box_f1@0.5",
    "box_f1_class@0.5", "outline_share", "true_outline_share", "desc_exact", "desc_normalised", "misses", "duplicates",
    "objects_per_truth", "counting_error", "parse_rate", "truncated_rate", "loop_rate",
)  # fmt: skip
RESULT_SCORES = "results"
RANKED = {
    COORDINATE_SCORES: "objects ranked by the log-probabilities of their coordinate tokens",
    RESULT_SCORES: "objects ranked by the scores of the results",
    EQUAL_SCORES: "no log-probabilities: all objects rank equally, in the order of records and answers",
}
FORMS: dict[Form, str] = {
    "stage2": "stage2's, with coordinate tokens", "qwen": "JSON with plain numbers, Qwen3-VL's form",
    "coco": "COCO's results, in pixels",
}  # fmt: skip
SPECULATION = "custom.extra.rollout_matching.vllm.speculation"
SMALL_SET = 5000  # images; fewer bias AP
WITHOUT = ("AP", "f1@0.5", "f1_class@0.5")


def evaluate_request(request: EvaluationRequest) -> int:
    """Score answers in files, or those of checkpoints, and print the figures; return the exit code.

    Raises ConfigError.
    """
    require_one_kind(request)
    if request.longer is not None and request.config is None:
        raise refused("--longer", request.longer, "a checkpoint must answer under it", "give CONFIG --checkpoint DIR")
    lengths = Lengths.from_options(request.longer, request.objects_per_image, request.picture)
    if request.config is None:
        return evaluate_rollouts(request, lengths)
    return evaluate_checkpoints(request.config, request, lengths)


def evaluate_rollouts(
    request: EvaluationRequest, lengths: Lengths = ONE_LENGTH, *, labels: Sequence[str] = (), limit: int | None = None
) -> int:
    """Score the files and print the figures; return 0. Raises ConfigError.

    lengths: the biases under which a checkpoint wrote the files. labels: names of the files, by default their own.
    limit: number of records to read; None means all.
    """
    rollouts, path = request.rollouts or [], request.records or Path()
    reading = Reading(request.answers, request.answer_units, request.annotations)
    rules = RecordRules(units=request.units, images_exist=False, image_roots=(os.sep,))  # no image is opened
    with ACTIVITY.doing(f"reading {path}"):
        records = load_records(path, limit, rules=rules)
    places = places_in(path)[: len(records)]
    files = [Rollouts.from_name(name) for name in rollouts]
    answered = [read_rollouts(one, records, places, reading) for one in files]
    kept = _kept([record.sample_id for record in records], answered, only=request.answered_only)
    if request.missing == "refuse":
        _require_answers(rollouts, answered, {records[i].sample_id for i in kept})
    naming = NAMINGS[request.names]
    sets = [
        AnswerScores.from_images(scored_images([records[i] for i in kept], [one.answers[i] for i in kept], naming))
        for one in answered
    ]
    draws = bootstrap_weights(len(kept), draws=request.resamples, seed=request.seed) if request.resamples else None
    labels = labels or rollouts
    documents = [
        {"rollouts": name, **_document_of(one, scores.document(draws))}
        for name, one, scores in zip(labels, answered, sets, strict=True)
    ]
    others = [place for place in range(len(sets)) if place != request.against - 1]
    if len(others) == len(sets):
        rule = f"must be one of the {len(sets)} sets of answers"
        raise refused("--against", request.against, rule, "count them from 1")
    compared = {}
    if draws is not None:
        compared = {place: differences(sets[request.against - 1], sets[place], draws) for place in others}
        for place, found in compared.items():
            if "coco" in (answered[request.against - 1].form, answered[place].form):
                compared[place] = {name: one for name, one in found.items() if name not in SHARES_OF_IMAGES}
    if len(lengths.nats) > 1:
        lengths.draw(documents)
    if request.as_json:
        found = _document(documents, compared, request.against - 1)
        print_json(without_nan(lengths.document(documents, found) if len(lengths.nats) > 1 else found))
    elif len(lengths.nats) > 1:
        lengths.show(_terminal(), documents, compared, labels[0])
    else:
        lacking = [0 if request.answered_only or one.of_a_run else len(one.missing) for one in answered]
        _show(documents, compared, request.against, [_notes(*one) for one in zip(answered, lacking, strict=True)])
        _advise(documents[-1], [records[i] for i in kept])
    return os.EX_OK


def _document_of(one: Answered, figures: dict[str, Any]) -> dict[str, Any]:
    """Return the figures with the form of the answers, and without what that form cannot show: results have no text."""
    document = {"answers": one.form, "answer_units": one.unit, **figures}
    if one.form != "coco":
        return document
    ranked = document["scores_from"] != EQUAL_SCORES
    scored = {"scores_from": RESULT_SCORES} if ranked else {}
    intervals = {name: ends for name, ends in document.get("intervals", {}).items() if name not in SHARES_OF_IMAGES}
    kept = {"intervals": intervals} if "intervals" in document else {}
    return {**document, **dict.fromkeys(SHARES_OF_IMAGES, math.nan), **scored, **kept}


def _notes(one: Answered, lacking: int) -> list[str]:
    notes = [f"answers read as {FORMS[one.form]}", *one.notes]
    return [*notes, f"{counted(lacking, 'record')} without an answer, counted as empty"] if lacking else notes


def require_one_kind(request: EvaluationRequest) -> None:
    """Raise ConfigError unless the options are a configuration with checkpoints, or rollouts with records.

    A configuration may have other records than its own.
    """
    given = {
        "CONFIG": request.config,
        "--checkpoint": request.checkpoint,
        "--rollouts": request.rollouts,
        "--records": request.records,
    }
    there = [name for name, value in given.items() if value]
    if there in (["CONFIG", "--checkpoint"], ["CONFIG", "--checkpoint", "--records"], ["--rollouts", "--records"]):
        return
    rule = "needs either a configuration with checkpoints, or rollouts with records"
    way_out = "give CONFIG --checkpoint DIR [--records FILE], or --rollouts FILE --records FILE"
    raise refused("stage2 evaluate", " ".join(there) or None, rule, way_out)


def evaluate_checkpoints(path: Path, request: EvaluationRequest, lengths: Lengths = ONE_LENGTH) -> int:
    """Answer the held-out records with each checkpoint, score the answers and print the figures.

    path: the configuration, which names the records unless the request does. Returns 0, or 75 where servers were lost.
    Raises ConfigError.
    """
    checkpoints = request.checkpoint or []
    lengths.require_one(checkpoints)
    config = _config(path, request.records, lengths)
    _check(config, checkpoints)
    _check_drafts(config, lengths)
    with tempfile.TemporaryDirectory(prefix="stage2-evaluate-") as folder:
        config = _for_evaluation(config, Path(folder))
        check_supported(config, world_size=1)
        records = checked_records(config, world_size=1)
        output = Path(folder) / ROLLOUT_LOG
        try:
            with redirect_stdout(sys.stderr):  # libraries print, and the figures must stay machine-readable
                with ACTIVITY.doing(LIBRARIES):
                    from stage2_trainer.learner.build import write_checkpoint_rollouts

                write_checkpoint_rollouts(with_local_model(config), records, checkpoints, output, longer=lengths.nats)
        except ServerError as error:
            print_error(str(error))
            return EXIT_RETRYABLE
        custom = config.custom
        answered = replace(
            request,
            rollouts=[f"{output}@{number}" for number in range(len(checkpoints) * len(lengths.nats))],
            records=Path(custom.val_jsonl or ""),
            units=units_by(custom.coord_tokens.skip_bbox_norm),
        )
        return evaluate_rollouts(answered, lengths, labels=lengths.labels(checkpoints), limit=custom.val_sample_limit)


def _config(path: Path, records: Path | None, lengths: Lengths) -> RunConfig:
    """Return the configuration, with other records if given; vLLM in this process makes no drafts beside a bias."""
    changes = [f"custom.val_jsonl={records}", "custom.val_sample_limit=null"] if records else []
    config = load_config(path, changes)
    if not any(lengths.nats) or config.rollout_matching.uses_servers:
        return config
    return load_config(path, [*changes, f"{SPECULATION}=none"])


def _check(config: RunConfig, checkpoints: Sequence[Path]) -> None:
    """Raise ConfigError for invalid input, before any heavy import."""
    problems = [
        Problem("--checkpoint", str(one), f"must be a complete checkpoint: {flaw}", "choose another one of the run")
        for one in checkpoints
        if (flaw := flaw_of(one))
    ]
    if config.rlhf is not None:
        rule = "a checkpoint answers as rollout_matching says, which GRPO does not read"
        way_out = (
            "give a configuration of rollout matching with this model, or --rollouts with the run's rollouts.jsonl"
        )
        problems.append(Problem("rlhf", "grpo", rule, way_out))
    if not config.custom.val_jsonl:
        problems.append(Problem("custom.val_jsonl", None, "must name the records to answer", "set it to a data file"))
    if "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
        problems.append(
            Problem("WORLD_SIZE", os.environ["WORLD_SIZE"], "evaluation runs in one process", "run it without torchrun")
        )
    if problems:
        raise ConfigError(problems)


def _check_drafts(config: RunConfig, lengths: Lengths) -> None:
    """Raise ConfigError where servers may make drafts, beside which vLLM refuses a bias."""
    method = config.rollout_matching.vllm.speculation
    if any(lengths.nats) and config.rollout_matching.uses_servers and method != "none":
        rule = f"must be none for {LONGER}: vLLM refuses a bias beside drafts"
        raise refused(SPECULATION, method, rule, "set it to none, and start the servers again")


def _for_evaluation(config: RunConfig, folder: Path) -> RunConfig:
    """Return the configuration of a run that only evaluates and leaves no files."""
    changes = {"output_dir": str(folder), "report_to": [], "eval_strategy": "steps", "trace": False}
    training = config.training.model_copy(update=changes)
    return config.model_copy(update={"training": training, "deepspeed": None})


def _kept(names: Sequence[str], answered: Sequence[Answered], *, only: bool) -> list[int]:
    """Return the indices of the records that are scored, the same for all files."""
    missing = {name for one in answered for name in one.missing if only or one.of_a_run}
    kept = [index for index, name in enumerate(names) if name not in missing]
    if not kept:
        rule = "must answer at least one record in all files"
        raise refused("--rollouts", f"{len(names)} records", rule, "remove --answered-only")
    return kept


def _require_answers(files: Sequence[str], answered: Sequence[Answered], kept: Collection[str]) -> None:
    """Raise ConfigError where a file has no answer to a record that is scored."""
    problems = []
    for name, one in zip(files, answered, strict=True):
        if one.form != "coco" and (lacking := [record for record in one.missing if record in kept]):
            rule = f"has no answer to {len(lacking):,} of {len(kept):,} records: {', '.join(lacking[:3])}"
            way_out = "add --answered-only to leave them out, or --missing count-as-empty"
            problems.append(Problem("--rollouts", name, rule, way_out))
    if problems:
        raise ConfigError(problems)


def _document(
    documents: Sequence[dict[str, Any]], compared: Mapping[int, dict[str, Any]], against: int
) -> dict[str, Any]:
    if len(documents) == 1:
        return documents[0]
    minus = documents[against]["rollouts"]
    rows = [{"of": documents[place]["rollouts"], "minus": minus, **found} for place, found in compared.items()]
    return {"files": list(documents), "differences": rows}


def _show(
    documents: Sequence[dict[str, Any]],
    compared: Mapping[int, dict[str, Any]],
    against: int,
    notes: Sequence[Sequence[str]],
) -> None:
    console = _terminal()
    table = Table(header_style="bold")
    table.add_column("figure", no_wrap=True)
    for number, one in enumerate(documents):
        name = Path(one["rollouts"]).name if len(documents) == 1 else f"{number + 1}"
        table.add_column(name if one["answers"] == "stage2" else f"{name} ({one['answers']})", justify="right")
    for place in compared:
        table.add_column(f"{place + 1} - {against}", justify="right")
    outlines = any(one["overlap_of"] == "masks" for one in documents)
    for name in SHOWN:
        if name in OF_OUTLINES and not outlines:
            continue
        form = ".0f" if name in COUNTS else ".3f"
        cells = [_figure(one[name], one.get("intervals", {}).get(name), form) for one in documents]
        table.add_row(name, *cells, *(_difference(found.get(name), form) for found in compared.values()))
    for name in WITHOUT:
        table.add_row(
            f"{name}, no repeats", *(_figure(one["without_duplicates"][name], None, ".3f") for one in documents)
        )
    console.print(table)
    for number, (one, said) in enumerate(zip(documents, notes, strict=True)):
        _print_notes(console, one, said, "" if len(documents) == 1 else f"{number + 1}: ")


def _print_notes(console: Terminal, one: dict[str, Any], said: Sequence[str], mark: str) -> None:
    lines = [
        f"{mark}{one['rollouts']}: {counted(one['images'], 'image')}, {counted(one['objects'], 'object')},"
        f" {one['predictions']:,} answered; overlap of {one['overlap_of']}; {RANKED[one['scores_from']]}",
        *(f"{mark}{note}" for note in said),
    ]
    worst = one["worst_image"]
    lines.append(
        f"{mark}worst image: {worst['sample_id']}, F1 {_figure(worst['f1_class@0.5'], None, '.3f')} with class,"
        f" {worst['predictions']:,} objects answered, {worst['objects']:,} true"
    )
    for line in lines:
        console.print(line, soft_wrap=True)


def _advise(last: dict[str, Any], records: Sequence[Record]) -> None:
    """Print what the last set of answers suggests to do."""
    console = _terminal()
    if last["images"] < SMALL_SET:
        console.print(f"AP of {last['images']:,} images is too high on average: compare it only with sets of this size")
    console.print(summary(last), soft_wrap=True)
    if last["answers"] != "stage2":
        return  # the advice is on training, and other models may not be in training
    for line in advice(last, ObjectOrder.from_records(records)):
        console.print(f"advice: {line}", soft_wrap=True)


def _terminal() -> Terminal:
    return Terminal(width=None if sys.stdout.isatty() else PLAIN_WIDTH, wraps=True)


def _figure(value: float, interval: Sequence[float] | None, form: str) -> str:
    if np.isnan(value):
        return "-"
    return f"{value:,{form}}" if interval is None else f"{value:,{form}} [{interval[0]:,{form}}, {interval[1]:,{form}}]"


def _difference(found: dict[str, Any] | None, form: str) -> str:
    if found is None:
        return "-"
    low, high = found["interval"]
    return f"{found['difference']:+,{form}} [{low:+,{form}}, {high:+,{form}}]"
