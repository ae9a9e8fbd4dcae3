"""A learner, put together from what it trains and what teaches it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from stage2_api.rollout_matching import RolloutMatching
from stage2_trainer.data.records import Record
from stage2_trainer.learner.best import Best
from stage2_trainer.learner.engine import AccelerateEngine
from stage2_trainer.learner.estep import EStep, GroundTruthSteps
from stage2_trainer.learner.evaluate import Evaluation
from stage2_trainer.learner.loop import Learner
from stage2_trainer.learner.passes import RowPasses
from stage2_trainer.learner.rows import RowPlanner, SharedRowPlanner
from stage2_trainer.learner.runaway import RunawayWatch
from stage2_trainer.learner.schedule import Schedule
from stage2_trainer.learner.step import CurrentStep
from stage2_trainer.learner.step_log import History, StepLog
from stage2_trainer.model.finite import FiniteGuard
from stage2_trainer.model.run_checkpoints import Checkpoints
from stage2_trainer.process.ranks import rank, world_size
from stage2_trainer.telemetry.run_context import RunContext
from stage2_trainer.telemetry.trackers import Trackers


@dataclass(frozen=True)
class LearnerParts:
    """What a run trains, how it teaches, and where its records go.

    rates: learning rates of the model's parts that have their own. further: further figures of a step; all processes
    call it. processor: saved beside the weights.
    """

    policy: Any
    estep: EStep
    planner: RowPlanner
    evaluation: Evaluation
    options: RolloutMatching
    context: RunContext
    checkpoints: Checkpoints
    rates: Mapping[str, float] = field(default_factory=dict)
    further: Callable[[int], Mapping[str, float | None]] = lambda step: {}
    processor: Any = None


def assemble_learner(
    parts: LearnerParts, args: TrainingArguments, records: Sequence[Record], held_out: Sequence[Record]
) -> Learner:
    """Return the learner of these parts; its optimizer is made here.

    Raises:
        ConfigError: the records cannot be divided evenly among the learner processes.
    """
    context, options, tools = parts.context, parts.options, parts.evaluation.tools
    log, reporter, vocab = context.log, context.reporter, tools.matcher.vocab
    shared = isinstance(parts.planner, SharedRowPlanner)
    m_steps = options.rollout_buffer.m_steps if options.rollout_buffer.enabled else 1
    schedule = Schedule(
        records,
        args,
        readers=1 if shared else world_size(),
        reader=0 if shared else rank(),
        m_steps=m_steps,
        pipelined=options.pipeline.enabled,
    )
    engine = AccelerateEngine(
        parts.policy,
        args,
        loss=options,
        vocab=vocab,
        max_steps=schedule.max_steps,
        rates=parts.rates,
        interrupt=context.interrupt,
    )
    finite = FiniteGuard(parts.policy, args.device, scaled=bool(args.fp16))
    passes = RowPasses(
        engine=engine,
        planner=parts.planner,
        cache=tools.cache,
        bad=tools.bad,
        vocab=vocab,
        pad_token_id=tools.encoder.tokenizer.pad_token_id or 0,
        placeholder=parts.estep.placeholder,
        finite=finite,
        interrupt=context.interrupt,
        reporter=reporter,
        seed=args.seed,
    )
    trackers = Trackers(
        args,
        model=parts.policy,
        processing_class=parts.processor,
        optimizer=engine.optimizer,
        lr_scheduler=engine.schedule,
    )
    top_k = tools.matcher.options.candidate_top_k
    return Learner(
        engine=engine,
        schedule=schedule,
        step=CurrentStep(parts.estep, parts.planner),
        passes=passes,
        mean="step" if parts.planner.whole_step else options.loss_normalizer,
        log=StepLog(log, reporter, tools.bad, args.device, top_k=top_k, reuses=m_steps > 1, further=parts.further),
        history=History(log, reporter, trackers, args.device),
        finite=finite,
        runaway=RunawayWatch(options.runaway),
        evaluation=parts.evaluation,
        held_out=held_out,
        best=Best(args, log, reporter),
        checkpoints=parts.checkpoints,
        interrupt=context.interrupt,
        processor=parts.processor,
    )


def further_figures(truth_steps: GroundTruthSteps | None, step: int) -> dict[str, float | None]:
    """Return the figures of a step beyond those of its samples. truth_steps: those that train on the ground truth."""
    return {} if truth_steps is None else {"supervised/steps_total": float(truth_steps.before(step))}
