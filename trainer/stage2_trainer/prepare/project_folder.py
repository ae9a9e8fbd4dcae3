"""`stage2 init`: a project folder. Everything is checked first, written under a temporary name, then renamed."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from jinja2 import Environment, StrictUndefined
from transformers import AutoProcessor

from stage2_api.custom import Custom
from stage2_api.errors import ConfigError, Problem
from stage2_api.parsing import parse_job
from stage2_trainer.data.files import new_folder
from stage2_trainer.data.model_files import is_mixture
from stage2_trainer.data.records import RecordRules, load_records
from stage2_trainer.prepare.annotations import AnnotatedImage, Tally
from stage2_trainer.prepare.coco import read_coco
from stage2_trainer.prepare.coordinate_tokens import lacks_tokens, prepare, stock_processor
from stage2_trainer.prepare.project_request import Annotations, ProjectRequest, check_request, unmountable
from stage2_trainer.prepare.project_sizes import Chosen, Measures, Sizes, choose, measure
from stage2_trainer.prepare.record_writer import RecordChoice, write_records
from stage2_trainer.prepare.stock_model import source_of
from stage2_trainer.process.policy import coord_vocab
from stage2_trainer.process.supported import MIXTURE_IN_VLLM

CPU_PROMPT = "List the objects."
RUNS = "runs"
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

Run these commands in this folder. On a cluster, use `kubectl apply -f` instead of `stage2 run`:

    stage2 doctor stage1.yaml
    stage2 run stage1.yaml --work-dir runs/stage1-work
    stage2 export runs/stage1 --output models/stage1
    stage2 run stage2.yaml --work-dir runs/stage2-work
    stage2 report runs/stage2 --html runs/stage2.html
    stage2 export runs/stage2 --output models/stage2
"""


@dataclass(frozen=True)
class Project:
    """A new project: its folders, counts of both parts, and measures of the data."""

    folders: ProjectFolders
    train: Tally
    held_out: Tally
    measures: Measures


def create_project(request: ProjectRequest, shown: Shown) -> Project:
    """Create a project's folder. Raises ConfigError for a mistake, and leaves nothing behind then."""
    check_request(request)
    parts = _parts(request)
    source, stock = _model(request)
    output = request.output.absolute()
    with new_folder("--output", output) as aside:
        _write_data(aside, parts, request, shown)
        if stock:
            with _as_option():
                prepare(request.model, aside / PREPARED)
        found = _measure(aside, aside / PREPARED if stock else source, request, shown)
        folders = _folders(request, output.resolve(), None if stock else source)
        sizes = choose(found, gpus=request.gpus)
        name = output.name if output.name.isprintable() else repr(output.name)[1:-1]  # one line of a comment
        for stage, what in STAGES.items():
            text = HEAD.format(stage=stage, what=what, name=name) + job_file(stage, folders, sizes, request.gpus)
            parse_job(yaml.safe_load(text))
            (aside / f"{stage}.yaml").write_text(text, encoding="utf-8")
        (aside / "README.md").write_text(README.format(name=name), encoding="utf-8")
        (aside / RUNS).mkdir()
    return Project(folders, parts[0].tally, parts[1].tally, found)


@dataclass(frozen=True)
class _Part:
    """A part of the data set. option, source: what named it. file: of its records, in the project."""

    option: str
    source: Path
    file: str
    images: Sequence[AnnotatedImage]
    tally: Tally


def _model(request: ProjectRequest) -> tuple[Path, bool]:
    """Return the folder of the model, and whether it lacks coordinate tokens. Raises ConfigError."""
    model = request.model
    with _as_option():
        source = source_of(model)
        lacks = lacks_tokens(stock_processor(source, model).tokenizer, model)
    if request.gpus and is_mixture(source):
        way_out = "give a dense model; a mixture trains in stage 1 without evaluations (docs/models.md)"
        raise ConfigError([Problem("--model", model, MIXTURE_IN_VLLM, way_out)])
    if not lacks and os.path.isdir(model) and (problems := unmountable("--model", source)):
        raise ConfigError(problems)
    return source, lacks


@contextmanager
def _as_option() -> Iterator[None]:
    """Name the option of this command in errors, not that of `stage2 prepare`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([replace(problem, path="--model") for problem in error.problems]) from error


def _parts(request: ProjectRequest) -> tuple[_Part, _Part]:
    """Return the training images and the held-out ones. Raises ConfigError."""
    tally, rest = Tally(), Tally()
    source, images = request.train.file, _read(request.train, tally)
    if request.held_out:
        held = _Part("--val-coco", request.held_out.file, "val.jsonl", _read(request.held_out, rest), rest)
        return _Part("--coco", source, "train.jsonl", images, tally), held
    chosen = choose_held_out(images)
    kept = [image for image in images if image.sample_id not in chosen]
    held = _Part("--coco", source, "val.jsonl", [image for image in images if image.sample_id in chosen], rest)
    return _Part("--coco", source, "train.jsonl", kept, tally), held


def choose_held_out(images: Sequence[AnnotatedImage]) -> frozenset[str]:
    """Return the ids of 5 % of the images, at least 1 and at most 1,000: those with the smallest SHA-256.

    The order of the images does not matter.
    """
    count = min(max(1, round(len(images) * SHARE)), MOST_HELD_OUT)
    ids = (image.sample_id for image in images)
    return frozenset(sorted(ids, key=lambda one: hashlib.sha256(one.encode()).hexdigest())[:count])


def _read(annotations: Annotations, tally: Tally) -> list[AnnotatedImage]:
    return list(read_coco(annotations.file, annotations.images.resolve(), tally))


def _write_data(aside: Path, parts: Sequence[_Part], request: ProjectRequest, shown: Shown) -> None:
    """Write the records of both parts. Raises ConfigError where one has none."""
    choice = RecordChoice(max_objects=request.max_objects)
    for part in parts:
        images = shown(part.images, f"records of {part.file}", len(part.images))
        write_records(images, aside / "data" / part.file, choice, part.tally)
        if not part.tally.records:
            reasons = ", ".join(f"{count:,}: {reason}" for reason, count in part.tally.images_left_out.most_common())
            rule = f"must give at least one record for {part.file}; it has {len(part.images)} images for it"
            rule += f", of which are left out: {reasons}" if reasons else ""
            raise ConfigError([Problem(part.option, str(part.source), rule, "give more images")])
    train = parts[0]
    if not train.tally.objects:
        rule = f"must have objects; its {train.tally.records:,} images have none that are kept"
        way_out = "`stage2 import coco` lists what is left out"
        raise ConfigError([Problem(train.option, str(train.source), rule, way_out)])
    if request.gpus > train.tally.records:
        rule = f"must be at most {train.tally.records:,}, the number of training records: each GPU of stage 1 needs one"
        raise ConfigError([Problem("--gpus", request.gpus, rule, "give more images, or fewer GPUs")])


def _measure(aside: Path, model: Path, request: ProjectRequest, shown: Shown) -> Measures:
    """Return the measures of the written records, in tokens of the model."""
    pairs = (request.train, request.held_out)
    rules = RecordRules(image_roots=tuple(str(one.images) for one in pairs if one))
    train, rest = (load_records(aside / "data" / name, rules=rules) for name in ("train.jsonl", "val.jsonl"))
    processor = AutoProcessor.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    coord_vocab(processor.tokenizer, str(model))
    prompt = Custom.model_fields["user_prompt"].default if request.gpus else CPU_PROMPT
    return measure(train, rest, processor, prompt, lambda them: shown(them, "answers", len(train) + len(rest)))


def _folders(request: ProjectRequest, folder: Path, ready: Path | None) -> ProjectFolders:
    """Return the project's folders. ready: the folder of a model that has its coordinate tokens already."""
    pairs = (request.train, request.held_out)
    images = tuple(dict.fromkeys(pair.images.resolve() for pair in pairs if pair))
    if ready is None:
        return ProjectFolders(folder, images, str(folder / PREPARED))
    if os.path.isdir(request.model):
        return ProjectFolders(folder, images, str(ready.resolve()), ready.resolve())
    return ProjectFolders(folder, images, request.model)


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
