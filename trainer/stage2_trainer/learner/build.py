"""The parts of a learner, from a configuration: model, servers, what it teaches."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import align_special_tokens

from stage2_api.errors import refused
from stage2_api.rollout_matching import Overlong
from stage2_api.runconfig import RunConfig
from stage2_trainer.data.encode import GIB, Encoder, PromptCache
from stage2_trainer.data.messages import Prompts, record_fault
from stage2_trainer.data.records import Record
from stage2_trainer.data.run_records import RunRecords
from stage2_trainer.learner.assembly import LearnerParts, assemble_learner, further_figures
from stage2_trainer.learner.estep import EStep, GroundTruthSteps, Teaching
from stage2_trainer.learner.evaluate import Evaluation
from stage2_trainer.learner.listeners import (
    log_held_out_rollouts,
    log_training_rollouts,
)
from stage2_trainer.learner.loop import Learner
from stage2_trainer.learner.rows import (
    PackedRowPlanner,
    RowPlanner,
    SharedRowPlanner,
    SingleRowPlanner,
    StepRowPlanner,
    WindowRowPlanner,
)
from stage2_trainer.learner.run_state import load_weights
from stage2_trainer.learner.supervise import Matcher, OverlongRule, SampleTools, Supervisor, TruthSupervisor
from stage2_trainer.matching import MatchOptions
from stage2_trainer.matching.closing import closing_bias
from stage2_trainer.matching.ground_truth import serialize_objects
from stage2_trainer.model import training_arguments as arguments
from stage2_trainer.model.attention import attention_here, attention_words
from stage2_trainer.model.deepspeed_config import shards_weights
from stage2_trainer.model.policy import Policy, coord_vocab, load_policy, load_processor, part_rates
from stage2_trainer.model.tensor_files import refuse_code, tensors_alone
from stage2_trainer.process.activity import ACTIVITY
from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.process.ranks import world_size
from stage2_trainer.rollouts.bad_samples import BadSamples
from stage2_trainer.rollouts.build import TrainingState, local_rollouts, make_training_state, server_rollouts
from stage2_trainer.rollouts.first_process import FirstProcessRollouts, ProcessExchange
from stage2_trainer.rollouts.rollout_source import NoRollouts, RolloutSource
from stage2_trainer.sync.fleet.proof import Probe, sample_probe
from stage2_trainer.sync.tensors.merge import HERE
from stage2_trainer.telemetry.answer_tables import answer_tables
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.run_context import RunContext, report_reproducibility
from stage2_trainer.telemetry.run_log import JsonLines, SilentLog
from stage2_trainer.wire.credentials import read_token

logger = logging.getLogger(__name__)
PROBE_ANSWER_TOKENS = 256  # enough for a percentile, and fewer than any answer that is asked for


@dataclass(frozen=True)
class Answering:
    """A policy, and what answers with its weights. state: offloads and gathers the training state during rollouts."""

    policy: Policy
    args: TrainingArguments
    tools: SampleTools
    rollouts: RolloutSource
    evaluation: Evaluation
    state: TrainingState


def build_learner(config: RunConfig, data: RunRecords, context: RunContext, stack: ExitStack) -> Learner:
    """Load the policy, wait for the servers, and put the learner together; `stack` closes the connections."""
    answering = _answering(config, data, context, stack)
    policy, rollouts = answering.policy, answering.rollouts
    attention = attention_words(attention_here(config.model.attn_impl), on_gpu=policy.device.type == "cuda")
    logger.info("the learner's attention is computed by %s", attention)
    report_reproducibility(
        config, data.fingerprint, context, rollouts.sync_state, engines=rollouts.engines, attention=attention
    )
    parts = LearnerParts(
        policy=policy.model,
        estep=_estep(config, context, answering),
        planner=_row_planner(config, context.interrupt),
        evaluation=answering.evaluation,
        options=config.rollout_matching,
        context=context,
        checkpoints=context.checkpoints(config),
        rates=part_rates(config),
        further=partial(further_figures, _supervised_steps(config)),
        processor=policy.encoder.processor,
    )
    align_special_tokens(policy.model, parts.processor)
    learner = assemble_learner(parts, answering.args, data.train, data.held_out)
    answering.state.attach(learner.engine.optimizer, learner.engine.wrapped)
    return learner


def _answering(config: RunConfig, data: RunRecords, context: RunContext, stack: ExitStack) -> Answering:
    """Load the policy, and wait for the servers."""
    trusted, matching = config.model.allow_remote_code, config.rollout_matching
    processor = load_processor(config.model.model, trusted, **config.template.pixel_limits())
    vocab = coord_vocab(processor.tokenizer, config.model.model)
    prompts = Prompts(config.custom.user_prompt, config.template.system)
    # Before the arguments: once transformers knows of ZeRO-3, it partitions a model while it loads it, and the
    # processes have not met yet.
    encoder, model = Encoder(processor), load_policy(config)
    args = arguments.training_arguments(config, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    policy = Policy(model, encoder, args.device, _probe(encoder, prompts, data.train))
    state = make_training_state(config, args.device)
    cache = PromptCache(encoder, int(matching.image_cache_gib * GIB))
    matcher = Matcher(vocab, MatchOptions.from_config(matching), encoder.vision_ids)
    bad = BadSamples(config.training.max_bad_samples, context.log)
    tools = SampleTools(encoder, cache, prompts, matcher, bad)
    rollouts = _rollouts(config, policy, cache, state, context, stack)
    evaluation = Evaluation(
        tools=tools,
        rollouts=rollouts,
        batch_size=config.training.per_device_eval_batch_size,
        on_matched=log_held_out_rollouts(context.log, context.rollout_log, answer_tables(config)),
    )
    return Answering(policy, args, tools, rollouts, evaluation, state)


def _probe(encoder: Encoder, prompts: Prompts, records: Sequence[Record]) -> Probe:
    """Return the prompt of the first record whose images can be read, with its ground truth as the answer.

    A long ground truth is cut to its first objects.

    Raises:
        ConfigError: no record has such images.
    """
    record = next((one for one in records if record_fault(one) is None), None)
    if record is None:
        rule, way_out = "no record has images that can all be read", "put them where the records say, or repair them"
        raise refused("custom.train_jsonl", f"{len(records)} records", rule, way_out)
    objects = record.objects
    while len(encoder.tokenizer.encode(serialize_objects(objects))) > PROBE_ANSWER_TOKENS and objects:
        objects = objects[: len(objects) // 2]
    return sample_probe(encoder, prompts.chat(record), serialize_objects(objects))


def _rollouts(
    config: RunConfig, policy: Policy, cache: PromptCache, state: TrainingState, context: RunContext, stack: ExitStack
) -> RolloutSource:
    """Return the source of rollouts: this process, or servers, which are waited for."""
    if not config.makes_rollouts:
        return NoRollouts(config.training.seed)
    if not config.rollout_matching.uses_servers:
        return local_rollouts(config, policy, cache, context, state)
    if _divides_rows(config) or shards_weights(config):  # ZeRO-3 parts with the weights of a single process, too
        whole = state.whole if shards_weights(config) else None
        connect = partial(server_rollouts, config, policy, context, stack, whole or HERE)
        return FirstProcessRollouts(connect, context.interrupt, whole=whole)
    return server_rollouts(config, policy, context, stack)


def _estep(config: RunConfig, context: RunContext, answering: Answering) -> EStep:
    policy, tools = answering.policy, answering.tools
    truth = _truth(config, policy, tools)
    if config.is_supervised:
        return EStep(policy.model, truth, shared=_divides_rows(config))
    rule = _overlong_rule(config, config.rollout_matching.overlong)
    teaching = Teaching(
        answering.rollouts,
        Supervisor(tools, policy.model, overlong=rule),
        log_training_rollouts(context.rollout_log),
    )
    # Several processes must all look for a request to stop at once: they do so between passes.
    check = context.interrupt.check if world_size() == 1 else lambda: None
    return EStep(
        policy.model,
        teaching,
        check=check,
        truth=truth,
        truth_steps=_supervised_steps(config),
        shared=_divides_rows(config),
    )


def _divides_rows(config: RunConfig) -> bool:
    return config.shares_rows and world_size() > 1


def _supervised_steps(config: RunConfig) -> GroundTruthSteps | None:
    share = config.rollout_matching.supervised_share
    return GroundTruthSteps(share, config.training.seed) if share > 0 else None


def _truth(config: RunConfig, policy: Policy, tools: SampleTools) -> Teaching:
    """Return how stage 1 teaches. A ground truth is never cut: a part of it would teach to stop early."""
    overlong = config.rollout_matching.overlong
    supervisor = TruthSupervisor(
        tools,
        policy.model,
        overlong=_overlong_rule(config, "skip" if overlong == "cut" else overlong),
        coord_loss=config.custom.coord_soft_ce_w1.enabled,
        shuffled_by=config.training.seed if config.custom.object_ordering == "shuffled" else None,
    )
    return Teaching(NoRollouts(config.training.seed), supervisor)


def _overlong_rule(config: RunConfig, what: Overlong | None) -> OverlongRule | None:
    return OverlongRule(config.packing_length, what) if config.training.packing else None


def _row_planner(config: RunConfig, interrupt: Interrupt) -> RowPlanner:
    planner = _own_row_planner(config, window=config.gradient_accumulation_steps(world_size()))
    if not _divides_rows(config):
        return planner
    processes = world_size()
    logger.info(
        "training starts after a step's last answer, because its rows are divided among %d processes", processes
    )
    return SharedRowPlanner(planner, ProcessExchange(interrupt))


def _own_row_planner(config: RunConfig, *, window: int) -> RowPlanner:
    training = config.training
    if not training.packing:
        return SingleRowPlanner()
    length, scope = config.packing_length, config.rollout_matching.post_rollout_pack_scope
    if scope == "step":
        return StepRowPlanner(length)
    packed = PackedRowPlanner(length, capacity=training.packing_buffer, min_fill=training.packing_min_fill_ratio)
    if scope == "window":
        return WindowRowPlanner(length, window=window, partial=packed)
    return packed


def write_checkpoint_rollouts(
    config: RunConfig,
    records: RunRecords,
    checkpoints: Sequence[Path],
    output: Path,
    *,
    longer: Sequence[float] = (0.0,),
) -> list[int]:
    """Answer the held-out records with each checkpoint's weights; return how many samples of each were set aside.

    output: file of the rollouts; those of set n have step n, from 0. Nothing else is written outside
    `training.output_dir`. longer: biases against closing the list, in nats; each checkpoint answers under each.

    Raises:
        ConfigError: a checkpoint does not fit the configuration, or there can be no such bias.
        ServerError: servers were lost, and did not come back.
    """
    interrupt, lines = Interrupt(), JsonLines(output)
    with ExitStack() as stack:
        stack.callback(lines.close)
        stack.enter_context(tensors_alone(deepspeed=config.uses_deepspeed))
        token = read_token(os.environ) if config.rollout_matching.uses_servers else ""
        context = RunContext(token, Reporter(), interrupt, SilentLog(), lines)
        answering = _answering(config, records, context, stack)
        answering.policy.model.to(answering.policy.device)
        evaluation = answering.evaluation
        biases = [closing_bias(evaluation.tools.encoder.encode, nats) for nats in longer]
        sets = [(checkpoint, replace(evaluation, bias=bias)) for checkpoint in checkpoints for bias in biases]
        return [_answer(answering.policy.model, *one, records, version=number) for number, one in enumerate(sets)]


def _answer(model: Any, checkpoint: Path, evaluation: Evaluation, records: RunRecords, *, version: int) -> int:
    _load(model, checkpoint)
    with ACTIVITY.doing(f"answering with {checkpoint}"):
        figures = evaluation(records.held_out, model.eval(), global_step=version)
    logger.info("answered %d records with %s in %.0f s", len(records.held_out), checkpoint, figures["runtime"])
    return int(figures["bad_samples"] or 0)


def _load(model: Any, checkpoint: Path) -> None:
    refuse_code(checkpoint, path="--checkpoint", deepspeed=False)
    try:
        load_weights(model, checkpoint)
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        rule = f"must hold weights of the configured model and tuner ({str(error).splitlines()[0][:200]})"
        way_out = "give the configuration that it was trained with"
        raise refused("--checkpoint", str(checkpoint), rule, way_out) from error
