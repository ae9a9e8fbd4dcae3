"""A GRPO trainer in one process: its rollouts are written down beforehand, its weights go nowhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from stage2_api.parsing import parse_run_config
from stage2_api.pod.report import SyncStatus
from stage2_api.runconfig import RunConfig
from stage2_trainer.data.encode import Encoder
from stage2_trainer.data.run_records import load_run_records
from stage2_trainer.grpo.build import components, grpo_arguments
from stage2_trainer.grpo.shared_rollouts import SharedRollouts
from stage2_trainer.grpo.task import Task, record_rules
from stage2_trainer.grpo.trainer import GrpoTrainer
from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.rollouts.first_process import ProcessExchange
from stage2_trainer.rollouts.rollout_source import GenerationRequest, RolloutBatch
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.run_context import RunContext
from stage2_trainer.telemetry.run_log import JsonLines, RunLog
from stage2_trainer.wire.requests import Rollout
from tests.unit.api.wrong_jobs import merge_patch
from tests.unit.trainer.conftest import TINY_MODEL

Answer = Callable[[int], list[int]]
SUMMARY = {
    "task": "T",
    "keys": {"category": "desc"},
    "stable_attributes": ["colour"],
    "domains": [
        {
            "name": "S",
            "template": "summary_shapes",
            "categories": [{"name": kind, "required": ["colour"]} for kind in ("box", "ellipse", "triangle")],
        }
    ],
}


def config(folder: Any, *patches: Mapping[str, Any]) -> RunConfig:
    """A run of two prompts with two answers each, on the records in a folder, patched."""
    raw: dict[str, Any] = {
        "model": {"model": str(TINY_MODEL), "torch_dtype": "float32"},
        "tuner": {"train_type": "full", "freeze_vit": True},
        "training": {
            "output_dir": str(folder / "out"),
            "per_device_train_batch_size": 4,
            "effective_batch_size": 4,
            "max_steps": 1,
            "save_strategy": "no",
            "gradient_checkpointing": False,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "seed": 5,
        },
        "rlhf": {
            "use_vllm": True,
            "vllm_mode": "server",
            "reward_funcs": ["summary.format", "summary.content_f1"],
            "reward_weights": [1.0, 2.0],
            "num_generations": 2,
            "generation_batch_size": 4,
            "max_completion_length": 16,
            "beta": 0.0,
        },
        "custom": {
            "trainer_variant": "grpo",
            "train_jsonl": str(folder / "train.jsonl"),
            "user_prompt": "Count.",
            "use_summary": True,
            "assistant_prefix_format": "<DOMAIN={domain}>, <TASK={task}>",
            "grpo": {"summary": SUMMARY},
            "extra": {
                "rollout_server": {
                    "vllm_tensor_parallel_size": 1,
                    "vllm_data_parallel_size": 1,
                    "vllm_max_model_len": 512,
                }
            },
        },
    }
    for patch in patches:
        raw = merge_patch(raw, dict(patch))
    return parse_run_config(raw)


def write_records(folder: Any, images: Sequence[Any], *, name: str = "train.jsonl", **metadata: object) -> None:
    """Write a record for each image into the folder's file of this name: one shape each."""
    lines = []
    for number, image in enumerate(images):
        truth = {"items": [{"desc": ("box", "ellipse", "triangle")[number % 3], "colour": {"red": 1}}]}
        found = {"_fusion_template": "summary_shapes", "_fusion_mode": "summary", "summary_ref": json.dumps(truth)}
        lines.append(json.dumps({"images": [str(image)], "metadata": {**found, **metadata}}))
    (folder / name).write_text("\n".join(lines))


class Scripted:
    """Answers each request with the next ids of a script."""

    def __init__(self, encoder: Encoder, answers: Sequence[list[int]]) -> None:
        self._encoder = encoder
        self._answers = list(answers)
        self.sync_state = SyncStatus(requested_mode="full", effective_mode="full")
        self.sync: SyncReport | None = None
        self.steps: list[tuple[int, int]] = []
        self.changes: list[dict[str, Any]] = [{}]  # fields of the answers, in turn

    def generate(self, request: GenerationRequest) -> RolloutBatch:
        self.steps.append((request.global_step, request.micro_step))
        chats, step = request.chats, request.global_step
        with request.stopwatch.measure("rollout_generate"):
            answers = [self._answers[i % len(self._answers)] for i in range(len(chats))]
        return RolloutBatch(
            [
                replace(
                    Rollout(self._encoder.prompt(list(chat)).input_ids.tolist(), ids, "", "scripted", step, "stop"),
                    **self.changes[i % len(self.changes)],
                )
                for i, (chat, ids) in enumerate(zip(chats, answers, strict=True))
            ],
            self.sync,
            request.seeds(0),
        )


def build(folder: Any, run: RunConfig, model: Any, encoder: Encoder, source: Any, stack: ExitStack) -> GrpoTrainer:
    """A trainer of `model` whose rollouts come from `source`."""
    task, data, interrupt = Task.from_config(run), load_run_records(run, record_rules(run)), Interrupt()
    log, rollout_log = RunLog(folder), JsonLines(folder / "rollouts.jsonl")
    stack.callback(log.close)
    stack.callback(rollout_log.close)
    rollouts = SharedRollouts(source, [*data.train, *data.held_out], task.chat, ProcessExchange(interrupt))
    context = RunContext("", Reporter(), interrupt, log, rollout_log)
    parts = components(run, data, task, encoder, rollouts, context)
    args = grpo_arguments(run, world_size=1, adapted=run.tuner.train_type == "lora")
    checkpoints = context.checkpoints(run)
    return GrpoTrainer(
        components=parts, checkpoints=checkpoints, model=model, args=args, processing_class=encoder.processor
    )


def answers(encoder: Encoder) -> list[list[int]]:
    """Four answers: a right one, an empty one, one without form, and one of the wrong colour."""
    right = '<DOMAIN=S>, <TASK=T>\n{"items": [{"desc": "box", "colour": {"red": 1}}]}'
    texts = [right, "<DOMAIN=S>, <TASK=T>\n{}", "nothing", right.replace("red", "blue")]
    return [encoder.tokenizer.encode(text) + encoder.end_of_turn_ids[:1] for text in texts]


def scored(trainer: GrpoTrainer, *indices: int) -> dict[str, Any]:
    """Generate and score answers to these records."""
    return trainer._generate_and_score_completions([trainer.components.rows.row(i) for i in indices])


def gradient(loss: Any, model: Any) -> Any:
    """Return the gradient of a loss at one weight of the text model."""
    return torch.autograd.grad(loss, model.model.language_model.layers[0].mlp.up_proj.weight, retain_graph=True)[0]
