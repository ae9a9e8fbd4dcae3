"""The job files of both stages (`job.yaml.j2`), as an expert would write them for a data set, a model and some GPUs.

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
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from jinja2 import Environment, StrictUndefined

from stage2_trainer.prepare.project_sizes import Chosen, Sizes

CPU_PROMPT = "List the objects."
RUNS = "runs"
_LONGEST_NAME = 40
_WIDTH = 118
StageName = Literal["stage1", "stage2"]
_REASON = "\0"  # stands between a value and its reason while a template is filled in


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


def job_file(stage: StageName, folders: ProjectFolders, sizes: Sizes, gpus: int) -> str:
    """Return the job file of a stage. gpus: of the machine; 0 means that a tiny model trains on its CPU.

    Stage 1 is supervised training on all GPUs, with rollouts for evaluation only. In stage 2 all GPUs but one serve
    rollouts of the current weights.
    """
    supervised = stage == "stage1"
    model = folders.model if supervised else str(folders.folder / "models" / "stage1")
    return fill(
        files("stage2_trainer.prepare").joinpath("job.yaml.j2").read_text(encoding="utf-8"),
        name=object_name(folders.folder),
        stage=stage,
        supervised=supervised,
        gpus=gpus,
        servers=0 if supervised else max(gpus - 1, 0),
        model=model,
        sizes=sizes,
        size=sizes.stage1 if supervised else sizes.stage2,
        volumes=_volumes(folders),
        runs=str(folders.folder / RUNS),
        train=str(folders.train),
        held_out=str(folders.held_out),
        cpu_prompt=CPU_PROMPT,
    )


def _volumes(folders: ProjectFolders) -> list[dict[str, Any]]:
    """Return the folders at their own paths, so that processes and pods share one file; only `runs` is writable."""
    read = dict.fromkeys([folders.folder, *folders.images, *([folders.model_folder] if folders.model_folder else [])])
    volumes = [_volume(f"input-{number}", path) | {"readOnly": True} for number, path in enumerate(read)]
    return [*volumes, _volume("runs", folders.folder / RUNS)]


def object_name(folder: Path) -> str:
    """Return a name for a Kubernetes object, from the name of a folder."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    return name or "run"


def _volume(name: str, path: Path) -> dict[str, Any]:
    return {"name": name, "mountPath": str(path), "hostPath": {"path": str(path), "type": "Directory"}}


class _OneLine(yaml.SafeDumper):
    """Quotes text with line breaks and other control characters: in plain style a reader turns some into spaces."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if value.isprintable() else '"')


_OneLine.add_representer(str, _text)


def fill(template: str, **names: Any) -> str:
    """Fill in a YAML template; a value with a reason gets a comment, behind it or, where it is too long, above it."""
    environment = Environment(
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda one: f"{_inline(one.value)}{_REASON}{one.why}" if isinstance(one, Chosen) else _inline(one),
    )
    return "\n".join(map(_with_reason, environment.from_string(template).render(names).split("\n")))


def _with_reason(line: str) -> str:
    text, _, why = line.partition(_REASON)
    if not why:
        return text
    if len(text) + len(why) + 3 <= _WIDTH:
        return f"{text} # {why}"
    margin = " " * (len(text) - len(text.lstrip()))
    return f"{margin}# {why}\n{text}"


def _inline(value: Any) -> str:
    """Return a value as YAML in one line."""
    text: str = yaml.dump(
        value, Dumper=_OneLine, default_flow_style=True, width=2**20, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")
