"""`stage2 inspect`: one record, an answer to it, and its E-step or, in a GRPO run, its rewards.

The answer comes from a file or from the configured servers. Stage 1 has none: it trains on the ground truth.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from stage2_api.errors import EXIT_RETRYABLE, ConfigError, Problem, refused
from stage2_api.runconfig import RunConfig
from stage2_cli.config_files import load_config
from stage2_cli.requests import InspectionRequest
from stage2_report.inspection import Inspection, document, show
from stage2_report.terminal import Terminal, print_json
from stage2_trainer.data.files import check_file, read_named
from stage2_trainer.data.records import AS_DECLARED, Record, load_record
from stage2_trainer.matching import CoordVocab, MatchedTarget, MatchOptions, build_target, cut_before, vision_ids
from stage2_trainer.matching.targets import ground_truth_target
from stage2_trainer.process.activity import ACTIVITY, LIBRARIES
from stage2_trainer.wire.errors import ServerError

if TYPE_CHECKING:
    from stage2_trainer.grpo.loaded_rewards import Reward
    from stage2_trainer.wire.requests import Rollout

_WAY_OUT = (
    "write `stage2 inspect CONFIG --sample N`, or "
    "`stage2 inspect --record FILE --line N --tokenizer DIR --response-ids FILE`"
)


@dataclass(frozen=True)
class Spelling:
    """A model's vocabulary, and the ids before which an answer is cut."""

    vocab: CoordVocab
    vision_ids: frozenset[int]


def inspect_sample(request: InspectionRequest) -> int:
    """Show what one sample is trained on.

    Returns 0, or EXIT_RETRYABLE if the server failed. Raises ConfigError.
    """
    _check(request)
    config = load_config(request.config) if request.config else None
    record = _record(request, config)
    model, option = _model(request, config)
    spelling = read_spelling(model, option=option)
    try:
        target, origin = _target(request, config, record, model, spelling)
    except ServerError as error:
        Terminal(stderr=True).print(str(error), style="bold red")
        return EXIT_RETRYABLE
    if request.picture:
        from stage2_report.picture import write_picture

        check_images(record)
        write_picture(record, target, request.picture, answered=origin is not None)
    if request.as_json:
        print_json(document(target))
    else:
        show(Inspection(f"{record.index} ({record.sample_id})", origin, target, spelling.vocab, request.picture))
    return os.EX_OK


def _check(request: InspectionRequest) -> None:
    """Raise ConfigError for options that contradict each other."""
    rules = [
        (request.response_ids and request.response_file, "--response-file", "excludes --response-ids"),
        (request.record and request.sample is not None, "--sample", "counts CONFIG's records; --record has --line"),
        (not request.record and request.line is not None, "--line", "counts the records of --record, which is missing"),
    ]
    problems = [Problem(option, None, rule, _WAY_OUT) for broken, option, rule in rules if broken]
    if problems:
        raise ConfigError(problems)
    if request.picture is not None:
        check_file("--picture", request.picture)


def _required(config: RunConfig | None, *, instead: str) -> RunConfig:
    if config is None:
        raise refused("CONFIG", None, f"is required without {instead}", _WAY_OUT)
    return config


def _record(request: InspectionRequest, config: RunConfig | None) -> Record:
    """Return the record as the learner reads it; its images need not exist. Raises ConfigError."""
    rules = AS_DECLARED
    if config:
        from stage2_trainer.checks.preflight import record_rules  # imports Pillow

        rules = record_rules(config)
    rules = rules.without_images()
    if request.record:
        return load_record(request.record, request.line or 0, rules=rules, named="--line")
    custom = _required(config, instead="--record").custom
    return load_record(
        custom.train_jsonl, request.sample or 0, limit=custom.train_sample_limit, rules=rules, named="--sample"
    )


def _model(request: InspectionRequest, config: RunConfig | None) -> tuple[Path, str]:
    """Return the folder of the tokenizer, and the option or key that names it."""
    if request.tokenizer:
        return request.tokenizer, "--tokenizer"
    return Path(_required(config, instead="--tokenizer").model.model), "model.model"


def read_spelling(folder: Path, *, option: str) -> Spelling:
    """Return the vocabulary of a model folder. Raises ConfigError if it is missing or lacks coordinate tokens."""
    from stage2_report.tokenizer_file import load_coord_tokenizer

    tokenizer, vocab = load_coord_tokenizer(folder, option=option)
    return Spelling(vocab, vision_ids(tokenizer))


def _target(
    request: InspectionRequest, config: RunConfig | None, record: Record, model: Path, spelling: Spelling
) -> tuple[MatchedTarget, str | None]:
    """Return what is trained on, and the origin of the answer, None in stage 1. Raises ConfigError."""
    if config and config.is_supervised:
        if given := request.response_ids or request.response_file:
            rule = "must not be given with custom.trainer_variant: sft, which trains on the ground truth"
            raise refused("--response-file", str(given), rule, "leave it out, or inspect a stage-2 run")
        return ground_truth_target(record.ground_truth, spelling.vocab), None
    ids, origin = _answer(request, config, record, model, spelling)
    options = MatchOptions.from_config(config.rollout_matching) if config else MatchOptions()
    return build_target(cut_before(ids, spelling.vision_ids), record.ground_truth, spelling.vocab, options), origin


def _answer(
    request: InspectionRequest, config: RunConfig | None, record: Record, model: Path, spelling: Spelling
) -> tuple[list[int], str]:
    """Return the answer's token ids and their origin."""
    if request.response_ids:
        return read_ids(request.response_ids), str(request.response_ids)
    if request.response_file:
        text = read_text(request.response_file, "--response-file")
        ids = spelling.vocab.encode(text.removesuffix("\n").removesuffix("\r"))  # editors end a file with a newline
        return ids, str(request.response_file)
    configured = _required(config, instead="--response-ids or --response-file")
    answer = _ask_servers(configured, record, model=model)
    weights = f"weight version {answer.version}" if answer.version >= 0 else "initial weights"
    return answer.token_ids, f"{answer.server}, {weights}"


def _ask_servers(config: RunConfig, record: Record, *, model: Path) -> Rollout:
    """Return one answer from the servers' current weights, with the seed of the run's first request.

    Raises ConfigError if no server is configured, an image is missing, or server and learner see different prompts, and
    ServerError if the server fails.
    """
    matching = config.rollout_matching
    server = matching.vllm.server
    urls = [address.base_url for address in server.resolved_servers()]
    if not urls:
        path = "custom.extra.rollout_matching.vllm.server.servers"
        way_out = "name the servers there, or give an answer with --response-ids or --response-file"
        raise refused(path, None, "must name the servers", way_out)
    with ACTIVITY.doing(LIBRARIES):
        from stage2_trainer.data.encode import Encoder
        from stage2_trainer.model.policy import load_processor
        from stage2_trainer.rollouts.http import ServerBackend
    from stage2_trainer.data.messages import chat_messages
    from stage2_trainer.wire.credentials import read_token
    from stage2_trainer.wire.requests import RolloutRequest, Sampling, SeedPlan, answers

    token = read_token(os.environ)
    check_images(record)
    messages = chat_messages(record, config.custom.user_prompt, system=config.template.system)
    processor = load_processor(model, config.model.allow_remote_code, **config.template.pixel_limits())
    encoder = Encoder(processor)
    limit = server.infer_timeout_s
    with ServerBackend(
        urls,
        token=token,
        sampling=Sampling.from_config(matching),
        timeout_s=server.timeout_s,
        infer_timeout_s=limit if limit is not None and limit > 0 else None,
    ) as backend:
        outcome = backend.generate([RolloutRequest(messages)], seed_plan=SeedPlan(config.training.seed, 0, 0))
    (answer,) = answers(outcome)
    encoder.check_prompt(encoder.prompt(messages), answer.prompt_token_ids, answer.server)
    return answer


def check_images(record: Record) -> None:
    """Raise ConfigError for an unreadable image, or one whose size differs from the record."""
    from stage2_trainer.data.messages import record_fault

    if fault := record_fault(record):
        rule = f"must have readable images, because their pixels are needed ({fault})"
        raise refused(f"{record.sample_id} images", list(record.images), rule, "correct the record")


def read_ids(path: Path) -> list[int]:
    """Return the token ids in a JSON file, which may include stop tokens. Raises ConfigError."""
    way_out = "write [5031, 42, ...], or give text with --response-file"
    try:
        value = json.loads(read_text(path, "--response-ids"))
    except json.JSONDecodeError as error:
        value = error
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        shown = f"{path}: {repr(value)[:100]}"
        raise refused("--response-ids", shown, "must be a JSON list of token ids", way_out)
    return value


def read_text(path: Path, option: str) -> str:
    """Return the text of a file. Raises ConfigError."""
    try:
        return read_named(path).decode()
    except OSError as error:
        rule = f"must be a readable file ({error.strerror})"
        raise refused(option, str(path), rule, "correct the path") from error
    except UnicodeDecodeError as error:
        raise refused(option, str(path), f"must be UTF-8 ({error})", "save it as UTF-8") from error


def inspect_rewards(request: InspectionRequest) -> int:
    """Print the rewards of an answer to a training record, and their weighted sum; return 0. Raises ConfigError."""
    from stage2_trainer.grpo import task
    from stage2_trainer.grpo.loaded_rewards import load_rewards
    from stage2_trainer.grpo.rewards import Sample

    run = load_config(_required_file(request.config, "CONFIG"))
    if run.rlhf is None:
        raise refused("rlhf", None, "only GRPO runs have rewards", "give the configuration of one")
    custom, number = run.custom, request.sample or 0
    rules = task.record_rules(run).without_images()
    record = load_record(custom.train_jsonl, number, limit=custom.train_sample_limit, rules=rules, named="--sample")
    rewards = load_rewards(run.rlhf.reward_funcs, run.rlhf.resolved_weights, files=run.rlhf.reward_files or {})
    text = read_text(_required_file(request.response_file, "--response-file"), "--response-file")
    answered = Sample(text, record, task.Task.from_config(run).contract)
    scores = [reward(answered) for reward in rewards]
    total = sum(reward.weight * score for reward, score in zip(rewards, scores, strict=True))
    if request.as_json:
        by_name = {reward.name: score for reward, score in zip(rewards, scores, strict=True)}
        print_json({"sample": number, "rewards": by_name, "total": total})
    else:
        Terminal(wraps=True).print(_table(rewards, scores, total))
    return 0


def _table(rewards: list[Reward], scores: list[float], total: float) -> Table:
    """Return the rewards of one answer: score, weight, and weighted score."""
    shown = Table("reward", "score", "weight", "adds")
    for reward, score in zip(rewards, scores, strict=True):
        shown.add_row(reward.name, f"{score:.3f}", f"{reward.weight:g}", f"{reward.weight * score:.3f}")
    shown.add_section()
    shown.add_row("total", "", "", f"{total:.3f}")
    return shown


def _required_file(path: Path | None, name: str) -> Path:
    if path is None:
        way_out = "write `stage2 inspect CONFIG --rewards --sample N --response-file FILE`"
        raise refused(name, None, "is required with --rewards", way_out)
    return path
