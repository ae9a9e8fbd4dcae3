"""`stage2 init`: a project folder. Everything is checked first, written under a temporary name, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import yaml
from jinja2 import Environment, StrictUndefined
from transformers import AutoProcessor

from stage2_api.custom import Custom
from stage2_api.errors import ConfigError, refused
from stage2_api.parsing import parse_job
from stage2_api.schema import editor_line, schema_text
from stage2_trainer.checks.supported import MIXTURE_IN_VLLM
from stage2_trainer.data.files import new_folder, relative_path
from stage2_trainer.data.images import MOST_ASPECT
from stage2_trainer.data.model_files import is_mixture
from stage2_trainer.data.records import Line, Record, RecordRules, lines, load_records
from stage2_trainer.model.policy import coord_vocab
from stage2_trainer.prepare.coordinate_tokens import lacks_tokens, prepare, stock_processor
from stage2_trainer.prepare.project_request import HELD_OUT, NEXT_STEPS, ProjectRequest, check_request, unmountable
from stage2_trainer.prepare.project_sizes import Chosen, Measures, Sizes, choose, measure
from stage2_trainer.prepare.stock_model import source_of

CPU_PROMPT = "List the objects."
RUNS = "runs"
SCHEMA = "job.schema.json"
_LONGEST_NAME = 40
_WIDTH = 118
StageName = Literal["stage1", "stage2"]
_REASON = "\0"  # stands between a value and its reason while a template is filled in

Shown = Callable[[Iterable[Any], str, int], Iterable[Any]]
"""A function that yields items and shows progress; it gets a text for them, and their number."""

SHARE, MOST_HELD_OUT = 0.05, 1000  # how many images are held out where there is no validation set
PREPARED = Path("models") / "prepared"
STAGES: dict[StageName, str] = {
    "stage1": "supervised training on the ground truth",
    "stage2": "training on the model's own answers, matched to the ground truth",
}
HEAD = """\
# {name}, {stage}: {what}.
# Written by `stage2 init`. A comment beside a size says where it comes from.
#
#     stage2 run {stage}.yaml --work-dir runs/{stage}-work    on this machine
#     kubectl apply -f {stage}.yaml                           on a cluster
#
# Containers see each folder at its path on this machine. If the nodes of a cluster lack these folders, replace the
# hostPath of a volume by a claim with the same content, and keep its mountPath. Pods write to `runs` as user 10001.
"""
README = """\
# {name}

Run these commands in this folder, one after the other:

{steps}

On a cluster, use `kubectl apply -f` instead of `stage2 run`, and wait until `kubectl get rmj` shows Succeeded
before you export.
"""


@dataclass(frozen=True)
class Project:
    """A new project: its folders, and measures of the data."""

    folders: ProjectFolders
    measures: Measures


def create_project(request: ProjectRequest, shown: Shown) -> Project:
    """Create a project's folder. Raises ConfigError for a mistake, and leaves nothing behind then."""
    check_request(request)
    train, held_out = _parts(request)
    images = _image_folders(request, [one.record for one in (*train, *held_out)])
    source, stock = _model(request)
    output = request.output.absolute()
    with new_folder("--output", output) as aside:
        _write_data(aside / "data" / "train.jsonl", train)
        _write_data(aside / HELD_OUT, held_out)
        if stock:
            with _as_options(request):
                prepare(request.model, aside / PREPARED)
        found = _measure(train, held_out, aside / PREPARED if stock else source, request, shown)
        folders = _folders(request, images, output.resolve(), None if stock else source)
        sizes = choose(found, gpus=request.gpus)
        name = output.name if output.name.isprintable() else repr(output.name)[1:-1]  # one line of a comment
        for stage, what in STAGES.items():
            head = editor_line(SCHEMA) + HEAD.format(stage=stage, what=what, name=name)
            text = head + job_file(stage, folders, sizes, request.gpus)
            parse_job(yaml.safe_load(text))
            (aside / f"{stage}.yaml").write_text(text, encoding="utf-8")
        (aside / SCHEMA).write_text(schema_text("job"), encoding="utf-8")
        steps = "\n".join(f"    stage2 {line}" for line, _ in NEXT_STEPS)
        (aside / "README.md").write_text(README.format(name=name, steps=steps), encoding="utf-8")
        (aside / RUNS).mkdir()
    return Project(folders, found)


@dataclass(frozen=True)
class _Entry:
    """A record and its line in a data file."""

    line: Line
    record: Record


def _model(request: ProjectRequest) -> tuple[Path, bool]:
    """Return the folder of the model, and whether it lacks coordinate tokens. Raises ConfigError."""
    model = request.model
    with _as_options(request):
        source = source_of(model)
        lacks = lacks_tokens(stock_processor(source, model).tokenizer, model)
    if request.gpus and is_mixture(source):
        way_out = "give a dense model; a mixture trains in stage 1 without evaluations (docs/models.md)"
        raise refused("--model", model, MIXTURE_IN_VLLM, way_out)
    if not lacks and os.path.isdir(model) and (problems := unmountable("--model", source)):
        raise ConfigError(problems)
    return source, lacks


@contextmanager
def _as_options(request: ProjectRequest) -> Iterator[None]:
    """Name the options of this command in errors, not those of `stage2 prepare`."""
    try:
        yield
    except ConfigError as error:
        renamed = [
            replace(one, value=str(request.output)) if one.path == "--output" else replace(one, path="--model")
            for one in error.problems
        ]
        raise ConfigError(renamed) from error


def _parts(request: ProjectRequest) -> tuple[list[_Entry], list[_Entry]]:
    """Return the records to train on, and the held-out ones. Raises ConfigError."""
    train, held_out = _read(request.data, request), []
    if request.held_out:
        held_out = _read(request.held_out, request)
    else:
        chosen = choose_held_out([one.record.sample_id for one in train])
        held_out = [one for one in train if one.record.sample_id in chosen]
        train = [one for one in train if one.record.sample_id not in chosen]
    source = str(request.data)
    if not train:
        rule = "must hold two records at least: one is held out"
        raise refused("--data", source, rule, "give more images, or --val-data")
    if not any(one.record.objects for one in train):
        rule = f"must have objects; its {len(train):,} records have none"
        raise refused("--data", source, rule, "`stage2 import` lists what it leaves out")
    if request.gpus > len(train):
        rule = f"must be at most {len(train):,}, the number of training records: each GPU of stage 1 needs one"
        raise refused("--gpus", request.gpus, rule, "give more images, or fewer GPUs")
    return train, held_out


def _read(file: Path, request: ProjectRequest) -> list[_Entry]:
    rules = RecordRules(image_roots=tuple(map(str, request.images)), demand=_demand)
    for line in islice(lines(file), 1):
        line.record(rules)  # a folder that no option names is reported once, not for each record
    return [_Entry(line, record) for line, record in zip(lines(file), load_records(file, rules=rules), strict=True)]


def _demand(record: Record) -> None:
    if max(record.width, record.height) > MOST_ASPECT * min(record.width, record.height):
        size = f"{record.width} x {record.height}"
        rule = f"must have sides of which one is at most {MOST_ASPECT} times the other"
        raise refused("images[0]", size, rule, "leave the record out")


def choose_held_out(ids: Sequence[str]) -> frozenset[str]:
    """Return 5 % of the ids, at least 1 and at most 1,000: those with the smallest SHA-256.

    The order of the records does not matter.
    """
    count = min(max(1, round(len(ids) * SHARE)), MOST_HELD_OUT)
    return frozenset(sorted(ids, key=lambda one: hashlib.sha256(one.encode()).hexdigest())[:count])


def _write_data(path: Path, entries: Sequence[_Entry]) -> None:
    """Write lines of data files into another folder, with the paths of their images from there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for one in entries:
            images = [
                image if image.startswith("data:") else relative_path(Path(image), path.parent)
                for image in one.record.images
            ]
            record = {**json.loads(one.line.text), "sample_id": one.record.sample_id, "images": images}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _measure(
    train: Sequence[_Entry], held_out: Sequence[_Entry], model: Path, request: ProjectRequest, shown: Shown
) -> Measures:
    """Return the measures of the records, in tokens of the model."""
    parts = [one.record for one in train], [one.record for one in held_out]
    processor = AutoProcessor.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    coord_vocab(processor.tokenizer, str(model))
    prompt = Custom.model_fields["user_prompt"].default if request.gpus else CPU_PROMPT
    return measure(*parts, processor, prompt, lambda them: shown(them, "answers", len(train) + len(held_out)))


def _folders(request: ProjectRequest, images: tuple[Path, ...], folder: Path, ready: Path | None) -> ProjectFolders:
    """Return the project's folders. ready: the folder of a model that has its coordinate tokens already."""
    if ready is None:
        return ProjectFolders(folder, images, str(folder / PREPARED))
    if os.path.isdir(request.model):
        return ProjectFolders(folder, images, str(ready.resolve()), ready.resolve())
    return ProjectFolders(folder, images, request.model)


def _image_folders(request: ProjectRequest, records: Iterable[Record]) -> tuple[Path, ...]:
    """Return the folders that hold the images: --images, and those of data files. Raises ConfigError for others."""
    files = [request.data, *([request.held_out] if request.held_out else [])]
    folders = [one.resolve() for one in (*request.images, *(file.parent for file in files))]
    found: dict[Path, None] = {}
    for image in (Path(one) for record in records for one in record.images if not one.startswith("data:")):
        place = next((folder for folder in folders if image.is_relative_to(folder)), None)
        if place is None:  # but in ROOT_IMAGE_DIR, which a job does not have
            rule = "must be in a folder that the jobs will have"
            raise refused("--images", str(image), rule, "name its folder with --images")
        found[place] = None
    if problems := [problem for place in found for problem in unmountable("--data", place)]:
        raise ConfigError(problems)
    return tuple(found)


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
        return self.folder / HELD_OUT


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
        image_roots=[str(one) for one in folders.images],
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
