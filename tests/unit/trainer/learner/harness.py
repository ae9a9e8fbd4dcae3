"""A trainer in one process: its rollouts are written down beforehand, its weights go nowhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainingArguments

from stage2_trainer.data.encode import Encoder, PromptCache
from stage2_trainer.data.images import ImageError, read_header
from stage2_trainer.data.messages import Prompts, record_fault
from stage2_trainer.data.records import Record
from stage2_trainer.learner.estep import EStep
from stage2_trainer.learner.evaluate import Evaluation
from stage2_trainer.learner.loss import LossOptions
from stage2_trainer.learner.matcher import Matched, Matcher
from stage2_trainer.learner.mixed_step import MixedEStep
from stage2_trainer.learner.overlong import OverlongRule
from stage2_trainer.learner.padding_free_batch import Segment
from stage2_trainer.learner.row_planner import RowPlanner, SingleRowPlanner, StepRowPlanner
from stage2_trainer.learner.sample_tools import SampleTools
from stage2_trainer.learner.supervised_step import NoRollouts, SupervisedEStep
from stage2_trainer.learner.trainer import RolloutMatchingTrainer, TrainerComponents
from stage2_trainer.matching import CoordVocab, GTObject, MatchOptions, ground_truth, serialize_objects
from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.rollouts.bad_samples import BadSamples
from stage2_trainer.rollouts.pipeline import PipelinedRollouts
from stage2_trainer.rollouts.rollout_source import readable
from stage2_trainer.rollouts.synced_rollouts import SyncedRollouts
from stage2_trainer.sync.fleet.push import WeightSync
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.run_log import RunLog, SilentLog
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.requests import FurtherAnswers, OnRollout, Outcome, Refused, Rollout, RolloutRequest, SeedPlan

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
    """Answers each request as the script answers its record; `further` are those of further answers."""

    encoder: Encoder
    records: Sequence[Record]
    answer: Answer
    plans: list[SeedPlan] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    base_urls: tuple[str, ...] = ("scripted",)
    further: Sequence[Answer] = ()
    asked_further: list[int] = field(default_factory=list)

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        seed_plan: SeedPlan,
        version: int | None = None,
        on_rollout: OnRollout | None = None,
    ) -> list[Outcome]:
        self.plans.append(seed_plan)
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
        prompt = self.encoder.prompt(messages).input_ids.tolist()
        count = 0 if request.further is None else request.further.count
        self.asked_further.append(count)
        further = tuple(tuple(self._ids(one(asked))) for one in self.further[:count])
        return Rollout(prompt, self._ids(text), text, "scripted", version, "stop", further=further)

    def _ids(self, text: str) -> list[int]:
        return self.encoder.tokenizer.encode(text, add_special_tokens=False) + self.encoder.end_of_turn_ids[:1]


CARRIED: dict[str, Any] = {"merge": "learner", "merge_reason": "it was told to", "transport": "tcp"}


@dataclass
class RecordingSync:
    """A sync that only remembers which versions were pushed."""

    versions: list[int] = field(default_factory=list)
    planned: SyncReport = field(default_factory=lambda: SyncReport(**CARRIED))

    def sync(self, model: nn.Module, *, version: int) -> SyncReport:
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
    """A trainer and what it was given."""

    trainer: RolloutMatchingTrainer
    backend: ScriptedBackend
    sync: RecordingSync
    reporter: Reporter
    interrupt: Interrupt


def fresh_rollouts(backend: Any, sync: RecordingSync, reporter: Reporter, wait: Callable[[], None]) -> SyncedRollouts:
    weights = WeightSync("full", full=sync, planned=sync.planned)
    return SyncedRollouts(backend, weights, seed=17, wait=wait, reporter=reporter)


def two_boxes(paths: Sequence[str]) -> list[Record]:
    """Return a record of two boxes for each image."""
    objects = {"object_1": box("red box", 100, 100, 400, 400), "object_2": box("blue box", 500, 500, 900, 800)}
    return [record(path, i, **objects) for i, path in enumerate(paths)]


def build_e_step(
    encoder: Encoder,
    backend: Any,
    on_matched: Callable[[int, Sequence[Matched]], None],
    *,
    asked_further: FurtherAnswers | None = None,
    **options: Any,
) -> EStep:
    """Return an E-step whose rollouts are this backend's; `options` are those of matching."""
    matcher = Matcher(CoordVocab.from_tokenizer(encoder.tokenizer), MatchOptions(**options), encoder.vision_ids)
    return EStep(
        tools=SampleTools(encoder, PromptCache(encoder, 2**30), PROMPTS, matcher, BadSamples(0, SilentLog())),
        rollouts=fresh_rollouts(backend, RecordingSync(), Reporter(), lambda: None),
        on_matched=on_matched,
        further=asked_further,
    )


def segments_of(
    e_step: EStep, batches: Sequence[Sequence[Record]], model: nn.Module, *, global_step: int
) -> list[Segment]:
    """Return the segments of a step, which is then finished."""
    begun = e_step.begin(batches, model, global_step=global_step, stopwatch=Stopwatch())
    segments = [begun.get(i, Stopwatch(), lambda: None) for i in range(len(begun))]
    e_step.finish(begun)
    return segments


def trained_ids(segment: Segment) -> list[int]:
    """Return the answer that is taught."""
    encoding = segment.placed.encoding
    return encoding.input_ids[encoding.prompt_len : encoding.prompt_len + encoding.answer_len].tolist()


def _e_step(
    rollouts: Any, supervised: Mapping[str, Any] | None, further: FurtherAnswers | None
) -> Callable[..., EStep]:
    if supervised is None:
        return partial(EStep, rollouts=rollouts, further=further)
    if "steps" in supervised:
        return lambda **shared: MixedEStep(
            supervised=SupervisedEStep(rollouts=NoRollouts(17), **shared), rollouts=rollouts, **supervised, **shared
        )
    return partial(SupervisedEStep, rollouts=NoRollouts(17), **supervised)


def build(
    folder: Path, model: Any, encoder: Encoder, records: Sequence[Record], *, answer: Answer = perfect,
    rows: RowPlanner | StepRowPlanner | None = None, loss: LossOptions | None = None, ahead: bool = False,
    m_steps: int = 1, pipelined: bool = False, overlong: OverlongRule | None = None, most_bad: int = 100,
    backend: Any = None, supervised: Mapping[str, Any] | None = None, further: FurtherAnswers | None = None,
    **arguments: Any,
) -> Harness:  # fmt: skip
    """Return a trainer of `model` on the records: one optimizer step of all of them unless `arguments` differ."""
    backend = backend or ScriptedBackend(encoder, records, answer)
    sync, reporter, interrupt = RecordingSync(), Reporter(), Interrupt()
    fresh = fresh_rollouts(backend, sync, reporter, lambda: None)
    rollouts = PipelinedRollouts(fresh) if pipelined else fresh
    matcher = Matcher(CoordVocab.from_tokenizer(encoder.tokenizer), MatchOptions(), encoder.vision_ids)
    cache = PromptCache(encoder, 2**30)
    log = RunLog(folder)
    bad = BadSamples(most_bad, log)
    tools = SampleTools(encoder, cache, PROMPTS, matcher, bad)
    shared: dict[str, Any] = {"tools": tools, "on_matched": lambda step, matched: None}
    step = _e_step(rollouts, supervised, further)
    components = TrainerComponents(
        estep=step(overlong=overlong, **shared),
        evaluation=Evaluation(batch_size=2, rollouts=fresh, **shared),
        cache=cache,
        bad=bad,
        vocab=matcher.vocab,
        loss=loss or LossOptions(),
        rows=rows or SingleRowPlanner(),
        pad_token_id=0,
        top_k=10,
        part_rates={},
        interrupt=interrupt,
        reporter=reporter,
        log=log,
        ahead=ahead,
        m_steps=m_steps,
        pipelined=pipelined,
    )
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
    trainer = RolloutMatchingTrainer(
        components=components,
        model=model,
        args=TrainingArguments(output_dir=str(folder), **options),
        train_dataset=list(records),
        eval_dataset=list(records),
    )
    trainer.records = (log,)
    return Harness(trainer, backend, sync, reporter, interrupt)
