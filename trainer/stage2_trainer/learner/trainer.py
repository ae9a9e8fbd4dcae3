"""The trainer: each micro-step makes fresh rollouts, matches them, packs what is to be learnt, and trains on it.

A `transformers.Trainer` whose batches are lists of records. What turns them into tensors (the E-step) runs just before
the forward pass, with the weights of the current optimizer step, or of an earlier one where rollouts are reused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler
from transformers import PrinterCallback, Trainer

from stage2_trainer.data.records import Record
from stage2_trainer.learner.dataloader import as_list, train_dataloader
from stage2_trainer.learner.estep import EStep
from stage2_trainer.learner.evaluate import Evaluation
from stage2_trainer.learner.forward_redirection import run_inside
from stage2_trainer.learner.loss import LossOptions, LossParts, LossTargets, stage2_loss_from_hidden
from stage2_trainer.learner.microsteps import MicroSteps
from stage2_trainer.learner.padding_free_batch import supervised_batches
from stage2_trainer.learner.repeated_windows import uses_left
from stage2_trainer.learner.row_planner import RowPlanner
from stage2_trainer.learner.step_record import StepRecord
from stage2_trainer.learner.waiting_segments import load_waiting, save_waiting
from stage2_trainer.learner.window_lookahead import WindowLookahead
from stage2_trainer.matching import CoordVocab
from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.process.qwen3_vl import rope_model, split_learning_rates
from stage2_trainer.process.ranks import gathered, peak_bytes
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.run_log import EventLog

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainerComponents:
    """The components of a rollout-matching trainer.

    `part_rates` are learning rates of parts of the model (llm, vit, aligner) that have their own. `ahead`: all rollouts
    of an accumulation window are made before its first micro-step. `m_steps`: optimizer steps that train on the same
    rollouts. `pipelined`: the next window's rollouts are asked for before the current one trains.
    """

    estep: EStep
    evaluation: Evaluation
    vocab: CoordVocab
    loss: LossOptions
    rows: RowPlanner
    pad_token_id: int
    top_k: int
    part_rates: Mapping[str, float]
    interrupt: Interrupt
    reporter: Reporter
    log: EventLog
    ahead: bool = False
    m_steps: int = 1
    pipelined: bool = False


class RolloutMatchingTrainer(Trainer):
    """A trainer of `model` on lists of records; see the module's docstring."""

    def __init__(self, *, components: TrainerComponents, model: Any, **trainer_arguments: Any) -> None:
        super().__init__(model=model, data_collator=as_list, **trainer_arguments)
        self._policy = model
        self.remove_callback(PrinterCallback)  # the run's log says it, as JSON
        self.components = components
        self._record = StepRecord()
        self._micro_steps = MicroSteps(components.estep, components.rows, ahead=components.ahead)
        self._windows: WindowLookahead[Any] = WindowLookahead()
        self._laid_out: list[dict[str, Any]] = []
        self._batches_of_epoch = 0
        self._figures: dict[str, float] = {}
        self._coord_ids = torch.as_tensor(components.vocab.ids, device=self.args.device)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train to the end, and say how many samples were still waiting for a row then: they are not trained on."""
        if isinstance(resume_from_checkpoint, str) and (waiting := load_waiting(Path(resume_from_checkpoint))):
            self.components.rows.wait(waiting)
        done = super().train(resume_from_checkpoint, *args, **kwargs)
        if left := sum(gathered(len(self.components.rows.waiting))):
            logger.warning("%d samples were waiting for a packed row when the run ended: not trained on", left)
        return done

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
        if not self.components.pipelined:
            batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        else:
            read = super().get_batch_samples
            batches, following = self._windows.take(lambda: read(epoch_iterator, num_batches, device)[0])
            self._look_ahead(batches, following)
            count = None  # there are no labels before the E-step
        self._micro_steps.begin(batches, global_step=self.state.global_step, uses=self._uses())
        return batches, count

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """E-step, packing, then the ordinary training step on the tensors that came of them."""
        self.components.interrupt.check()
        if not self._laid_out:
            self._laid_out = self._next_batches()
        self.components.reporter.update(phase="training", max_steps=self.state.max_steps)
        loss: torch.Tensor = super().training_step(model, self._laid_out.pop(0), num_items_in_batch)
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Forward pass up to the hidden states, logits and loss only where something is supervised."""
        with self._record.stopwatch.measure("forward"):
            parts = run_inside(model, self._policy, self._loss_parts, inputs["model"], inputs["targets"])
        self._record.losses.append(parts.figures())
        return parts.total

    def _loss_parts(self, inputs: Mapping[str, Any], targets: LossTargets) -> LossParts:
        hidden = self._hidden_states(inputs).flatten(0, 1)[targets.logit_positions]
        head = self._policy.get_output_embeddings()
        return stage2_loss_from_hidden(
            hidden.to(head.weight.dtype), head.weight, targets, self._coord_ids, self.components.loss, bias=head.bias
        )

    def _hidden_states(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Return the last hidden states (B, T, H), under the mixed precision that the whole model would run in."""
        with self.accelerator.autocast():
            hidden: torch.Tensor = rope_model(self._policy)(**inputs).last_hidden_state
        return hidden

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate by rollouts; see `Evaluation`."""
        records: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        found = self.components.evaluation(records, self._policy, global_step=self.state.global_step)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        self.components.log.write("evaluation", {"step": self.state.global_step, **metrics})
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: operations are not counted, for a batch of records has no tokens yet."""
        return 0

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        step = self.state.global_step
        save_waiting(Path(self._get_output_dir(trial)) / f"checkpoint-{step}", self._micro_steps.waiting(step))

    def save_progress(self) -> None:
        """Write a checkpoint of the last whole optimizer step, if there is one that is not on disk yet."""
        if self.state.global_step > 0:
            self._save_checkpoint(self._policy, trial=None)

    def _look_ahead(self, batches: Sequence[Sequence[Record]], following: Sequence[Sequence[Record]]) -> None:
        """Let the rollouts of the window after this one be made; of none after the last step."""
        step = self.state.global_step
        self.components.estep.look_ahead(
            batches,
            following if step + 1 < self.state.max_steps else [],
            self._policy,
            global_step=step,
            stopwatch=self._record.stopwatch,
        )

    def _next_batches(self) -> list[dict[str, Any]]:
        """Return the tensors of the next micro-step, or of the whole window where the loss is a mean over it."""
        window = self._micro_steps.window
        assert window is not None, "get_batch_samples begins one"
        count = len(window.batches) if self.components.loss.normalizer == "window" else 1
        micro_steps = [self._micro_steps.take(self._policy, self._record.stopwatch) for _ in range(count)]
        self._record.note(micro_steps, window, reuses=self.components.m_steps > 1)
        with self._record.stopwatch.measure("mask_build"):
            return supervised_batches(
                [one.rows for one in micro_steps],
                self.components.vocab,
                pad_token_id=self.components.pad_token_id,
                normalizer=self.components.loss.normalizer,
                device=self.args.device,
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
        if self._record.losses:
            self._finish_step(grad_norm, kwargs["learning_rate"])
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _finish_step(self, grad_norm: torch.Tensor | float | None, learning_rate: float) -> None:
        figures = StepRecord.joined(gathered(self._record)).figures(top_k=self.components.top_k)
        if grad_norm is not None:
            figures["grad_norm"] = float(grad_norm)
        figures["learning_rate"] = learning_rate
        figures["memory/peak_bytes"] = float(max(gathered(peak_bytes(self.args.device))))
        step = self.state.global_step
        self.components.log.write("step", {"step": step, **figures})
        tokens_per_second = figures.get("rollout/gen_tokens_per_s")
        self.components.reporter.update(step=step, loss=figures["loss"], tokens_per_second=tokens_per_second)
        self._figures, self._record = figures, StepRecord()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Report to trackers; a training report carries the figures of the last step too."""
        if "loss" in logs:
            logs = {**self._figures, **logs}
        super().log(logs, start_time)
