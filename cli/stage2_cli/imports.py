"""`stage2 import`: converts annotations of other formats into a data file of records."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stage2_api.errors import EXIT_DATA, counted, refused
from stage2_cli.console import with_progress
from stage2_report.terminal import Terminal

if TYPE_CHECKING:
    from stage2_trainer.prepare.annotations import AnnotatedSet, Tally
    from stage2_trainer.prepare.record_writer import RecordChoice

imports = typer.Typer(no_args_is_help=True, help="Create a data file of records from annotations of another format.")

COMMONEST = 3  # reasons that an import without objects names

Shape = Literal["bbox", "poly"]
Sorting = Literal["reading", "file"]
Reference = Literal["auto", "shown", "raw"]
Split = Literal["box", "largest", "drop"]
Units = Literal["pixels", "shares"]
ChatUnits = Literal["pixels", "shares", "thousandths"]

Output = Annotated[Path, typer.Option(metavar="OUT.jsonl", help="The data file.")]
Geometry = Annotated[Shape, typer.Option(help="Boxes, or outlines; without an outline, the box's corners.")]
Order = Annotated[
    Sorting, typer.Option(help="Objects in rows from top to bottom, each from left to right, or as in the file.")
]
Classes = Annotated[str | None, typer.Option(metavar="A,B", help="Categories to keep; all by default.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Maximum number of records.")]
SplitObjects = Annotated[Split, typer.Option(help="Outline of an object of several parts, with --geometry poly.")]
Pixels = Annotated[
    Units, typer.Option("--units", help="Coordinates are pixels, or shares of width and height, 0 to 1.")
]
Exif = Annotated[Reference, typer.Option(help="Pixels that annotations of an image rotated by EXIF refer to.")]
MaxObjects = Annotated[int | None, typer.Option(min=1, help="Leave out images with more objects.")]


@imports.command()
def coco(  # noqa: PLR0913 - one parameter for each option
    annotations: Annotated[Path, typer.Option(metavar="FILE", help="instances_*.json of COCO, or LVIS's file.")],
    images: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the images.")],
    output: Output,
    units: Pixels = "pixels",
    geometry: Geometry = "bbox",
    order: Order = "reading",
    classes: Classes = None,
    limit: Limit = None,
    max_objects: MaxObjects = None,
    exif: Exif = "auto",
    split_objects: SplitObjects = "box",
) -> None:
    """Import a COCO file; skipped items are counted by reason."""
    from stage2_trainer.prepare.coco import read_coco

    _require_folder("--images", images)
    choice = _choice(geometry, order, classes, limit, max_objects, exif, split_objects)
    poly = geometry == "poly"
    _write(lambda tally: read_coco(annotations, images, tally, outlines=poly, units=units), output, choice)


@imports.command()
def yolo(  # noqa: PLR0913 - one parameter for each option
    data: Annotated[Path, typer.Argument(metavar="DATA", help="data.yaml of Ultralytics' layout, or its folder.")],
    output: Output,
    split: Annotated[str, typer.Option(help="train, val or test of data.yaml.")] = "train",
    units: Pixels = "shares",
    geometry: Geometry = "bbox",
    order: Order = "reading",
    classes: Classes = None,
    limit: Limit = None,
    max_objects: MaxObjects = None,
    exif: Exif = "auto",
    split_objects: SplitObjects = "box",
) -> None:
    """Import a data set in the layout of Ultralytics' YOLO: boxes, or segments as polygons."""
    from stage2_trainer.prepare.yolo import read_yolo

    choice = _choice(geometry, order, classes, limit, max_objects, exif, split_objects)
    _write(lambda tally: read_yolo(data, split, tally, units=units), output, choice)


@imports.command()
def voc(  # noqa: PLR0913 - one parameter for each option
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
    geometry: Geometry = "bbox",
    order: Order = "reading",
    classes: Classes = None,
    limit: Limit = None,
    max_objects: MaxObjects = None,
    exif: Exif = "auto",
    split_objects: SplitObjects = "box",
) -> None:
    """Import Pascal VOC's XML files: boxes, or polygons."""
    from stage2_trainer.prepare.voc import VocChoice, read_voc

    _require_folder("FOLDER", folder)
    what = VocChoice(split, difficult=difficult, from_zero=from_zero, units=units)
    choice = _choice(geometry, order, classes, limit, max_objects, exif, split_objects)
    _write(lambda tally: read_voc(folder, what, tally), output, choice)


@imports.command()
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
    geometry: Geometry = "bbox",
    order: Order = "reading",
    classes: Classes = None,
    limit: Limit = None,
    max_objects: MaxObjects = None,
    exif: Exif = "auto",
    split_objects: SplitObjects = "box",
) -> None:
    """Import a data set of Hugging Face; images inside it are written beside the data file."""
    from stage2_trainer.prepare.hugging_face import HubChoice, read_hub

    numbered = [] if names is None else names.split(",")  # a blank name keeps its number
    what = HubChoice(boxes, split, numbered, image, objects, units)
    choice = _choice(geometry, order, classes, limit, max_objects, exif, split_objects)
    _write(lambda tally: read_hub(source, what, tally, outlines=geometry == "poly"), output, choice)


@imports.command()
def labelme(  # noqa: PLR0913 - one parameter for each option
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of LabelMe's JSON files and images.")],
    output: Output,
    geometry: Geometry = "bbox",
    order: Order = "reading",
    classes: Classes = None,
    limit: Limit = None,
    max_objects: MaxObjects = None,
    exif: Exif = "auto",
    split_objects: SplitObjects = "box",
) -> None:
    """Import LabelMe's JSON files, one for each image; an image inside its file is written beside the data file."""
    from stage2_trainer.prepare.labelme import read_labelme

    _require_folder("FOLDER", folder)
    choice = _choice(geometry, order, classes, limit, max_objects, exif, split_objects)
    _write(lambda tally: read_labelme(folder, tally), output, choice)


@imports.command()
def labelstudio(  # noqa: PLR0913 - one parameter for each option
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Label Studio's export, JSON or JSON-MIN.")],
    images: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the images.")],
    output: Output,
    geometry: Geometry = "bbox",
    order: Order = "reading",
    classes: Classes = None,
    limit: Limit = None,
    max_objects: MaxObjects = None,
    exif: Exif = "auto",
    split_objects: SplitObjects = "box",
) -> None:
    """Import a Label Studio export: boxes, polygons and ellipses of each task's latest annotation."""
    from stage2_trainer.prepare.label_studio import read_label_studio

    _require_folder("--images", images)
    choice = _choice(geometry, order, classes, limit, max_objects, exif, split_objects)
    _write(lambda tally: read_label_studio(file, images, tally), output, choice)


@imports.command()
def chat(  # noqa: PLR0913 - one parameter for each option
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines, or one list, of ms-swift or Qwen-VL.")],
    images: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the images.")],
    output: Output,
    units: Annotated[
        ChatUnits | None,
        typer.Option(
            help="Units of bbox_2d in answers: pixels (Qwen2.5-VL), or thousandths of the sides, 0 to 1000 (Qwen3-VL). "
            "ms-swift's objects name their own."
        ),
    ] = None,
    geometry: Geometry = "bbox",
    order: Order = "reading",
    classes: Classes = None,
    limit: Limit = None,
    max_objects: MaxObjects = None,
    exif: Exif = "auto",
    split_objects: SplitObjects = "box",
) -> None:
    """Import grounding data in the form of a chat: ms-swift's objects, or Qwen-VL's answers with bbox_2d."""
    from stage2_trainer.prepare.chat import read_chat

    _require_folder("--images", images)
    choice = _choice(geometry, order, classes, limit, max_objects, exif, split_objects)
    _write(lambda tally: read_chat(file, images, tally, units=units), output, choice)


def _choice(
    geometry: Shape,
    order: Sorting,
    classes: str | None,
    limit: int | None,
    max_objects: int | None,
    exif: Reference,
    split_objects: Split,
) -> RecordChoice:
    from stage2_trainer.prepare.record_writer import RecordChoice

    kept = None if classes is None else frozenset(name.strip() for name in classes.split(",") if name.strip())
    if kept is not None and not kept:
        raise refused("--classes", classes, "must name a category", "leave it out to keep all")
    return RecordChoice(
        geometry=geometry,
        order=order,
        classes=kept,
        limit=limit,
        max_objects=max_objects,
        exif=exif,
        split_objects=split_objects,
    )


def _require_folder(option: str, folder: Path) -> None:
    if not os.path.isdir(folder):
        raise refused(option, str(folder), "must be a folder", "check the path")


def _write(read: Callable[[Tally], AnnotatedSet], output: Path, choice: RecordChoice) -> None:
    """Write the records of a data set, and print a summary. Raises ConfigError."""
    from stage2_trainer.prepare.annotations import Tally
    from stage2_trainer.prepare.record_writer import NothingKept, check_new, write_records

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
