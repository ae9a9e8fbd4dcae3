"""The job files of both stages, as an expert would write them for a data set, a model and a number of GPUs.

All other keys have the defaults of stage2_api. Rates and adapters are those of published recipes for Qwen3-VL:

- ms-swift's examples for Qwen3-VL (modelscope/ms-swift, examples/models/qwen3_vl): LoRA on all linear layers of the
  language model at 1e-4, 5 % of the steps to warm up, images of up to 1,024 tokens;
- 2U1/Qwen-VL-Series-Finetune (scripts/finetune_lora.sh): LoRA at 1e-4, weight decay 0.1;
- Pein2017/CoordExp (configs/stage1/sft_base.yaml, _shared/coord_soft_ce_gate_4b.yaml), whose task this is: DoRA of rank
  16 and alpha 32, coordinate rows at 1e-4, four passes over COCO in steps of 128 records, rows of 12,000 tokens.

Stage 2 has the rate of examples/job-3v1.yaml; no comparison of rates for it is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stage2_trainer.prepare.project_sizes import Chosen, Sizes, Stage

Tree = dict[str, Any]
CPU_PROMPT = "List the objects."
RUNS = "runs"
_TENSOR_PARALLEL = (2, 4, 8)
_LONGEST_NAME = 40
_WIDTH = 118
_STEP = 2


@dataclass(frozen=True)
class ProjectFolders:
    """The absolute folders of a project; containers have them at the same paths.

    images: folders of pictures. model: the model of stage 1. model_folder: its folder, if it is outside the project.
    """

    folder: Path
    images: tuple[Path, ...]
    model: str
    model_folder: Path | None = None

    @property
    def train(self) -> Path:
        """The training records."""
        return self.folder / "data" / "train.jsonl"

    @property
    def held_out(self) -> Path:
        """The held-out records."""
        return self.folder / "data" / "val.jsonl"


@dataclass(frozen=True)
class JobRecipe:
    """A project's job files. gpus: of the machine; 0 means that a tiny model trains on its CPU."""

    folders: ProjectFolders
    sizes: Sizes
    gpus: int

    def stage1(self) -> Tree:
        """Return stage 1: supervised training on ground truth on all GPUs, rollouts for evaluation only."""
        rate = Chosen(1.0e-4, "ms-swift's and CoordExp's for adapters on Qwen3-VL") if self.gpus else 2.0e-3
        everything = Chosen("full", "an untrained model trains all of its weights")
        full: Tree = {"train_type": everything, "freeze_vit": False, "freeze_aligner": False}
        tuner = self._adapters(coord_rows=True) if self.gpus else full
        config = self._config("stage1", self.folders.model, self.sizes.stage1, tuner, rate)
        config["custom"] |= {
            "trainer_variant": "sft",
            "extra": {"rollout_matching": self._rollouts(servers=0) | self._matching()},
        }
        return self._job("stage1", config, servers=0)

    def stage2(self) -> Tree:
        """Return stage 2: rollouts of the current weights, matched; all GPUs but one serve them."""
        servers = max(self.gpus - 1, 0)
        rate = 2.0e-5 if self.gpus else 7.0e-4
        tuner = self._adapters(coord_rows=False)
        config = self._config("stage2", str(self.folders.folder / "models" / "stage1"), self.sizes.stage2, tuner, rate)
        matching = self._rollouts(servers=servers) | self._matching()
        config["custom"] |= {"trainer_variant": "rollout_matching_sft", "extra": {"rollout_matching": matching}}
        return self._job("stage2", config, servers=servers)

    def _job(self, stage: str, config: Tree, *, servers: int) -> Tree:
        spec: Tree = {"gpuResource": "nvidia.com/gpu" if self.gpus else Chosen("", "no GPU: the learner runs on a CPU")}
        if servers:
            spec["rollout"] = {
                "servers": Chosen(servers, "one vLLM each; the learner has the remaining GPU"),
                "gpusPerServer": 1,
                "resources": {"requests": {"cpu": 4, "memory": "32Gi"}},
            }
        learners = 1 if servers else self.gpus
        requests = {"cpu": 4 * learners + 4, "memory": f"{40 * learners + 24}Gi"}
        if not self.gpus:
            requests = {"cpu": 1, "memory": "4Gi"}
        spec["learner"] = {"gpus": learners, "resources": {"requests": requests}}
        spec["volumes"] = self._volumes()
        spec["config"] = config
        return {
            "apiVersion": "stage2.dev/v1alpha1",
            "kind": "RolloutMatchingJob",
            "metadata": {"name": f"{object_name(self.folders.folder)}-{stage}"},
            "spec": spec,
        }

    def _volumes(self) -> list[Tree]:
        """Return the folders at their own paths, so that processes and pods share one file; only `runs` is writable."""
        folders = self.folders
        read = dict.fromkeys(
            [folders.folder, *folders.images, *([folders.model_folder] if folders.model_folder else [])]
        )
        volumes = [_volume(f"input-{number}", path) | {"readOnly": True} for number, path in enumerate(read)]
        return [*volumes, _volume("runs", folders.folder / RUNS)]

    def _config(self, stage: str, model: str, sizes: Stage, tuner: Tree, rate: Any) -> Tree:
        folders = self.folders
        return {
            "global_max_length": sizes.row,
            "model": {"model": model, "torch_dtype": "bfloat16" if self.gpus else "float32", "attn_impl": "auto"},
            "template": {"max_pixels": self.sizes.max_pixels},
            "tuner": tuner,
            "training": {"output_dir": str(folders.folder / RUNS / stage)} | self._training(sizes, rate),
            "custom": {
                "train_jsonl": str(folders.train),
                "val_jsonl": str(folders.held_out),
                "val_sample_limit": self.sizes.looked_at,
                **({} if self.gpus else {"user_prompt": Chosen(CPU_PROMPT, "short; the same in both stages")}),
            },
        }

    def _training(self, sizes: Stage, rate: Any) -> Tree:
        on_gpus: Tree = {
            "weight_decay": 0.1,
            "warmup_ratio": 0.05,
            "lr_scheduler_type": "cosine_warmup_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr": 1.0e-6},
            "bf16": True,
            "gradient_checkpointing": Chosen(True, "a third slower, but rows of this length fit"),
            "dataloader_num_workers": 4,
            "report_to": ["tensorboard"],
        }
        on_cpu: Tree = {"warmup_ratio": 0.05, "lr_scheduler_type": "cosine", "gradient_checkpointing": False}
        return {
            "max_steps": sizes.steps,
            "per_device_train_batch_size": sizes.micro,
            "per_device_eval_batch_size": Chosen(32, "records of one evaluation step in each process"),
            "effective_batch_size": sizes.records,
            "learning_rate": rate,
            **(on_gpus if self.gpus else on_cpu),
            "seed": 17,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": sizes.evaluate_every,
            "save_strategy": "steps",
            "save_steps": Chosen(sizes.evaluate_every.value, "a crash loses at most these; the best is kept too"),
            "save_total_limit": 2,
            "dataloader_drop_last": True,
            "packing": True,
        }

    def _adapters(self, *, coord_rows: bool) -> Tree:
        rows = {"train_coord_rows": Chosen(True, "an offset for each coordinate token; all other rows stay frozen")}
        return {
            "train_type": "lora",
            "use_dora": True,
            "lora_rank": 16,
            "lora_alpha": 32,
            "lora_dropout": 0.05 if self.gpus else 0.0,
            "freeze_vit": True,
            "freeze_aligner": not self.gpus,
            **(rows if coord_rows else {}),
        }

    def _matching(self) -> Tree:
        """Return the keys that both stages share, so that their evaluations are comparable."""
        return {
            "candidate_top_k": self.sizes.top_k,
            "target_sigma": self.sizes.sigma,
            "post_rollout_pack_scope": "step",
            **({"repetition_penalty": Chosen(1.05, "against loops in long lists of objects")} if self.gpus else {}),
        }

    def _rollouts(self, *, servers: int) -> Tree:
        """Return the keys of the rollout backend: servers, a vLLM in the learner's processes, or the model itself."""
        answers: Tree = {"max_new_tokens": self.sizes.max_new_tokens}
        if not self.gpus:
            return {"rollout_backend": "hf", "rollout_generate_batch_size": 16} | answers
        limits = {"max_model_len": self.sizes.max_model_len, "limit_mm_per_prompt": {"image": 1, "video": 0}}
        if servers:
            whole = Chosen(0.9, "a server has its own GPU")
            return answers | {"vllm": {"mode": "server", "gpu_memory_utilization": whole} | limits}
        spread = {"tensor_parallel_size": self.gpus, "mm_encoder_tp_mode": "data"}
        shared = {"mode": "colocate", "gpu_memory_utilization": Chosen(0.45, "the rest is for training")} | limits
        return answers | {"vllm": shared | (spread if self.gpus in _TENSOR_PARALLEL else {"tensor_parallel_size": 1})}


def object_name(folder: Path) -> str:
    """Return a name for a Kubernetes object, from the name of a folder."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    return name or "run"


def _volume(name: str, path: Path) -> Tree:
    return {"name": name, "mountPath": str(path), "hostPath": {"path": str(path), "type": "Directory"}}


class _OneLine(yaml.SafeDumper):
    """Quotes text with line breaks and other control characters: in plain style a reader turns some into spaces."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if value.isprintable() else '"')


_OneLine.add_representer(str, _text)


def to_yaml(tree: Mapping[str, Any]) -> str:
    """Return nested mappings as YAML with reasons as comments; lists and mappings inside a Chosen are one line."""
    return "".join(f"{line}\n" for line in _lines(tree, 0))


def _lines(tree: Mapping[str, Any], indent: int) -> Iterator[str]:
    margin = " " * indent
    for key, value in tree.items():
        if isinstance(value, Chosen):
            yield from _with_reason(f"{margin}{key}: {_inline(value.value)}", value.why, margin)
        elif isinstance(value, Mapping) and value:
            yield f"{margin}{key}:"
            yield from _lines(value, indent + _STEP)
        elif isinstance(value, list) and value:
            yield f"{margin}{key}:"
            yield from (f"{margin}  - {_inline(item)}" for item in value)
        else:
            yield f"{margin}{key}: {_inline(value)}"


def _with_reason(line: str, why: str, margin: str) -> Iterator[str]:
    if len(line) + len(why) + 3 <= _WIDTH:
        yield f"{line} # {why}"
        return
    yield f"{margin}# {why}"
    yield line


def _inline(value: Any) -> str:
    """Return a value as YAML in one line."""
    text: str = yaml.dump(
        value, Dumper=_OneLine, default_flow_style=True, width=2**20, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")
