"""The trainer: a `transformers.Trainer` whose batches are lists of records.

An optimizer step trains when its last raw batch comes, for rows do not follow batches: `step.train_step` is that story,
and `RowPasses` has the passes of a row. This class is the life of a run: dataloader, log, evaluation, checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler
from transformers.trainer_utils import SaveStrategy

from stage2_api.rollout_matching import RolloutMatching
from stage2_api.runconfig import BEST_METRIC
from stage2_trainer.activity import ACTIVITY, evaluation_name
from stage2_trainer.data.encode import PromptCache
from stage2_trainer.data.records import Record
from stage2_trainer.learner.estep import EStep, GroundTruthSteps
from stage2_trainer.learner.evaluate import Evaluation
from stage2_trainer.learner.loss import LossTargets, moved
from stage2_trainer.learner.passes import RowPasses
from stage2_trainer.learner.rows import RowPlanner, SharedRowPlanner, load_waiting, save_waiting
from stage2_trainer.learner.runaway import RunawayWatch
from stage2_trainer.learner.schedule import EvenBatchSampler, uses_left
from stage2_trainer.learner.step import CurrentStep, run_inside, train_step
from stage2_trainer.learner.step_log import StepLog
from stage2_trainer.learner.trained_row import TrainedRow
from stage2_trainer.matching import CoordVocab
from stage2_trainer.process.base_trainer import FiniteSteps
from stage2_trainer.process.best_checkpoint import ComparableBest, metric_key
from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.process.ranks import gathered, rank, world_size
from stage2_trainer.rollouts.bad_samples import BadSamples
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.run_log import EventLog
from stage2_trainer.telemetry.timeline import TIMELINE

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainerComponents:
    """The components of a rollout-matching trainer.

    m_steps: optimizer steps that train on the same rollouts. pipelined: the next step's rollouts are requested before
    the current one trains. supervised_steps: the steps of a mixed run that train on the ground truth. runaway: ends a
    run whose answers run away. descriptions: further figures of a step; all processes call it.
    """

    estep: EStep
    cache: PromptCache
    evaluation: Evaluation
    bad: BadSamples
    vocab: CoordVocab
    loss: RolloutMatching
    rows: RowPlanner
    pad_token_id: int
    top_k: int
    interrupt: Interrupt
    reporter: Reporter
    log: EventLog
    m_steps: int = 1
    pipelined: bool = False
    supervised_steps: GroundTruthSteps | None = None
    runaway: RunawayWatch | None = None
    descriptions: Callable[[int], Mapping[str, float | None]] = lambda step: {}


class RolloutMatchingTrainer(FiniteSteps):
    """A trainer of `model` on lists of records; see the module's docstring."""

    def __init__(self, *, components: TrainerComponents, model: Any, **trainer_arguments: Any) -> None:
        super().__init__(model=model, data_collator=as_list, **trainer_arguments)
        self._policy = model
        self.components = components
        self.step_log = StepLog(
            components.log,
            components.reporter,
            components.bad,
            self.args.device,
            top_k=components.top_k,
            reuses=components.m_steps > 1,
            further=self._further_figures,
        )
        self._step = CurrentStep(components.estep, components.rows)
        self._lookahead: list[Any] = []
        self._whole = components.rows.whole_step
        self._shared = isinstance(components.rows, SharedRowPlanner)
        self._batches_seen = 0
        self._batches_of_epoch = 0
        self.add_callback(ComparableBest())
        self._engine = TrainerEngine(self, model)
        self.passes = RowPasses(
            engine=self._engine,
            planner=components.rows,
            cache=components.cache,
            bad=components.bad,
            vocab=components.vocab,
            pad_token_id=components.pad_token_id,
            placeholder=components.estep.placeholder,
            finite=self.finite,
            interrupt=components.interrupt,
            reporter=components.reporter,
            seed=self.args.seed,
        )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train to the end; warn of samples that still wait for a row then: the run does not train on them."""
        if isinstance(resume_from_checkpoint, str):
            self._load_beside(Path(resume_from_checkpoint))
        done = super().train(resume_from_checkpoint, *args, **kwargs)
        if left := sum(gathered(len(self.components.rows.waiting))):
            logger.warning("%d samples were waiting for a packed row when the run ended: not trained on", left)
        return done

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the dataloader, each full accumulation window `m_steps` times in a row.

        Raises:
            ConfigError: the samples cannot be divided evenly among the learner processes.
        """
        records: Any = self.train_dataset
        readers = 1 if self._shared else world_size()
        batches = EvenBatchSampler(
            self._get_train_sampler(records) or SequentialSampler(records),
            self._train_batch_size,
            processes=readers,
            drop_last=self.args.dataloader_drop_last,
            window=self.args.gradient_accumulation_steps * readers,
            times=self.components.m_steps,
        )
        loader = DataLoader(
            records,
            batch_sampler=batches,
            collate_fn=as_list,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )
        settings = self.accelerator.dataloader_config
        prepared: DataLoader[Any] = prepare_data_loader(
            loader,
            num_processes=readers,
            process_index=rank() % readers,
            even_batches=False,  # they are even, and none may repeat a sample
            use_seedable_sampler=settings.use_seedable_sampler,
            data_seed=settings.data_seed,
        )
        self._batches_of_epoch = len(prepared)
        return prepared

    # One optimizer step.

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """Read the raw batches of the next optimizer step, and with a pipeline those of the step after it."""
        read, following = super().get_batch_samples, []
        with self.components.interrupt.stoppable():
            TIMELINE.begin()
            batches = self._lookahead or read(epoch_iterator, num_batches, device)[0]
            if self.components.pipelined:
                self._lookahead = following = read(epoch_iterator, num_batches, device)[0]
            if self.state.global_step + 1 >= self.state.max_steps:
                following = []
            self._step.set_batches(batches, following, global_step=self.state.global_step, uses=self._uses())
        return batches, None  # there are no labels to count before the E-step

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Train the whole optimizer step when its last raw batch comes; return its loss then, else 0."""
        self._batches_seen += 1
        if self._batches_seen < self._step.raw_batch_count:
            return torch.zeros((), device=self.args.device)
        self._batches_seen, self._engine.wrapper = 0, model
        divisor = self.passes.divisor_of(self._step.raw_batch_count)
        self.components.reporter.update(max_steps=self.state.max_steps)
        self.components.interrupt.check()
        record = self.step_log.record
        self.passes.begin(self.state.global_step, record, divisor=divisor)
        with self.components.interrupt.stoppable():
            groups, losses = train_step(
                self._step,
                self.passes,
                record.stopwatch,
                mean="step" if self._whole else self.components.loss.loss_normalizer,
                divisor=divisor,
            )
        return self.step_log.note_rows(self._step, groups, losses, divisor=divisor)

    def _prepare_input(self, data: torch.Tensor | Any) -> torch.Tensor | Any:
        return super()._prepare_input(moved(data, self.args.device) if isinstance(data, torch.Tensor) else data)

    def _uses(self) -> int:
        """Return the number of optimizer steps that train on the window that begins now."""
        accumulated = self.args.gradient_accumulation_steps
        steps_of_epoch = max(1, -(-self._batches_of_epoch // accumulated))
        before = self.state.global_step % steps_of_epoch * accumulated
        return uses_left(before, batches=self._batches_of_epoch, window=accumulated, times=self.components.m_steps)

    # What is logged, evaluated and saved.

    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: torch.Tensor | float | None, *args: Any, **kwargs: Any
    ) -> None:
        """Finish the step's record before anything is logged, saved or evaluated."""
        if self.step_log.record.version >= 0:  # where an epoch ends, there is no step
            self._finish_step(grad_norm, kwargs["learning_rate"])
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _finish_step(self, grad_norm: torch.Tensor | float | None, learning_rate: float) -> None:
        step = self.state.global_step
        norm = None if grad_norm is None else float(grad_norm)
        samples = self.step_log.finish(step, norm=norm, rate=learning_rate)
        if self.components.runaway is not None and self._step.reused is None:
            self.components.runaway.note(samples, step=step)

    def _further_figures(self, step: int) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        if self.components.supervised_steps is not None:
            found["supervised/steps_total"] = float(self.components.supervised_steps.before(step))
        return found | dict(self.components.descriptions(step))

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Report to trackers, which get no null; a training report has the figures of the last step too."""
        if "loss" in logs:
            logs = {**self.step_log.figures, **logs}
        super().log({name: value for name, value in logs.items() if value is not None}, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """Evaluate by rollouts; see `Evaluation`."""
        records: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        evaluating = ACTIVITY.doing(evaluation_name(self.state.global_step))
        with evaluating, TIMELINE.measure("evaluate"), self.components.interrupt.stoppable():
            found = self.components.evaluation(records, self._policy, global_step=self.state.global_step)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        self.components.log.write("evaluation", {"step": self.state.global_step, **metrics})
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _determine_best_metric(self, metrics: dict[str, Any], trial: Any) -> bool:
        """Compare an evaluation with the best before it; save a better one, and log it.

        Null is no score. An F1 of 0 is not better than none: else the first checkpoint would be the best until one
        answer is right.
        """
        key = metric_key(self.args)
        if key is not None and metrics.get(key, 0.0) is None:
            return False
        saves = self.args.save_strategy != SaveStrategy.BEST  # else nothing would be saved until then
        if saves and self.state.best_metric is None and key == BEST_METRIC:
            self.state.best_metric = 0.0
        found: bool = super()._determine_best_metric(metrics, trial)
        if (step := self.state.best_global_step) is None:  # nothing is ever saved
            return found
        score = self.state.best_metric
        if found:
            self.control.should_save = True
            best = {"step": step, "metric": self.args.metric_for_best_model, "score": score}
            self.components.log.write("best_checkpoint", best)
        self.components.reporter.update(best_step=step, best_score=score)
        return found

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: operations are not counted, for a batch of records has no tokens yet."""
        return 0

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with TIMELINE.measure("save"):
            super()._save_checkpoint(model, trial)

    def save_beside(self, checkpoint: Path) -> None:
        """Write the segments that wait for a packed row, and the samples that were set aside."""
        save_waiting(checkpoint, self._step.waiting(self.state.global_step))
        self.components.bad.save(checkpoint, before=self.state.global_step)

    def _load_beside(self, checkpoint: Path) -> None:
        self.components.bad.load(checkpoint)
        if waiting := load_waiting(checkpoint, all_in_first=self._shared):
            self.components.rows.wait(waiting)


class TrainerEngine:
    """The engine of a trainer: its policy as `Trainer` has wrapped it (`wrapper`)."""

    def __init__(self, trainer: RolloutMatchingTrainer, policy: nn.Module) -> None:
        components, self.device = trainer.components, trainer.args.device
        coord_ids = torch.as_tensor(components.vocab.ids, device=self.device)
        self._trained_row = TrainedRow(policy, coord_ids, components.loss, trainer.accelerator.autocast)
        self._trainer: Any = trainer
        self._policy = policy
        self.wrapper = policy

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that train."""
        return [one for one in self._policy.parameters() if one.requires_grad]

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients stay with the parameters, unscaled, until the optimizer steps."""
        alone = self._trainer.accelerator.distributed_type == DistributedType.NO
        return alone and not self._trainer.args.fp16

    @contextmanager
    def run_pass(self, *, last: bool) -> Iterator[None]:
        """Prepare a forward and a backward pass. last: gradients are reduced over processes."""
        self.wrapper.train()
        optimizer = self._trainer.optimizer
        if callable(set_mode := getattr(optimizer, "train", None)):  # schedule-free: not the averaged weights
            set_mode()
        if last:
            if self._trainer.steps_in_backward:
                self._trainer.components.interrupt.hold()
            yield
            return
        state = self._trainer.accelerator.gradient_state
        state._set_sync_gradients(False)
        try:
            local = (
                nullcontext() if self._trainer.steps_in_backward else self._trainer.accelerator.no_sync(self.wrapper)
            )
            with local:
                yield
        finally:
            state._set_sync_gradients(True)

    def row(self, inputs: Mapping[str, Any], targets: LossTargets, *, apart: bool = False) -> Any:
        """Run the forward pass of `TrainedRow` inside the wrapper."""
        prepared = self._trainer._prepare_inputs(dict(inputs))
        return run_inside(self.wrapper, self._policy, partial(self._trained_row, apart=apart), prepared, targets)

    def backward(self, loss: torch.Tensor) -> None:
        """Run a backward pass."""
        options = {"scale_wrt_gas": False} if self._trainer.steps_in_backward else {}  # it is divided already
        self._trainer.accelerator.backward(loss, **options)


def as_list(records: list[Record]) -> Any:
    """Return the batch unchanged."""
    return records
