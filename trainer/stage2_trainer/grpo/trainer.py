"""The GRPO trainer: TRL's, with our rollouts and weight sync, other estimators, and CHORD.

TRL has the loop. In one optimizer step it calls these methods, in this order:

    get_batch_samples                    the step's micro-batches are read
    training_step                        for each: forward and backward pass, unless the run was asked to stop
        _generate_and_score_completions  only where a round of rollouts begins; a round may serve several steps
            _generate_single_turn        weights are pushed if they moved; servers answer   shared_rollouts
            _calculate_rewards           of each answer                                     loaded_rewards
        _compute_loss                    of GRPO; CHORD mixes in a supervised one           objective
    _get_grad_norm                       what is not finite ends the run                    checked_trainer
    _maybe_log_save_evaluate             the step's line; then, if due, an evaluation and a checkpoint

With DeepSpeed the last backward pass clips and steps too. TRL does the rest: groups, reuse of a round, old
log-probabilities where weights move within one, clipping, the divergence in the loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from stage2_api.grpo import Chord, Rlhf
from stage2_trainer.data.images import ImageError
from stage2_trainer.data.records import Record
from stage2_trainer.grpo.checked_trainer import CheckedTrainer
from stage2_trainer.grpo.held_out_rewards import REWARD, held_out_rewards
from stage2_trainer.grpo.loaded_rewards import Reward, RewardError
from stage2_trainer.grpo.objective import References, advantages, supervised_loss, supervised_share, with_divergence
from stage2_trainer.grpo.rewards import Sample
from stage2_trainer.grpo.shared_rollouts import SharedBatch, SharedRollouts
from stage2_trainer.grpo.task import Rows
from stage2_trainer.grpo.trl_compat import GRPOTrainer
from stage2_trainer.matching import cut_before
from stage2_trainer.model.deepspeed_config import check_options
from stage2_trainer.model.run_checkpoints import Checkpoints
from stage2_trainer.process.activity import ACTIVITY, evaluation_name
from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.process.ranks import gathered, peak_bytes, rank
from stage2_trainer.rollouts.bad_samples import BadSample, BadSamples
from stage2_trainer.scores.scored_image import Comparison
from stage2_trainer.sync.fleet.report import sync_figures, sync_words
from stage2_trainer.telemetry.answer_tables import AnswerTables, HeldOutAnswer
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.run_log import EventLog, JsonLines
from stage2_trainer.telemetry.timeline import TIMELINE, StepTime
from stage2_trainer.wire.requests import DraftCounts, Outcome, Refused, Rollout, draft_figures, share

_SPEED = "rollout/gen_tokens_per_s"
_OF_ENDED = tuple(f"completions/{kind}_terminated_length" for kind in ("mean", "min", "max"))
_IMAGE_INPUTS = ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids")


@dataclass(frozen=True)
class GrpoComponents:
    """The components of a GRPO trainer, beside what TRL's takes.

    records: all records of the run, by the index in a row. bad: the samples that are set aside. chord, references: the
    supervised loss that is mixed in, if it is enabled. part_rates: learning rates of the model's parts that have their
    own.
    """

    rlhf: Rlhf
    rewards: Sequence[Reward]
    rollouts: SharedRollouts
    rows: Rows
    held_out: Rows | None
    records: Sequence[Record]
    bad: BadSamples
    references: References
    chord: Chord
    interrupt: Interrupt
    reporter: Reporter
    log: EventLog
    rollout_log: JsonLines
    tables: AnswerTables
    part_rates: Mapping[str, float]


class GrpoTrainer(CheckedTrainer, GRPOTrainer):
    """A trainer of `model` on rollouts; see the module's docstring."""

    def __init__(
        self, *, components: GrpoComponents, checkpoints: Checkpoints, model: Any, args: Any, processing_class: Any
    ) -> None:
        if args.deepspeed_plugin is not None:  # TRL starts DeepSpeed at once, for a reference model
            check_options(args.deepspeed_plugin.hf_ds_config, args, model)
        processing_class.tokenizer.padding_side = "left"  # prompts end in one column, and answers begin in the next
        super().__init__(
            checkpoints=checkpoints,
            event_log=components.log,
            part_rates=components.part_rates,
            model=model,
            args=args,
            reward_funcs=list(map(_named, components.rewards)),
            train_dataset=components.rows.dataset(),
            eval_dataset=components.held_out.dataset() if components.held_out else None,
            processing_class=processing_class,
            callbacks=[_Course(self)],
        )
        self.beta = components.rlhf.beta
        self.components = components
        self._comparison = Comparison.from_records(components.records)
        self._policy = model
        self._asks: list[tuple[int, str]] = []
        self._faults: list[ImageError | None] = []
        self._sync_words: dict[str, str] = {}
        self._outcomes: list[Outcome] = []
        self._scores = torch.empty(0)
        self._nulls: dict[str, set[str]] = defaultdict(set)  # figures since the last log that are ratios of nothing
        self._drafts: list[DraftCounts] = []  # of training's rollouts since the last log, in all processes
        self._evaluations = 0
        self._bad = 0  # samples set aside since the last log, in all processes
        self._held_out: list[HeldOutAnswer] = []  # of the current evaluation, in this process
        self._left_out: dict[int, BadSample] = {}  # of the current evaluation, in this process
        self._trained: float | None = None  # when the step's last gradient was there

    def train(self, resume_from_checkpoint: Path | str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train to the end; samples that an earlier start set aside count too."""
        if isinstance(resume_from_checkpoint, (Path, str)):
            self.components.bad.load(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def save_beside(self, checkpoint: Path) -> None:
        """Write the samples that were set aside."""
        self.components.bad.save(checkpoint, before=self.state.global_step)

    def count_from(self, step: int) -> None:
        """Go on with the micro-steps after this optimizer step: they tell rounds of rollouts and CHORD's answers apart.

        The last optimizer step of an epoch may have fewer.
        """
        args: Any = self.args
        of_step, of_epoch = args.gradient_accumulation_steps, len(self._order) // args.generation_batch_size
        epochs, steps = divmod(step, -(-of_epoch // of_step))
        self._step = epochs * of_epoch + steps * of_step

    def begin_epoch(self, epoch: int) -> None:
        """Set the order and the texts of an epoch's prompts, which depend on nothing that came before."""
        self.components.rows.epoch = epoch
        generator, seed = self._order.generator, self.args.data_seed
        generator.manual_seed(self.args.seed if seed is None else seed)
        for _ in range(epoch):  # TRL draws one order after the other
            torch.randperm(self._order.num_samples, generator=generator)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._order: Any = super()._get_train_sampler(dataset)
        return self._order

    def get_batch_samples(self, *args: Any) -> tuple[list[Any], Tensor | int | None]:
        """Begin an optimizer step with its batches."""
        TIMELINE.begin()
        return super().get_batch_samples(*args)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Train on a micro-batch, unless the run was asked to stop."""
        self.components.interrupt.check()
        self.components.reporter.update(phase="training", max_steps=self.state.max_steps)
        untyped: Any = super()
        with self.components.interrupt.stoppable(), TIMELINE.measure("backward"):  # all within counts for itself
            loss: Tensor = untyped.training_step(model, inputs, num_items_in_batch)
            self.finite.note("micro-step", (f"record {index}" for index, _ in self._asks), loss)
        self._trained = perf_counter()
        return loss

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Split the step's time before anything is logged, saved or evaluated."""
        if self._trained is not None:  # None where an epoch ends
            TIMELINE.note("optimizer", self._trained)
            self._trained = None
            time = StepTime.joined(gathered(TIMELINE.end(self.state.global_step)))
            self._add("train", time.figures())
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no card for a hub: the run has its own record."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Answer and score the rows of a round; return TRL's tensors, without the loss of bad samples."""
        self._asks = [(row["index"], row["user_text"]) for row in inputs]
        self._faults = [row["fault"] for row in inputs]
        rlhf = self.components.rlhf
        with TIMELINE.measure("score"):
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            self._drop_lengths_of_nothing()
            if rlhf.advantage_estimator != "grpo" or rlhf.kl_in_reward:
                output["advantages"] = self._advantages(output)
            self._leave_out_bad(output)
        with TIMELINE.measure("log"):
            self._write_rollouts(output["advantages"])
        return output

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], None]:
        """Return the answers' ids from the rollout server, which must read the prompts as the learner does.

        A request that failed has an empty answer (its end-of-turn token), which trains nothing.
        """
        with torch.no_grad(), TIMELINE.measure("wait"):  # for other processes; what this one does counts for itself
            found = self.components.rollouts.generate(
                self._policy, self._asks, global_step=self.state.global_step, micro_step=self._micro_step()
            )
        pairs = zip(self._faults, found.outcomes, strict=True)
        self._outcomes = [one if fault is None else Refused(fault) for fault, one in pairs]
        self._set_aside()
        self.components.rollouts.check_prompts(self._outcomes, prompt_ids)
        self._note(found)
        empty = self.components.references.encoder.end_of_turn_ids[:1]
        return [
            self._without_images(one.token_ids) if isinstance(one, Rollout) else list(empty) for one in self._outcomes
        ], None

    def _set_aside(self) -> None:
        """Log and count the samples whose requests failed: bad samples (semantics, section 18)."""
        found: dict[int, BadSample] = {}
        for (index, _), one in zip(self._asks, self._outcomes, strict=True):
            if isinstance(one, Refused):
                record = self.components.records[index]
                found.setdefault(index, BadSample.from_error(record.sample_id, record.images, one.error))
        if not self._policy.training:
            self._left_out |= found
            return
        asked = {index for index, _ in self._asks}
        earlier = gathered((asked, set(found)))[: rank()]  # a prompt's answers may lie in several processes
        asked -= {index for indices, _ in earlier for index in indices}
        bad = [one for index, one in found.items() if not any(index in others for _, others in earlier)]
        self.components.bad.note(bad, step=self.state.global_step, of=len(asked))
        self._bad += sum(gathered(len(bad)))

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, and report the samples that the evaluation left out.

        Raises:
            BadStepError, Exception: as `BadSamples.note_held_out`.
        """
        self._held_out, self._left_out = [], {}
        with ACTIVITY.doing(evaluation_name(self.state.global_step)):
            output: Any = super().evaluation_loop(*args, **kwargs)
        of = len(self.components.held_out.records) if self.components.held_out else 0
        bad = self.components.bad.note_held_out(list(self._left_out.values()), step=self.state.global_step, of=of)
        for name, figure in {**held_out_rewards(self._held_out), "bad_samples": float(bad)}.items():
            self._metrics["eval"][name] = [figure]
        self.components.tables(self.state.global_step, self._held_out)
        return output

    def _is_bad(self) -> list[bool]:
        return [isinstance(one, Refused) for one in self._outcomes]

    def _leave_out_bad(self, output: dict[str, Any]) -> None:
        """Remove bad samples from the loss and from its denominator."""
        bad = torch.tensor(self._is_bad(), device=output["advantages"].device)
        output["advantages"] = output["advantages"].masked_fill(bad, 0.0)
        output["completion_mask"] = output["completion_mask"].masked_fill(bad.unsqueeze(1), 0)
        output["num_items_in_batch"] = self.accelerator.gather(output["completion_mask"].sum()).sum()

    def _without_images(self, ids: list[int]) -> list[int]:
        """Return an answer up to its first image token, which has no pixels; an empty one becomes its end of turn."""
        encoder = self.components.references.encoder
        return list(cut_before(ids, encoder.vision_ids)) or encoder.end_of_turn_ids[:1]

    def _micro_step(self) -> int:
        """Return a number that is unique among the rounds of rollouts of this optimizer step."""
        if self._policy.training:
            return int(self._step % self.args.gradient_accumulation_steps)
        self._evaluations += 1
        return int(self.args.gradient_accumulation_steps) + self._evaluations

    def _note(self, found: SharedBatch) -> None:
        mode = "train" if self._policy.training else "eval"
        times = {f"time/{name}_s": seconds for name, seconds in found.seconds.items()}
        rates = draft_figures(
            generated=found.tokens,
            drafted=sum(one.drafted for one in found.drafts),
            accepted=sum(one.accepted for one in found.drafts),
        )
        drafts = {f"rollout/{name}": figure for name, figure in rates.items()}
        if self._policy.training:
            self._drafts += found.drafts
        self._add(mode, {**times, **drafts, _SPEED: share(found.tokens, found.seconds.get("rollout_generate", 0.0))})
        if found.sync is not None:
            self._sync_words = sync_words(found.sync)
            self._add(mode, {**sync_figures(found.sync), "sync/version": float(found.sync.version)})

    def _add(self, mode: str, figures: Mapping[str, float | None]) -> None:
        """Add figures to those whose mean TRL logs. A ratio of nothing is null in the run's log alone."""
        for name, figure in figures.items():
            if figure is None:
                self._nulls[mode].add(name if mode == "train" else f"eval_{name}")
            else:
                self._metrics[mode][name].append(figure)

    def _drop_lengths_of_nothing(self) -> None:
        """Make the lengths of answers that ended by themselves null where none did: TRL says 0."""
        mode = "train" if self._policy.training else "eval"
        for name in _OF_ENDED:
            if self._metrics[mode][name][-1] == 0.0:
                self._metrics[mode][name].pop()
                self._add(mode, {name: None})
            if not self._metrics[mode][name]:
                del self._metrics[mode][name]

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, *args: Any) -> Tensor:
        """Return every process's rewards, NaN for bad samples: TRL leaves those out of baselines and figures.

        Raises:
            RewardError: in all processes, where a reward fails in any.
        """
        failed: RewardError | None = None
        own: list[list[float]] = []
        try:
            with TIMELINE.measure("reward"), ACTIVITY.doing("scoring", len(completions), "answers") as scoring:
                for one in zip(self._asks, self._outcomes, completions, strict=True):
                    own.append(self._rewards(*one))
                    scoring.advance()
        except RewardError as error:
            failed = error
        with TIMELINE.measure("wait"):  # for the rewards of other processes
            errors = [one for one in gathered(failed) if one is not None]
        if errors:
            raise errors[0]
        self._scores = self.accelerator.gather(torch.tensor(own, device=self.accelerator.device))
        return self._scores

    def _rewards(self, ask: tuple[int, str], outcome: Outcome, completion: Any) -> list[float]:
        parts = self.components
        if isinstance(outcome, Refused):
            return [float("nan")] * len(parts.rewards)
        text = completion if isinstance(completion, str) else str(completion[0]["content"])
        sample = Sample(text, parts.records[ask[0]], parts.rows.task.contract, self._comparison)
        return [reward(sample) for reward in parts.rewards]

    def _advantages(self, output: Mapping[str, Any]) -> Tensor:
        """Return this process's advantages; `kl_in_reward` subtracts the divergence from the rewards first."""
        rlhf = self.components.rlhf
        rewards = self._scores @ self.reward_weights.to(self._scores.device)
        if rlhf.kl_in_reward and rlhf.beta:
            rewards = self.accelerator.gather(self._penalised(rewards, output))
        group = rlhf.num_generations if self._policy.training else 1
        if group == 1:
            return torch.zeros_like(output["advantages"])
        found = advantages(rewards, group, estimator=rlhf.advantage_estimator, scale=rlhf.resolved_scale)
        return self._own(found, output)

    def _penalised(self, rewards: Tensor, output: Mapping[str, Any]) -> Tensor:
        policy = output.get("old_per_token_logps")
        if policy is None:
            policy = self._logprobs(output)
        mask, reference = output["completion_mask"], output["ref_per_token_logps"]
        return with_divergence(self._own(rewards, output), policy, reference, mask, self.components.rlhf.beta)

    @torch.no_grad()
    def _logprobs(self, output: Mapping[str, Any]) -> Tensor:
        """Return the log-probabilities of the answers' tokens under the current weights, (B, T)."""
        found: Tensor
        found, _, _ = self._get_per_token_logps_and_entropies(
            self.model,
            torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
            torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
            output["completion_ids"].size(1),
            batch_size=self.args.per_device_train_batch_size,
            **{name: output[name] for name in _IMAGE_INPUTS if name in output},
        )
        return found

    def _own(self, everywhere: Tensor, output: Mapping[str, Any]) -> Tensor:
        """Return this process's part of gathered values."""
        count = len(output["completion_ids"])
        return everywhere[self.accelerator.process_index * count :][:count]

    def _compute_loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Return TRL's loss, with CHORD's mixed in."""
        if self.steps_in_backward:
            self.components.interrupt.hold()
        untyped: Any = super()
        with TIMELINE.measure("forward"):
            if self.components.rlhf.kl_in_reward:
                self.beta = 0.0  # the rewards have it already
            try:
                loss: Tensor = untyped._compute_loss(model, inputs)
            finally:
                self.beta = self.components.rlhf.beta
            if self.components.chord.enabled and self._policy.training:
                loss = self._mixed(model, loss, self.components.chord)
        if self._policy.training:
            self.note_backward()
        return loss

    def _mixed(self, model: nn.Module, loss: Tensor, chord: Chord) -> Tensor:
        """Return the loss with the supervised one mixed in (semantics section 15.7: CHORD)."""
        mu = supervised_share(chord, self.state.global_step)
        self._metrics["train"]["chord/mu"].append(mu)
        if mu == 0.0:
            return loss
        size = chord.sft_per_device_train_batch_size or 1
        inputs, answers = self.components.references.batch(self._step, size, rank())
        inputs = {name: value.to(self.accelerator.device) for name, value in inputs.items()}
        with self.accelerator.autocast():
            logits = model(**inputs, use_cache=False, logits_to_keep=answers.size(1) + 1).logits[:, :-1]
        supervised = supervised_loss(logits, answers.to(logits.device), phi=bool(chord.enable_phi_function))
        self._metrics["train"]["chord/loss"].append(float(supervised.detach()))
        return (1 - mu) * loss + mu * supervised / self.current_gradient_accumulation_steps

    def _write_rollouts(self, found: Tensor) -> None:
        """Write each answer with its rewards and advantage to the rollout log."""
        part = "train" if self._policy.training else "held-out"
        first = self.accelerator.process_index * len(self._outcomes)
        scores = self._scores[first : first + len(self._outcomes)]
        rewards = (scores * self.reward_weights.to(scores.device)).nansum(dim=1)  # as TRL sums them
        answered = zip(self._asks, self._outcomes, scores.tolist(), rewards.tolist(), found.tolist(), strict=False)
        for (index, _), answer, own, reward, advantage in answered:
            if isinstance(answer, Refused):
                continue
            record = self.components.records[index]
            document = {
                "event": "rollout",
                "part": part,
                "step": self.state.global_step,
                "record": index,
                "sample_id": record.sample_id,
                "image": next((source for source in record.images if not source.startswith("data:")), None),
                "answer": self._tokenizer.decode(self._without_images(answer.token_ids), skip_special_tokens=True),
                "rewards": dict(zip(self.reward_func_names, own, strict=True)),
                "reward": reward,
                "advantage": advantage,
                "server": answer.server,
                "version": answer.version,
                "finish_reason": answer.finish_reason,
            }
            self.components.rollout_log.write(document)
            if part == "held-out":
                figures = {REWARD: reward, **document["rewards"]}
                self._held_out.append(HeldOutAnswer(record, document["answer"], answer.finish_reason, figures))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Report to trackers and to the run's log: each step, and each evaluation."""
        if "loss" in logs:
            logs |= {"memory/peak_bytes": float(max(gathered(peak_bytes(self.args.device)))), "bad_samples": self._bad}
            self._bad = 0
        super().log(logs, start_time)
        mode = "train" if "loss" in logs else "eval"
        figures: dict[str, Any] = dict.fromkeys(sorted(self._nulls.pop(mode, ())))
        figures |= {name: value for name, value in logs.items() if value is None or isinstance(value, (int, float))}
        if mode == "train":
            words = self._sync_words if "sync/version" in figures else {}
            drafts = [one.figures() for one in DraftCounts.joined(self._drafts)]
            self._drafts = []
            self.components.log.write("step", {"step": self.state.global_step, **figures, **words, "drafts": drafts})
            speed = logs.get(_SPEED)
            self.components.reporter.update(step=self.state.global_step, loss=logs["loss"], tokens_per_second=speed)
        elif any(name.startswith("eval_") for name in logs):
            self.components.log.write("evaluation", {"step": self.state.global_step, **figures})


class _Course(TrainerCallback):
    """A callback that lets a run that resumes go on as one that nothing stopped."""

    def __init__(self, trainer: GrpoTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the number of micro-steps."""
        self._trainer.count_from(state.global_step)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the epoch that begins."""
        self._trainer.begin_epoch(int(state.epoch or 0))


def _named(reward: Reward) -> Any:
    """Return a function with the name under which TRL logs the reward; `_calculate_rewards` calls the reward."""

    def named() -> None: ...

    named.__name__ = reward.name
    return named
