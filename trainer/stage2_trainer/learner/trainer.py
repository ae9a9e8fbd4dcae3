"""The trainer: each micro-step makes fresh rollouts, matches them, packs what is to be learnt, and trains on it.

A `transformers.Trainer` whose batches are lists of records. What turns them into tensors (the E-step) runs just before
the forward pass, with the weights of the current optimizer step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PrinterCallback, Trainer

from stage2_trainer.data.records import Record
from stage2_trainer.learner.batch import collate, row_supervision
from stage2_trainer.learner.estep import EStep, Segment
from stage2_trainer.learner.evaluate import Evaluation
from stage2_trainer.learner.interrupt import Interrupt
from stage2_trainer.learner.loss import LossOptions, LossParts, LossTargets, loss_targets, stage2_loss_from_hidden
from stage2_trainer.learner.model import rope_model, split_learning_rates
from stage2_trainer.learner.progress import Reporter
from stage2_trainer.learner.records import RunLog
from stage2_trainer.learner.rows import Row, Rows
from stage2_trainer.learner.step import StepRecord
from stage2_trainer.matching import CoordVocab

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What a rollout-matching trainer is put together from.

    `part_rates` are learning rates of parts of the model (llm, vit, aligner) that have their own.
    """

    estep: EStep
    evaluation: Evaluation
    vocab: CoordVocab
    loss: LossOptions
    rows: Rows
    pad_token_id: int
    top_k: int
    part_rates: Mapping[str, float]
    interrupt: Interrupt
    reporter: Reporter
    log: RunLog


class RolloutMatchingTrainer(Trainer):
    """Trains `model` on lists of records; see the module's docstring."""

    def __init__(self, *, parts: Parts, model: Any, **trainer_arguments: Any) -> None:
        super().__init__(model=model, data_collator=_as_list, **trainer_arguments)
        self._policy = model
        self.remove_callback(PrinterCallback)  # the run's log says it, as JSON
        self.parts = parts
        self._record = StepRecord()
        self._micro_step = 0
        self._figures: dict[str, float] = {}
        self._coord_ids = torch.as_tensor(parts.vocab.ids, device=self.args.device)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer, with learning rates of their own for the parts that have one."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        split_learning_rates(optimizer, self._policy, self.parts.part_rates)
        return optimizer

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """E-step, packing, then the ordinary training step on the tensors that came of them."""
        self.parts.interrupt.check()
        rows = self._rows(self._fresh_segments(inputs))
        self.parts.reporter.update(phase="training", max_steps=self.state.max_steps)
        with self._record.stopwatch.measure("mask_build"):
            batch = self._batch(rows)
        loss: torch.Tensor = super().training_step(model, batch, num_items_in_batch)
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Forward pass up to the hidden states, logits and loss only where something is supervised."""
        targets: LossTargets = inputs["targets"]
        with self._record.stopwatch.measure("forward"):
            hidden = self._hidden_states(inputs["model"]).flatten(0, 1)[targets.logit_positions]
            head = self._policy.get_output_embeddings()
            parts = stage2_loss_from_hidden(
                hidden.to(head.weight.dtype), head.weight, targets, self._coord_ids, self.parts.loss, bias=head.bias
            )
        self._record.losses.append(_loss_figures(parts))
        return parts.total

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
        found = self.parts.evaluation(records, self._policy, global_step=self.state.global_step)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        self.parts.log.write("evaluation", {"step": self.state.global_step, **metrics})
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: operations are not counted, for a batch of records has no tokens yet."""
        return 0

    def save_progress(self) -> None:
        """Write a checkpoint of the last whole optimizer step, if there is one that is not on disk yet."""
        if self.state.global_step > 0:
            self._save_checkpoint(self._policy, trial=None)

    def _fresh_segments(self, records: Sequence[Record]) -> list[Segment]:
        segments, sync = self.parts.estep(
            records,
            self._policy,
            global_step=self.state.global_step,
            micro_step=self._micro_step,
            stopwatch=self._record.stopwatch,
        )
        self._micro_step += 1
        self._record.samples += [segment.stats for segment in segments]
        self._record.sync = sync or self._record.sync
        self._record.version = self.state.global_step
        return segments

    def _rows(self, segments: list[Segment]) -> list[Row]:
        with self._record.stopwatch.measure("post_rollout_pack"):
            rows, figures = self.parts.rows.choose(segments)
        self._record.rows.append(figures)
        return rows

    def _batch(self, rows: list[Row]) -> dict[str, Any]:
        laid_out = collate([[segment.placed for segment in row] for row in rows], self.parts.pad_token_id)
        metas = [[segment.meta for segment in row] for row in rows]
        targets = loss_targets(row_supervision(laid_out, metas, self.parts.vocab), self.args.device)
        return {"model": laid_out.model_inputs(), "targets": targets}

    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: torch.Tensor | float | None, *args: Any, **kwargs: Any
    ) -> None:
        """Finish the step's record before anything is logged, saved or evaluated."""
        if self._record.losses:
            self._finish_step(grad_norm, kwargs["learning_rate"])
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _finish_step(self, grad_norm: torch.Tensor | float | None, learning_rate: float) -> None:
        figures = self._record.figures(top_k=self.parts.top_k)
        if grad_norm is not None:
            figures["grad_norm"] = float(grad_norm)
        figures["learning_rate"] = learning_rate
        step = self.state.global_step
        self.parts.log.write("step", {"step": step, **figures})
        self.parts.reporter.update(step=step, loss=figures["loss"])
        self._figures, self._record, self._micro_step = figures, StepRecord(), 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Report to trackers; a training report carries the figures of the last step too."""
        if "loss" in logs:
            logs = {**self._figures, **logs}
        super().log(logs, start_time)


def _loss_figures(parts: LossParts) -> dict[str, float]:
    return {
        "loss": float(parts.total.detach()),
        "loss/ce": float(parts.ce),
        "loss/coord": float(parts.coord),
        "loss/coord_prefix": float(parts.coord_prefix),
        "loss/coord_tail": float(parts.coord_tail),
    }


def _as_list(records: list[Record]) -> Any:
    """Collate to what it was: records become tensors only after the E-step."""
    return records
