"""The trainer: each micro-step makes fresh rollouts, matches them, packs what is to be learnt, and trains on it.

A `transformers.Trainer` whose batches are lists of records. What turns them into tensors (the E-step) runs just before
the forward pass, with the weights of the current optimizer step, or of an earlier one where rollouts are reused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler
from transformers import PrinterCallback

from stage2_trainer.data.encode import PromptCache
from stage2_trainer.learner.dataloader import as_list, train_dataloader, uses_left
from stage2_trainer.learner.early_gradients import EarlyGradients, early_gradients
from stage2_trainer.learner.estep import EStep
from stage2_trainer.learner.evaluate import Evaluation
from stage2_trainer.learner.forward_redirection import run_inside
from stage2_trainer.learner.loss import LOSS_FIGURES, LossOptions, LossParts, LossTargets, stage2_loss_from_hidden
from stage2_trainer.learner.loss_targets import moved
from stage2_trainer.learner.microsteps import MicroSteps
from stage2_trainer.learner.mixed_step import SupervisedSteps
from stage2_trainer.learner.padding_free_batch import Segment, hidden_states, supervised_batches
from stage2_trainer.learner.row_planner import Row, RowPlanner, StepRowPlanner
from stage2_trainer.learner.runaway import RunawayWatch
from stage2_trainer.learner.step_record import StepRecord
from stage2_trainer.learner.waiting_segments import load_waiting, save_waiting
from stage2_trainer.learner.whole_step import RowTraining, train_step
from stage2_trainer.learner.window_lookahead import WindowLookahead
from stage2_trainer.matching import CoordVocab
from stage2_trainer.process.base_trainer import FiniteSteps
from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.process.policy import output_table, rope_model, split_learning_rates
from stage2_trainer.process.ranks import gathered, memory_bytes, peak_bytes, rank, seeded_rng, world_size
from stage2_trainer.rollouts.bad_samples import BadSamples
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.run_log import EventLog
from stage2_trainer.telemetry.timeline import TIMELINE

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainerComponents:
    """The components of a rollout-matching trainer.

    `part_rates` are learning rates of parts of the model (llm, vit, aligner) that have their own. `ahead`: all rollouts
    of an accumulation window are made before its first micro-step. `m_steps`: optimizer steps that train on the same
    rollouts. `pipelined`: the next window's rollouts are asked for before the current one trains. `supervised_steps`:
    those that train on the ground truth, of a run that has some. `runaway`: what ends a run whose answers run away.
    `descriptions`: more figures of a step, which all processes ask for.
    """

    estep: EStep
    cache: PromptCache
    evaluation: Evaluation
    bad: BadSamples
    vocab: CoordVocab
    loss: LossOptions
    rows: RowPlanner | StepRowPlanner
    pad_token_id: int
    top_k: int
    part_rates: Mapping[str, float]
    interrupt: Interrupt
    reporter: Reporter
    log: EventLog
    ahead: bool = False
    m_steps: int = 1
    pipelined: bool = False
    supervised_steps: SupervisedSteps | None = None
    runaway: RunawayWatch | None = None
    descriptions: Callable[[int], Mapping[str, float]] = lambda step: {}


class RolloutMatchingTrainer(FiniteSteps):
    """A trainer of `model` on lists of records; see the module's docstring."""

    def __init__(self, *, components: TrainerComponents, model: Any, **trainer_arguments: Any) -> None:
        super().__init__(model=model, data_collator=as_list, **trainer_arguments)
        self._policy = model
        self.remove_callback(PrinterCallback)  # the run's log says it, as JSON
        self.components = components
        self._record = StepRecord()
        self._micro_steps = MicroSteps(
            components.estep, components.rows, ahead=components.ahead, check=self._check_while_waiting
        )
        self._windows: WindowLookahead[Any] = WindowLookahead()
        self._laid_out: list[dict[str, Any]] = []
        self._whole = isinstance(components.rows, StepRowPlanner)
        self._batches_seen = 0
        self._parts: LossParts | None = None
        self._batches_of_epoch = 0
        self._figures: dict[str, float] = {}
        self._trained = perf_counter()
        self._coord_ids = torch.as_tensor(components.vocab.ids, device=self.args.device)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train to the end, and say how many samples were still waiting for a row then: they are not trained on."""
        if isinstance(resume_from_checkpoint, str):
            self._load_beside(Path(resume_from_checkpoint))
        done = super().train(resume_from_checkpoint, *args, **kwargs)
        if left := sum(gathered(len(self.components.rows.waiting))):
            logger.warning("%d samples were waiting for a packed row when the run ended: not trained on", left)
        return done

    def _load_beside(self, checkpoint: Path) -> None:
        self.components.bad.load(checkpoint)
        if waiting := load_waiting(checkpoint):
            self.components.rows.wait(waiting)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer, with learning rates of their own for the parts that have one."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        split_learning_rates(optimizer, self._policy, self.components.part_rates)
        return optimizer

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the dataloader, each full accumulation window `m_steps` times in a row.

        Raises:
            ConfigError: the samples cannot be divided evenly among the learner processes.
        """
        records: Any = self.train_dataset
        sampler = self._get_train_sampler(records) or SequentialSampler(records)
        loader = train_dataloader(
            records, sampler, self.args, batch_size=self._train_batch_size, m_steps=self.components.m_steps
        )
        self.accelerator.dataloader_config.even_batches = False  # they are, and none is filled up with other samples
        prepared: DataLoader[Any] = self.accelerator.prepare(loader)
        self._batches_of_epoch = len(prepared)
        return prepared

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """Collect the raw batches of the next optimizer step, and begin it."""
        with self.components.interrupt.stoppable():
            return self._begun_window(epoch_iterator, num_batches, device)

    def _begun_window(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        following: list[Any] = []
        TIMELINE.begin()
        if not self.components.pipelined:
            batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        else:
            read = super().get_batch_samples
            batches, following = self._windows.take(lambda: read(epoch_iterator, num_batches, device)[0])
            count = None  # there are no labels before the E-step
        if self.state.global_step + 1 >= self.state.max_steps:
            following = []
        self._micro_steps.begin(batches, following, global_step=self.state.global_step, uses=self._uses())
        return batches, count

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """E-step, packing, then the ordinary training step on the tensors that came of them."""
        self.components.interrupt.check()
        with self.components.interrupt.stoppable():
            if self._whole:
                return self._train_whole_step(model)
            return self._train_micro_step(model, inputs, num_items_in_batch)

    def _train_micro_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None
    ) -> torch.Tensor:
        if not self._laid_out:
            self._laid_out = self._next_batches()
        self.components.reporter.update(phase="training", max_steps=self.state.max_steps)
        batch = self._laid_out.pop(0)
        with self._record.stopwatch.measure("backward"):  # and the forward pass within, which counts for itself
            loss: torch.Tensor = super().training_step(model, batch, num_items_in_batch)
            self.note_pass("micro-step", batch["samples"], loss)
        self._trained = perf_counter()
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Forward pass up to the hidden states, logits and loss only where something is supervised."""
        if self.steps_in_backward:
            self.components.interrupt.hold()
        with self._record.stopwatch.measure("forward"):
            parts = run_inside(model, self._policy, self._loss_parts, inputs["model"], inputs["targets"])
        if self._whole:
            self._parts = parts
        else:
            self._record.pending.append(parts.figures())
        return parts.total

    def _loss_parts(self, inputs: Mapping[str, Any], targets: LossTargets) -> LossParts:
        hidden = self._hidden_states(inputs).flatten(0, 1)[targets.logit_positions]
        table, bias = output_table(self._policy)
        return stage2_loss_from_hidden(
            hidden.to(table.dtype), table, targets, self._coord_ids, self.components.loss, bias=bias
        )

    def _loss_sums(self, inputs: Mapping[str, Any], targets: LossTargets) -> tuple[LossParts, LossParts]:
        """Return the losses of ordinary tokens and of coordinates, as sums, of one forward pass."""
        hidden = self._hidden_states(inputs).flatten(0, 1)
        table, bias = output_table(self._policy)

        def loss(part: LossTargets) -> LossParts:
            at = hidden[part.logit_positions].to(table.dtype)
            return stage2_loss_from_hidden(at, table, part, self._coord_ids, self.components.loss, bias=bias)

        ordinary, coords = targets.parts()
        return loss(ordinary), loss(coords)

    def _train_whole_step(self, model: nn.Module) -> torch.Tensor:
        """Train on all rows of the step when its last raw batch comes; rows do not follow batches."""
        window = self._micro_steps.window
        assert window is not None, "get_batch_samples begins one"
        self._batches_seen += 1
        if self._batches_seen < len(window.batches):
            return torch.zeros((), device=self.args.device)
        self._batches_seen = 0
        self.current_gradient_accumulation_steps = 1  # the loss is a mean over the step already
        self.components.reporter.update(phase="training", max_steps=self.state.max_steps)
        taken, figures = train_step(
            self._micro_steps.rows(self._policy, self._record.stopwatch),
            self._row_training(model),
            self.components.vocab,
            early=self._early,
            all_in=lambda: self._micro_steps.all_in,
        )
        self._record.note(taken, window, reuses=self.components.m_steps > 1)
        self._record.pending.append(figures)
        self._trained = perf_counter()
        return figures[LOSS_FIGURES.index("loss")]

    def _row_training(self, model: nn.Module) -> RowTraining:
        def train(batch: Mapping[str, Any]) -> LossParts:
            with self._record.stopwatch.measure("backward"):  # and the forward pass within, which counts for itself
                super(RolloutMatchingTrainer, self).training_step(model, dict(batch))
            assert self._parts is not None, "compute_loss noted them"
            note(batch, self._parts)
            return self._parts

        def note(batch: Mapping[str, Any], parts: LossParts) -> None:
            self.note_pass("row", batch["samples"], parts.total, self._early.coords if self._early else ())

        def sums(batch: Mapping[str, Any]) -> tuple[LossParts, LossParts]:
            model.train()
            inputs = self._prepare_inputs(dict(batch))
            with self._record.stopwatch.measure("forward"), self.compute_loss_context_manager():
                return run_inside(model, self._policy, self._loss_sums, inputs["model"], inputs["targets"])

        def lay_out(row: Sequence[Segment]) -> dict[str, Any]:
            return self._laid_out_rows([[row]])[0]

        def draws(place: int) -> AbstractContextManager[None]:
            return seeded_rng((self.args.seed, self.state.global_step, rank(), place), self.args.device)

        check = self.components.interrupt.check
        return RowTraining(lay_out, train, sums, note, lambda: self._apart(model), draws, check)

    @contextmanager
    def _apart(self, model: nn.Module) -> Iterator[None]:
        """Leave gradients in this process: the pass is not the last of its step."""
        state = self.accelerator.gradient_state
        state._set_sync_gradients(False)
        try:
            with nullcontext() if self.steps_in_backward else self.accelerator.no_sync(model=model):
                yield
        finally:
            state._set_sync_gradients(True)

    @cached_property
    def _early(self) -> EarlyGradients | None:
        """Return where gradients of rows go that train while answers are awaited; None where that cannot be.

        Several processes make their rollouts themselves, DeepSpeed takes gradients as they come, and float16 scales
        them.
        """
        alone = self.accelerator.distributed_type == DistributedType.NO
        if not alone or self.args.fp16:
            return None
        trained = [one for one in self._policy.parameters() if one.requires_grad]
        return early_gradients(trained, memory_bytes(self.args.device))

    def _hidden_states(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Return the last hidden states (B, T, H), under the mixed precision that the whole model would run in."""
        with self.accelerator.autocast():
            return hidden_states(rope_model(self._policy), inputs)

    def _prepare_input(self, data: torch.Tensor | Any) -> torch.Tensor | Any:
        return super()._prepare_input(moved(data, self.args.device) if isinstance(data, torch.Tensor) else data)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate by rollouts; see `Evaluation`."""
        records: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        with TIMELINE.measure("evaluate"), self.components.interrupt.stoppable():
            found = self.components.evaluation(records, self._policy, global_step=self.state.global_step)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        self.components.log.write("evaluation", {"step": self.state.global_step, **metrics})
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Compare an evaluation with the best before it; have a better one saved, and say so."""
        found: bool = super()._determine_best_metric(metrics, trial)
        if (step := self.state.best_global_step) is None:  # nothing is ever saved
            return found
        score = self.state.best_metric
        if found:
            self.control.should_save = True
            told = {"step": step, "metric": self.args.metric_for_best_model, "score": score}
            self.components.log.write("best_checkpoint", told)
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
        save_waiting(checkpoint, self._micro_steps.waiting(self.state.global_step))
        self.components.bad.save(checkpoint, before=self.state.global_step)

    def _next_batches(self) -> list[dict[str, Any]]:
        """Return the tensors of the next micro-step, or of the whole window where the loss is a mean over it."""
        window = self._micro_steps.window
        assert window is not None, "get_batch_samples begins one"
        count = len(window.batches) if self.components.loss.normalizer == "window" else 1
        with TIMELINE.measure("wait"):
            micro_steps = [self._micro_steps.take(self._policy, self._record.stopwatch) for _ in range(count)]
        self._record.note(micro_steps, window, reuses=self.components.m_steps > 1)
        return self._laid_out_rows([one.rows for one in micro_steps])

    def _check_while_waiting(self) -> None:
        """Stop a run that waits for answers; several processes, which must all look at once, look between steps."""
        if world_size() == 1:
            self.components.interrupt.check()

    def _laid_out_rows(self, micro_steps: Sequence[Sequence[Row]]) -> list[dict[str, Any]]:
        with self._record.stopwatch.measure("mask_build"):
            return supervised_batches(
                micro_steps,
                self.components.vocab,
                pad_token_id=self.components.pad_token_id,
                normalizer="micro" if self._whole else self.components.loss.normalizer,
                device=self.args.device,
                pixels=self.components.cache.pixels,
                stand_in=lambda lost, error: self.components.estep.set_aside_late(lost, error, self._policy),
            )

    def _uses(self) -> int:
        """Return for how many optimizer steps the window that begins now is trained on."""
        accumulated = self.args.gradient_accumulation_steps
        steps_of_epoch = max(1, -(-self._batches_of_epoch // accumulated))
        before = self.state.global_step % steps_of_epoch * accumulated
        return uses_left(before, batches=self._batches_of_epoch, window=accumulated, times=self.components.m_steps)

    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: torch.Tensor | float | None, *args: Any, **kwargs: Any
    ) -> None:
        """Finish the step's record before anything is logged, saved or evaluated."""
        if self._record.pending:
            TIMELINE.note("optimizer", self._trained)
            self._finish_step(grad_norm, kwargs["learning_rate"])
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _finish_step(self, grad_norm: torch.Tensor | float | None, learning_rate: float) -> None:
        step = self.state.global_step
        with TIMELINE.measure("log"):
            self._record.settle()
        self._record.time = TIMELINE.end(step)
        record = StepRecord.joined(gathered(self._record))
        figures = record.figures(top_k=self.components.top_k)
        if grad_norm is not None:
            figures["grad_norm"] = float(grad_norm)
        figures["learning_rate"] = learning_rate
        if self.components.supervised_steps is not None:
            figures["supervised/steps_total"] = float(self.components.supervised_steps.before(step))
        figures |= self.components.descriptions(step)
        figures["bad_samples_total"] = float(self.components.bad.total)
        figures["memory/peak_bytes"] = float(max(gathered(peak_bytes(self.args.device))))
        servers = [asdict(server) for server in record.time.servers]
        self.components.log.write("step", {"step": step, **figures, **record.words(), "servers": servers})
        tokens_per_second = figures.get("rollout/gen_tokens_per_s")
        self.components.reporter.update(step=step, loss=figures["loss"], tokens_per_second=tokens_per_second)
        self._figures, self._record = figures, StepRecord()
        if self.components.runaway is not None and not record.is_reused:
            self.components.runaway.note(record.samples, step=step)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Report to trackers; a training report carries the figures of the last step too."""
        if "loss" in logs:
            logs = {**self._figures, **logs}
        super().log(logs, start_time)
