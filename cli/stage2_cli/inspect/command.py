"""The story of `stage2 inspect`: record, answer, E-step, and how it is shown."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from stage2_api.errors import EXIT_RETRYABLE, ConfigError, Problem
from stage2_cli.inspect.inputs import Place, Spelling, read_ids, read_record, read_spelling, read_text_ids
from stage2_report.inspection import Inspection, document, show
from stage2_trainer.data.output_places import check_file
from stage2_trainer.data.records import AS_DECLARED, Record, RecordRules
from stage2_trainer.matching import MatchOptions, build_target
from stage2_trainer.wire.errors import ServerError

if TYPE_CHECKING:
    from stage2_api.runconfig import RunConfig

_WAY_OUT = (
    "write `stage2 inspect CONFIG --sample N`, or "
    "`stage2 inspect --record FILE --line N --tokenizer DIR --response-ids FILE`"
)


@dataclass(frozen=True)
class Request:
    """What the command line asks for; `None` where an option is not given."""

    config: Path | None = None
    sample: int | None = None
    record: Path | None = None
    line: int | None = None
    tokenizer: Path | None = None
    response_ids: Path | None = None
    response_file: Path | None = None
    as_json: bool = False
    picture: Path | None = None


def inspect_sample(request: Request) -> int:
    """Run one sample's E-step and show it.

    Returns 0, or EXIT_RETRYABLE when the server failed; raises ConfigError for what a person must change.
    """
    _check(request)
    config = _config(request.config) if request.config else None
    record = read_record(_place(request, config))
    model, option = _model(request, config)
    spelling = read_spelling(model, option=option)
    try:
        ids, origin = _answer(request, config, record, model, spelling)
    except ServerError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(str(error), style="bold red", markup=False)
        return EXIT_RETRYABLE
    options = MatchOptions.from_config(config.rollout_matching) if config else MatchOptions()
    target = build_target(spelling.cut(ids), record.ground_truth, spelling.vocab, options)
    if request.picture:
        from stage2_cli.inspect.sample_picture import write_picture

        write_picture(record, target, request.picture)
    if request.as_json:
        print(json.dumps(document(target, spelling.vocab)))
    else:
        show(Inspection(f"{record.index} ({record.sample_id})", origin, target, spelling.vocab, request.picture))
    return os.EX_OK


def _check(request: Request) -> None:
    """Refuse options that contradict one another."""
    rules = [
        (request.response_ids and request.response_file, "--response-file", "cannot stand beside --response-ids"),
        (request.record and request.sample is not None, "--sample", "counts CONFIG's records; --record has --line"),
        (not request.record and request.line is not None, "--line", "counts the records of --record, which is missing"),
    ]
    problems = [Problem(option, None, rule, _WAY_OUT) for broken, option, rule in rules if broken]
    if problems:
        raise ConfigError(problems)
    if request.picture is not None:
        check_file("--picture", request.picture)


def _config(path: Path) -> RunConfig:
    from stage2_cli.config_files import load_config  # all of the contract; without CONFIG nothing of it is needed

    return load_config(path)


def _rules(config: RunConfig) -> RecordRules:
    from stage2_trainer.preflight import record_rules

    return record_rules(config)


def _required(config: RunConfig | None, *, instead: str) -> RunConfig:
    if config is None:
        raise ConfigError([Problem("CONFIG", None, f"is required without {instead}", _WAY_OUT)])
    return config


def _place(request: Request, config: RunConfig | None) -> Place:
    rules = _rules(config) if config else AS_DECLARED
    if request.record:
        return Place(request.record, request.line or 0, "--line", rules=rules)
    custom = _required(config, instead="--record").custom
    return Place(Path(custom.train_jsonl), request.sample or 0, "--sample", custom.train_sample_limit, rules)


def _model(request: Request, config: RunConfig | None) -> tuple[Path, str]:
    """The folder with the tokenizer, and what named it."""
    if request.tokenizer:
        return request.tokenizer, "--tokenizer"
    return Path(_required(config, instead="--tokenizer").model.model), "model.model"


def _answer(
    request: Request, config: RunConfig | None, record: Record, model: Path, spelling: Spelling
) -> tuple[list[int], str]:
    """The answer's ids, and where they come from in words."""
    if request.response_ids:
        return read_ids(request.response_ids), str(request.response_ids)
    if request.response_file:
        return read_text_ids(request.response_file, spelling.vocab), str(request.response_file)
    configured = _required(config, instead="--response-ids or --response-file")
    from stage2_cli.inspect.servers import rollout

    answer = rollout(configured, record, model=model)
    weights = f"weight version {answer.version}" if answer.version >= 0 else "weights that no learner ever sent"
    return answer.token_ids, f"{answer.server}, {weights}"
