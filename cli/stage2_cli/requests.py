"""Requests of the commands with the most options: each option is declared once, with its type, default and help.

What is imported here is light: the command line itself stands on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stage2_cli.options import AsJson, Changes, Cpu, Engine, JobFile, Longer, Mapped, Overwrite

if TYPE_CHECKING:
    from stage2_trainer.prepare.project_request import ProjectRequest

Config = Annotated[
    Path | None, typer.Argument(metavar="[CONFIG]", help="A training YAML, or a job file.", show_default=False)
]
PlainUnit = Literal["bins", "pixels"]


@dataclass(frozen=True)
class ProjectOptions:
    """The options of `stage2 init` and `stage2 train` but for the project's folder.

    annotation_units: None where the form of the annotations names them.
    """

    data: Annotated[
        Path, typer.Option(metavar="FOLDER_OR_FILE", help="A data file, or annotations that `stage2 import` reads.")
    ]
    model: Annotated[str, typer.Option(metavar="MODEL", help="A Qwen3-VL: a folder, or its name on a hub.")]
    val_data: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Held-out data file; without it, a share is held out.")
    ] = None
    images: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Folder of images, if not that of the data.")
    ] = None
    gpus: Annotated[int, typer.Option(help="GPUs of the machine; 0 trains a tiny model on its CPU.")] = 4
    annotation_units: Annotated[
        Literal["pixels", "shares", "thousandths"] | None,
        typer.Option("--units", help="Units of the annotations, where the form does not name them: see `import`."),
    ] = None

    def project(self, output: Path) -> ProjectRequest:
        """Return the request for a project in a folder."""
        from stage2_trainer.prepare.project_request import ProjectRequest

        return ProjectRequest(self.data, self.val_data, self.model, self.gpus, output, tuple(self.images or ()))


@dataclass(frozen=True)
class DataRequest:
    """The argument and the options of `stage2 data`."""

    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A data file, or a file or folder that `stage2 import` reads.")
    ]
    units: Annotated[
        Literal["bins", "pixels", "shares", "thousandths"] | None,
        typer.Option(help="Units that the records do not state (bins, pixels), or those of annotations: see `import`."),
    ] = None
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A model's folder, whose tokenizer measures the answers.")
    ] = None
    pictures: Annotated[Path | None, typer.Option(metavar="OUT.png", help="Draw some records on one page.")] = None
    ordered: Annotated[
        Path | None,
        typer.Option("--sorted", metavar="OUT.jsonl", help="Write the file with the objects of each record in rows."),
    ] = None
    unlabelled_by: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A model as for `infer`, trained on this file: estimate the share of objects that have no label, from "
            "what its answers to 200 images agree on. --pictures then draws these boxes.",
        ),
    ] = None
    add_labels: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.jsonl",
            help="With --unlabelled-by: let the model answer all images, and write the file with the boxes that have no"
            " label as further labels, in rows.",
        ),
    ] = None
    as_json: AsJson = False


@dataclass(frozen=True)
class EvaluationRequest:
    """The argument and the options of `stage2 evaluate`."""

    config: Config = None
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR", help="Checkpoint that answers the held-out records of CONFIG; may be repeated, to compare."
        ),
    ] = None
    rollouts: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE[@STEP]", help="Answers, JSON lines; may be repeated, to compare."),
    ] = None
    records: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Data file of the records; replaces that of CONFIG."),
    ] = None
    names: Annotated[
        Literal["exact", "normalised"], typer.Option(help="Classes: descriptions as they are, or normalised.")
    ] = "exact"
    units: Annotated[PlainUnit | None, typer.Option(help="Unit of plain numbers if the records do not state it.")] = (
        None
    )
    answers: Annotated[
        Literal["auto", "stage2", "qwen", "coco"],
        typer.Option(
            help="Form of --rollouts: coordinate tokens (stage2), JSON with plain numbers (qwen), or COCO's results."
        ),
    ] = "auto"
    answer_units: Annotated[
        PlainUnit | None,
        typer.Option(help="Unit of plain numbers in answers: bins from 0 to 1000, or pixels of the image."),
    ] = None
    annotations: Annotated[
        Path | None, typer.Option(metavar="FILE", help="COCO's annotation file, which names the categories of results.")
    ] = None
    answered_only: Annotated[
        bool, typer.Option("--answered-only", help="Leave out records that are not answered in all files.")
    ] = False
    missing: Annotated[
        Literal["refuse", "count-as-empty"], typer.Option(help="What to do with other records that lack an answer.")
    ] = "refuse"
    resamples: Annotated[int, typer.Option(min=0, help="Resamples of the bootstrap over images; 0: no intervals.")] = (
        500
    )
    against: Annotated[int, typer.Option(min=1, help="Number of the set that the others are compared with.")] = 1
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0
    longer: Annotated[
        str | None,
        typer.Option(
            metavar="NATS[,NATS...]",
            help="Biases against closing the list, for checkpoints; of several values the best is named.",
        ),
    ] = None
    objects_per_image: Annotated[
        float | None, typer.Option(min=0, help="Best is the --longer whose answers have about so many objects.")
    ] = None
    picture: Annotated[
        Path | None, typer.Option(metavar="OUT.png", help="Draw precision and recall over --longer.")
    ] = None
    as_json: AsJson = False


@dataclass(frozen=True)
class InferenceRequest:
    """The arguments and the options of `stage2 infer`."""

    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A checkpoint, a run's folder, an export, a hub's name, or a URL."),
    ]
    images: Annotated[
        list[Path], typer.Argument(metavar="IMAGE", help="Images, or folders of images, without the folders below.")
    ]
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder of pictures and boxes.jsonl.")] = Path("boxes")
    base: Annotated[
        str | None, typer.Option(metavar="DIR", help="Base model of an adapter; by default the recorded one.")
    ] = None
    prompt: Annotated[str | None, typer.Option(help="The question; by default that of the model's run.")] = None
    max_pixels: Annotated[
        int | None, typer.Option(min=1, help="Scale down images with more pixels; by default as in the model's run.")
    ] = None
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; by default as in the model's run.")
    ] = None
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; by default a GPU if there is one.")] = None
    longer: Longer = None
    as_json: AsJson = False


@dataclass(frozen=True)
class InspectionRequest:
    """The argument and the options of `stage2 inspect`."""

    config: Config = None
    sample: Annotated[int | None, typer.Option(metavar="N", help="Training record of CONFIG, from 0.")] = None
    record: Annotated[Path | None, typer.Option(metavar="FILE", help="Read records from this JSONL instead.")] = None
    line: Annotated[int | None, typer.Option(metavar="N", help="Record of --record, from 0.")] = None
    tokenizer: Annotated[Path | None, typer.Option(metavar="DIR", help="Model folder instead of CONFIG's.")] = None
    response_ids: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Answer as a JSON list of token ids; asks no server.")
    ] = None
    response_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Answer as text; asks no server.")] = None
    as_json: AsJson = False
    picture: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw ground truth and answer.")] = None
    rewards: Annotated[bool, typer.Option("--rewards", help="Score the answer with a GRPO run's rewards.")] = False


@dataclass(frozen=True)
class RunRequest:
    """The argument and the options of `stage2 run`."""

    file: JobFile
    mapped: Mapped = None
    work_dir: Annotated[Path, typer.Option(help="Folder of configuration, token, logs and empty volumes.")] = Path(
        "out/run"
    )
    engine: Engine = "vllm"
    overwrite: Overwrite = False
    changes: Changes = None
    cpu: Cpu = False
