"""`stage2 import`: converts annotations of other formats into a data file of records."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stage2_api.errors import EXIT_DATA, counted, refused
from stage2_cli.console import with_progress
from stage2_cli.options import spread
from stage2_report.terminal import Terminal

if TYPE_CHECKING:
    from stage2_trainer.prepare.annotations import AnnotatedSet, Tally
    from stage2_trainer.prepare.record_writer import RecordChoice

imports = typer.Typer(no_args_is_help=True, help="Create a data file of records from annotations of another format.")

COMMONEST = 3  # reasons that an import without objects names

Units = Literal["pixels", "shares"]
Output = Annotated[Path, typer.Option(metavar="OUT.jsonl", help="The data file.")]
Pixels = Annotated[
    Units, typer.Option("--units", help="Coordinates are pixels, or shares of width and height, 0 to 1.")
]


@dataclass(frozen=True)
class RecordOptions:
    """Options of every import: which records it writes, and how."""

    geometry: Annotated[
        Literal["bbox", "poly"], typer.Option(help="Boxes, or outlines; without an outline, the box's corners.")
    ] = "bbox"
    order: Annotated[
        Literal["reading", "file"],
        typer.Option(help="Objects in rows from top to bottom, each from left to right, or as in the file."),
    ] = "reading"
    classes: Annotated[str | None, typer.Option(metavar="A,B", help="Categories to keep; all by default.")] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of records.")] = None
    max_objects: Annotated[int | None, typer.Option(min=1, help="Leave out images with more objects.")] = None
    exif: Annotated[
        Literal["auto", "shown", "raw"],
        typer.Option(help="Pixels that annotations of an image rotated by EXIF refer to."),
    ] = "auto"
    split_objects: Annotated[
        Literal["box", "largest", "drop"],
        typer.Option(help="Outline of an object of several parts, with --geometry poly."),
    ] = "box"

    def choice(self) -> RecordChoice:
        """Raises ConfigError for --classes without a name."""
        from stage2_trainer.prepare.record_writer import RecordChoice

        kept = None if self.classes is None else frozenset(filter(None, map(str.strip, self.classes.split(","))))
        if kept is not None and not kept:
            raise refused("--classes", self.classes, "must name a category", "leave it out to keep all")
        return RecordChoice(**{**vars(self), "classes": kept})


@imports.command()
@spread
def coco(
    annotations: Annotated[Path, typer.Option(metavar="FILE", help="instances_*.json of COCO, or LVIS's file.")],
    images: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the images.")],
    output: Output,
    units: Pixels = "pixels",
    *,
    records: RecordOptions,
) -> None:
    """Import a COCO file; skipped items are counted by reason."""
    from stage2_trainer.prepare.coco import read_coco

    _require_folder("--images", images)
    outlines = records.geometry == "poly"
    _write(lambda tally: read_coco(annotations, images, tally, outlines=outlines, units=units), output, records)


@imports.command()
@spread
def yolo(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="data.yaml of Ultralytics' layout, or its folder.")],
    output: Output,
    split: Annotated[str, typer.Option(help="train, val or test of data.yaml.")] = "train",
    units: Pixels = "shares",
    *,
    records: RecordOptions,
) -> None:
    """Import a data set in the layout of Ultralytics' YOLO: boxes, or segments as polygons."""
    from stage2_trainer.prepare.yolo import read_yolo

    _write(lambda tally: read_yolo(data, split, tally, units=units), output, records)


@imports.command()
@spread
def voc(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder such as VOC2012, or one of images and XML.")
    ],
    output: Output,
    split: Annotated[str | None, typer.Option(help="A list of ImageSets/Main; all annotations by default.")] = None,
    difficult: Annotated[bool, typer.Option("--difficult", help="Keep objects that are marked as difficult.")] = False,
    from_zero: Annotated[
        bool, typer.Option("--from-zero", help="Boxes count from the image's edge, not from pixel 1.")
    ] = False,
    units: Pixels = "pixels",
    *,
    records: RecordOptions,
) -> None:
    """Import Pascal VOC's XML files: boxes, or polygons."""
    from stage2_trainer.prepare.voc import VocChoice, read_voc

    _require_folder("FOLDER", folder)
    what = VocChoice(split, difficult=difficult, from_zero=from_zero, units=units)
    _write(lambda tally: read_voc(folder, what, tally), output, records)


@imports.command()
@spread
def hf(  # noqa: PLR0913 - one parameter for each option
    source: Annotated[str, typer.Argument(metavar="NAME_OR_DIR", help="A name on the hub, or save_to_disk's folder.")],
    output: Output,
    boxes: Annotated[
        Literal["coco", "voc", "yolo"],
        typer.Option(help="A box is x y width height (coco), x1 y1 x2 y2 (voc), or centre and size as shares (yolo)."),
    ],
    split: Annotated[str | None, typer.Option(help="Split to import; required if there are several.")] = None,
    names: Annotated[str | None, typer.Option(metavar="A,B", help="Names of numbered categories, from 0.")] = None,
    image: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of the images.")] = None,
    objects: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of the objects.")] = None,
    units: Annotated[
        Units | None, typer.Option(help="Units of boxes: by default shares for --boxes yolo, otherwise pixels.")
    ] = None,
    *,
    records: RecordOptions,
) -> None:
    """Import a data set of Hugging Face; images inside it are written beside the data file."""
    from stage2_trainer.prepare.hugging_face import HubChoice, read_hub

    numbered = [] if names is None else names.split(",")  # a blank name keeps its number
    what = HubChoice(boxes, split, numbered, image, objects, units)
    _write(lambda tally: read_hub(source, what, tally, outlines=records.geometry == "poly"), output, records)


@imports.command()
@spread
def labelme(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of LabelMe's JSON files and images.")],
    output: Output,
    *,
    records: RecordOptions,
) -> None:
    """Import LabelMe's JSON files, one for each image; an image inside its file is written beside the data file."""
    from stage2_trainer.prepare.labelme import read_labelme

    _require_folder("FOLDER", folder)
    _write(lambda tally: read_labelme(folder, tally), output, records)


@imports.command()
@spread
def labelstudio(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Label Studio's export, JSON or JSON-MIN.")],
    images: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the images.")],
    output: Output,
    *,
    records: RecordOptions,
) -> None:
    """Import a Label Studio export: boxes, polygons and ellipses of each task's latest annotation."""
    from stage2_trainer.prepare.label_studio import read_label_studio

    _require_folder("--images", images)
    _write(lambda tally: read_label_studio(file, images, tally), output, records)


@imports.command()
@spread
def chat(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines, or one list, of ms-swift or Qwen-VL.")],
    images: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the images.")],
    output: Output,
    units: Annotated[
        Literal["pixels", "shares", "thousandths"] | None,
        typer.Option(
            help="Units of bbox_2d in answers: pixels (Qwen2.5-VL), or thousandths of the sides, 0 to 1000 (Qwen3-VL). "
            "ms-swift's objects name their own."
        ),
    ] = None,
    *,
    records: RecordOptions,
) -> None:
    """Import grounding data in the form of a chat: ms-swift's objects, or Qwen-VL's answers with bbox_2d."""
    from stage2_trainer.prepare.chat import read_chat

    _require_folder("--images", images)
    _write(lambda tally: read_chat(file, images, tally, units=units), output, records)


def _require_folder(option: str, folder: Path) -> None:
    if not os.path.isdir(folder):
        raise refused(option, str(folder), "must be a folder", "check the path")


def _write(read: Callable[[Tally], AnnotatedSet], output: Path, records: RecordOptions) -> None:
    """Write the records of a data set, and print a summary. Raises ConfigError."""
    from stage2_trainer.prepare.annotations import Tally
    from stage2_trainer.prepare.record_writer import NothingKept, check_new, write_records

    choice = records.choice()
    check_new(output)
    tally = Tally()
    images = read(tally)
    try:
        write_records(with_progress(images, "images", images.total), output, choice, tally)
    except NothingKept:
        _print_loss(tally, output)
        raise typer.Exit(EXIT_DATA) from None
    print_tally(tally, output)
    for folder in sorted(tally.outside):
        Terminal().print(
            f"  its images are in {folder}: name that in custom.image_roots, ROOT_IMAGE_DIR or `init --images`"
        )


def print_tally(tally: Tally, output: Path) -> None:
    """Print what was written, left out and changed."""
    console = Terminal()
    console.print(f"{output}: {counted(tally.records, 'record')}, {counted(tally.objects, 'object')}")
    for line in (*_left_out(tally), *_noted(tally)):
        console.print(f"  {line}")
    for line in _missing(tally):
        console.print(f"  {line}")


def _print_loss(tally: Tally, output: Path) -> None:
    """Print why no object was kept."""
    console = Terminal(stderr=True)
    console.print(f"no object was kept, and {output} was not written; the commonest reasons:")
    lines = [*_left_out(tally), *_noted(tally)]
    if tally.without_objects and not tally.objects_left_out:
        lines.insert(0, f"{counted(tally.without_objects, 'image')} without an object in the annotations")
    for line in (*lines[:COMMONEST], *_missing(tally)):
        console.print(f"  {line}")


def _left_out(tally: Tally) -> list[str]:
    """Return a line for each reason why images and objects were left out, the commonest first."""
    images, objects = tally.images_left_out.most_common(), tally.objects_left_out.most_common()
    reasons = [(count, "image", reason) for reason, count in images]
    reasons += [(count, "object", reason) for reason, count in objects]
    reasons.sort(key=lambda reason: -reason[0])
    return [f"left out: {counted(count, noun)}: {reason} ({_names(tally, reason)})" for count, noun, reason in reasons]


def _noted(tally: Tally) -> list[str]:
    return [
        f"noted {counted(count, 'time')}: {reason} ({_names(tally, reason)})"
        for reason, count in tally.changed.most_common()
    ]


def _names(tally: Tally, reason: str) -> str:
    return ", ".join(tally.names[reason]) + (", …" if reason in tally.unnamed else "")


def _missing(tally: Tally) -> list[str]:
    """Return a line for each of the first missing files, with the one that it may be."""
    from stage2_trainer.data.nearest_file import FilesBelow

    below = {root: FilesBelow(root) for root in set(tally.missing.values())}
    lines = []
    for path, root in tally.missing.items():
        near = below[root].nearest(path)
        meant = f"; there is {near[0]}: {near[1]}" if near else ""
        lines.append(f"looked for {path}{meant}")
    return lines
