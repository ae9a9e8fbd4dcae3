"""Putting a learner together: data, model, servers, and the trainer that holds them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from stage2_api.runconfig import RunConfig
from stage2_trainer.data.encode import Encoder
from stage2_trainer.data.run_records import RunRecords
from stage2_trainer.learner.estep import EStep, Matched, Matcher, ParseFailureLog, Prompts
from stage2_trainer.learner.evaluate import Evaluation
from stage2_trainer.learner.loss import LossOptions
from stage2_trainer.learner.rollout_documents import rollout_document, sample_document
from stage2_trainer.learner.row_planner import PackedRowPlanner, RowPlanner, SingleRowPlanner, WindowRowPlanner
from stage2_trainer.learner.trainer import RolloutMatchingTrainer, TrainerComponents
from stage2_trainer.matching import CoordVocab, MatchOptions
from stage2_trainer.process import training_arguments as arguments
from stage2_trainer.process.policy import load_policy
from stage2_trainer.process.qwen3_vl import ALIGNER, VIT, load_processor
from stage2_trainer.process.ranks import world_size
from stage2_trainer.process.supported import in_process
from stage2_trainer.rollouts.build_in_process import Policy, local_rollouts, make_training_state
from stage2_trainer.rollouts.build_servers import Learner, server_rollouts, training_rollouts
from stage2_trainer.rollouts.pipeline import PipelinedRollouts
from stage2_trainer.rollouts.rollout_source import RolloutSource
from stage2_trainer.telemetry.reproducibility import report_reproducibility
from stage2_trainer.telemetry.run_context import RunContext
from stage2_trainer.telemetry.run_log import EventLog, JsonLines
from stage2_trainer.weights.probe import sample_probe

logger = logging.getLogger(__name__)

EVALUATION_SAMPLES = 8  # rollouts of each evaluation in the run's log; enough for a picture


def build_trainer(config: RunConfig, data: RunRecords, context: RunContext, stack: ExitStack) -> RolloutMatchingTrainer:
    """Load the policy, wait for the servers, and put the trainer together; `stack` closes the connections."""
    processor = load_processor(config.model.model, **arguments.pixel_limits(config))
    encoder = Encoder(processor)
    model = load_policy(config)
    training_arguments = arguments.training_arguments(config, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    matcher = Matcher(
        CoordVocab.from_tokenizer(processor.tokenizer),
        MatchOptions.from_config(config.rollout_matching),
        encoder.vision_ids,
    )
    prompts = Prompts(config.custom.user_prompt, config.template.system)
    probe = sample_probe(encoder, prompts.chat(data.train[0]))
    policy = Policy(model, encoder, training_arguments.device)
    state = make_training_state(config, training_arguments.device)
    if in_process(config):
        rollouts: RolloutSource = local_rollouts(config, policy, probe, context.reporter, state)
    else:
        learner = Learner(model, processor, training_arguments.device, probe)
        synced = server_rollouts(config, learner, token=context.token, reporter=context.reporter, stack=stack)
        rollouts = training_rollouts(config, synced, stack)
    report_reproducibility(config, data.fingerprint, context, rollouts.sync_state)
    trainer = RolloutMatchingTrainer(
        components=_components(config, context, prompts, encoder, matcher, rollouts),
        model=model,
        args=training_arguments,
        train_dataset=data.train,
        eval_dataset=data.held_out or None,
        processing_class=processor,
    )
    state.attach(trainer)
    return trainer


def _components(
    config: RunConfig,
    context: RunContext,
    prompts: Prompts,
    encoder: Encoder,
    matcher: Matcher,
    rollouts: RolloutSource,
) -> TrainerComponents:
    matching, training = config.rollout_matching, config.training
    rates = {VIT: training.vit_lr, ALIGNER: training.aligner_lr}
    return TrainerComponents(
        estep=EStep(
            encoder=encoder,
            prompts=prompts,
            rollouts=rollouts,
            matcher=matcher,
            on_matched=_training_rollouts(config, context.rollout_log),
        ),
        evaluation=Evaluation(
            encoder=encoder,
            prompts=prompts,
            rollouts=rollouts.direct if isinstance(rollouts, PipelinedRollouts) else rollouts,
            matcher=matcher,
            batch_size=training.per_device_eval_batch_size,
            on_matched=_held_out_rollouts(context.log, context.rollout_log),
        ),
        vocab=matcher.vocab,
        loss=LossOptions.from_config(matching),
        rows=_rows(config, window=config.gradient_accumulation_steps(world_size())),
        pad_token_id=encoder.tokenizer.pad_token_id or 0,
        top_k=matching.candidate_top_k,
        part_rates={part: rate for part, rate in rates.items() if rate is not None},
        interrupt=context.interrupt,
        reporter=context.reporter,
        log=context.log,
        ahead="window" in (matching.post_rollout_pack_scope, matching.loss_normalizer),
        m_steps=matching.rollout_buffer.m_steps if matching.rollout_buffer.enabled else 1,
        pipelined=matching.pipeline.enabled,
    )


def _rows(config: RunConfig, *, window: int) -> RowPlanner:
    training, length = config.training, config.packing_length
    if not training.packing:
        return SingleRowPlanner()
    packed = PackedRowPlanner(length, capacity=training.packing_buffer, min_fill=training.packing_min_fill_ratio)
    if config.rollout_matching.post_rollout_pack_scope == "window":
        return WindowRowPlanner(length, window=window, partial=packed)
    return packed


def _training_rollouts(config: RunConfig, rollout_log: JsonLines) -> Callable[[int, Sequence[Matched]], None]:
    """Return what is done with the rollouts of a micro-step: each is written down, unparsable ones are shown."""
    matching = config.rollout_matching
    failures = ParseFailureLog(matching.debug_dump_max if matching.debug_dump_parse_failures else 0)

    def note(step: int, matched: Sequence[Matched]) -> None:
        failures(matched)
        for one in matched:
            rollout_log.write({"event": "rollout", "part": "train", "step": step, **rollout_document(one)})

    return note


def _held_out_rollouts(log: EventLog, rollout_log: JsonLines) -> Callable[[int, Sequence[Matched]], None]:
    """Return what is done with the rollouts of an evaluation: each is written down, the first few are shown."""

    def note(step: int, matched: Sequence[Matched]) -> None:
        for one in matched:
            rollout_log.write({"event": "rollout", "part": "held-out", "step": step, **rollout_document(one)})
        for one in matched[:EVALUATION_SAMPLES]:
            log.write("evaluation_sample", {"step": step, **sample_document(one)})

    return note
