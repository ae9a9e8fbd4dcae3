"""A learner in one process: its rollouts are written down beforehand, its weights go nowhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainingArguments

from stage2_api.rollout_matching import Pipeline, RolloutBuffer, RolloutMatching, Runaway
from stage2_trainer.data.encode import Encoder, PromptCache
from stage2_trainer.data.images import ImageError, read_header
from stage2_trainer.data.messages import Prompts, record_fault
from stage2_trainer.data.records import Record
from stage2_trainer.learner.assembly import LearnerParts, assemble_learner, further_figures
from stage2_trainer.learner.estep import EStep, Teaching
from stage2_trainer.learner.evaluate import Evaluation
from stage2_trainer.learner.loop import Learner
from stage2_trainer.learner.padding_free_batch import Segment
from stage2_trainer.learner.rows import RowPlanner, SharedRowPlanner, SingleRowPlanner
from stage2_trainer.learner.schedule import Window
from stage2_trainer.learner.supervise import Matched, Matcher, OverlongRule, SampleTools, Supervisor, TruthSupervisor
from stage2_trainer.matching import CoordVocab, GTObject, MatchOptions, ground_truth, serialize_objects
from stage2_trainer.model.run_checkpoints import Checkpoints
from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.rollouts.bad_samples import BadSamples
from stage2_trainer.rollouts.rollout_source import NoRollouts, ServerRollouts, readable
from stage2_trainer.sync.fleet.push import WeightSync
from stage2_trainer.sync.fleet.report import ProvedStep, SyncReport
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.run_context import RunContext
from stage2_trainer.telemetry.run_log import JsonLines, RunLog, SilentLog
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import OnRollout, Outcome, Refused, Rollout, RolloutRequest, SeedPlan

PROMPTS = Prompts("List the shapes.")
Answer = Callable[[Record], str]


def record(image: str, index: int = 0, **payload: Any) -> Record:
    """Return a record of one image, which may be missing or broken; `payload` is object_1=..., object_2=..."""
    try:
        width, height = read_header(image).size
    except ImageError:
        width, height = 96, 96
    return Record(index, f"record-{index}", (image,), width, height, ground_truth(payload).objects)


def box(desc: str, *bins: int) -> dict[str, Any]:
    return {"desc": desc, "bbox_2d": list(bins)}


def perfect(one: Record) -> str:
    """Answer with the ground truth."""
    return serialize_objects(one.ground_truth.objects)


def only_first(one: Record) -> str:
    """Answer with the first object and miss the others."""
    return serialize_objects(one.ground_truth.objects[:1])


def shifted(one: Record) -> str:
    """Answer with every object, 30 bins off."""
    found = [GTObject(o.desc, o.kind, tuple(k + 30 for k in o.bins)) for o in one.ground_truth.objects]
    return serialize_objects(found)


@dataclass
class ScriptedBackend:
    """Answers each request as the script answers its record."""

    encoder: Encoder
    records: Sequence[Record]
    answer: Answer
    plans: list[SeedPlan] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)
    base_urls: tuple[str, ...] = ("scripted",)

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        seed_plan: SeedPlan,
        version: int | None = None,
        on_rollout: OnRollout | None = None,
        expected: Sequence[int] = (),
    ) -> list[Outcome]:
        self.plans.append(seed_plan)
        self.expected += expected
        self.seeds += [seed_plan.seed(i) for i in range(len(requests))]
        rollouts = [self._outcome(readable(requests, i), version or 0) for i in range(len(requests))]
        for index in reversed(range(len(rollouts))):  # those that were asked for last are answered first
            if on_rollout is not None:
                on_rollout(index, rollouts[index])
        return rollouts

    def _outcome(self, asked: RolloutRequest | Refused, version: int) -> Outcome:
        return asked if isinstance(asked, Refused) else self._rollout(asked, version)

    def _rollout(self, request: RolloutRequest, version: int) -> Rollout:
        messages = [dict(message) for message in request.messages]
        there = [one for one in self.records if record_fault(one) is None]
        asked = next(one for one in there if PROMPTS.chat(one) == messages)
        text = self.answer(asked)
        ids = self.encoder.tokenizer.encode(text, add_special_tokens=False) + self.encoder.end_of_turn_ids[:1]
        return Rollout(self.encoder.prompt(messages).input_ids.tolist(), ids, text, "scripted", version, "stop")


CARRIED: dict[str, Any] = {"merge": "learner", "merge_reason": "as configured", "transport": "tcp"}


@dataclass
class RecordingPush:
    """A push that only remembers which versions were pushed."""

    versions: list[int] = field(default_factory=list)
    planned: SyncReport = field(default_factory=lambda: SyncReport(**CARRIED))

    def push(self, model: nn.Module, *, version: int) -> SyncReport:
        self.versions.append(version)
        return SyncReport.create(
            version,
            0.25,
            ["scripted"],
            bytes=10,
            wire_bytes=25_000_000,
            phase_seconds={"pack": 0.05, "send": 0.1, "load": 0.05},
            **CARRIED,
        )


@dataclass
class Harness:
    """A learner and what it was given."""

    learner: Learner
    backend: ScriptedBackend
    sync: RecordingPush
    reporter: Reporter
    interrupt: Interrupt
    matched: list[Matched]
    proved: ProvedStep

    def train(self) -> list[dict[str, Any]]:
        """Train to the end, and return the lines of the run's log."""
        self.learner.train()
        return self.lines()

    def lines(self, event: str | None = None) -> list[dict[str, Any]]:
        """Return the lines of the run's log, all of them or those of one event."""
        return read_log(Path(str(self.learner.engine.args.output_dir)), event)


def read_log(folder: Path, event: str | None = None) -> list[dict[str, Any]]:
    """Return the lines of a run's log, all of them or those of one event; none where there is no log."""
    log = folder / "stage2_log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [line for line in lines if event in (None, line["event"])]


def fresh_rollouts(
    backend: Any, sync: RecordingPush, reporter: Reporter, wait: Callable[[ServerError], None]
) -> ServerRollouts:
    weights = WeightSync("full", full=sync.push, planned=sync.planned)
    return ServerRollouts(backend, weights, seed=17, wait=wait, reporter=reporter)


def two_boxes(paths: Sequence[str]) -> list[Record]:
    """Return a record of two boxes for each image."""
    objects = {"object_1": box("red box", 100, 100, 400, 400), "object_2": box("blue box", 500, 500, 900, 800)}
    return [record(path, i, **objects) for i, path in enumerate(paths)]


def sample_tools(encoder: Encoder, bad: BadSamples | None = None, **options: Any) -> SampleTools:
    """Return the tools of a run; `options` are those of matching."""
    matcher = Matcher(CoordVocab.from_tokenizer(encoder.tokenizer), MatchOptions(**options), encoder.vision_ids)
    return SampleTools(encoder, PromptCache(encoder, 2**30), PROMPTS, matcher, bad or BadSamples(0, SilentLog()))


def build_e_step(
    encoder: Encoder,
    model: Any,
    backend: Any,
    on_matched: Callable[[int, Sequence[Matched]], None],
    *,
    check: Callable[[], None] = lambda: None,
    **options: Any,
) -> EStep:
    """Return an E-step whose rollouts are this backend's; `options` are those of matching."""
    rollouts = fresh_rollouts(backend, RecordingPush(), Reporter(), lambda error: None)
    supervisor = Supervisor(sample_tools(encoder, **options), model)
    return EStep(model, Teaching(rollouts, supervisor, on_matched), check=check)


def segments_of(e_step: EStep, batches: Sequence[Sequence[Record]], *, global_step: int) -> list[Segment]:
    """Return the segments of a step."""
    answers = e_step.sync_and_request(batches, global_step=global_step, stopwatch=Stopwatch())
    return [segment for micro_step in answers.micro_steps() for segment in micro_step]


def trained_ids(segment: Segment) -> list[int]:
    """Return the answer that is taught."""
    encoding = segment.placed.encoding
    return encoding.input_ids[encoding.prompt_len : encoding.prompt_len + encoding.answer_len].tolist()


def before_step(learner: Learner, number: int, do: Callable[[], object]) -> None:
    """Do something before the rows of a step train; the first is 0."""
    train_rows = learner._train_rows

    def call(window: Window) -> None:
        if window.step == number:
            do()
        train_rows(window)

    learner._train_rows = call  # type: ignore[method-assign]


def build(
    folder: Path, model: Any, encoder: Encoder, records: Sequence[Record], *, answer: Answer = perfect,
    rows: RowPlanner | None = None, loss: RolloutMatching | None = None, m_steps: int = 1, pipelined: bool = False,
    overlong: OverlongRule | None = None, most_bad: int = 100, backend: Any = None,
    supervised: Mapping[str, Any] | None = None, matching: Mapping[str, Any] | None = None,
    earlier_proof: int | None = None, rates: Mapping[str, float] | None = None, runaway: Runaway | None = None,
    processor: Any = None,
    **arguments: Any,
) -> Harness:  # fmt: skip
    """Return a learner of `model` on the records: one optimizer step of all of them unless `arguments` differ.

    supervised: the options of stage 1, or the `steps` that are its in a mixed run; None = stage 2. matching: options of
    matching.
    """
    backend = backend or ScriptedBackend(encoder, records, answer)
    sync, reporter, interrupt, log = RecordingPush(), Reporter(), Interrupt(), RunLog(folder)
    rollouts = fresh_rollouts(backend, sync, reporter, lambda error: None)
    bad, matched = BadSamples(most_bad, log), []
    tools = sample_tools(encoder, bad, **(matching or {}))
    stage1 = dict(supervised or {})
    steps = stage1.pop("steps", None)

    def on_matched(step: int, found: Sequence[Matched]) -> None:
        matched.extend(found)

    truth = Teaching(NoRollouts(17), TruthSupervisor(tools, model, overlong=overlong, **stage1), on_matched)
    fresh = Teaching(rollouts, Supervisor(tools, model, overlong=overlong), on_matched)
    only_truth = supervised is not None and steps is None
    shared = isinstance(rows, SharedRowPlanner)
    changes = {
        "rollout_buffer": RolloutBuffer(enabled=True, m_steps=m_steps),
        "pipeline": Pipeline(enabled=pipelined),
        "runaway": runaway or Runaway(enabled=False),
    }
    options = {
        "per_device_train_batch_size": len(records),
        "max_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "report_to": "none",
        "dataloader_pin_memory": False,
        "learning_rate": 1e-3,
        **arguments,
    }
    args = TrainingArguments(output_dir=str(folder), **options)
    context = RunContext("", reporter, interrupt, log, JsonLines(folder / "rollouts.jsonl"))
    proved = context.proved
    parts = LearnerParts(
        policy=model,
        estep=EStep(model, truth) if only_truth else EStep(model, fresh, truth=truth, truth_steps=steps, shared=shared),
        planner=rows or SingleRowPlanner(),
        evaluation=Evaluation(tools=tools, batch_size=2, rollouts=rollouts, on_matched=lambda step, found: None),
        options=(loss or RolloutMatching()).model_copy(update=changes),
        context=context,
        checkpoints=Checkpoints(
            folder, limit=args.save_total_limit, course={}, records=(log,), proved=proved, earlier_proof=earlier_proof
        ),
        rates=rates or {},
        further=partial(further_figures, steps),
        processor=processor,
    )
    learner = assemble_learner(parts, args, list(records), list(records))
    return Harness(learner, backend, sync, reporter, interrupt, matched, proved)
