"""`stage2 import`: converts annotations of other formats into a data file of records."""

from __future__ import annotations

import os
from collections.abc import Callable
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stage2_api.errors import counted, refused
from stage2_cli.console import plain_console, printable, with_progress

if TYPE_CHECKING:
    from stage2_trainer.prepare.annotations import AnnotatedSet, Tally
    from stage2_trainer.prepare.record_writer import RecordChoice

imports = typer.Typer(no_args_is_help=True, help="Create a data file of records from annotations of another format.")

MOST_FILES = 10_000  # that are looked through for a name like a missing one

Shape = Literal["bbox", "poly"]
Sorting = Literal["reading", "file"]
Reference = Literal["auto", "shown", "raw"]
Split = Literal["box", "largest", "drop"]

Output = Annotated[Path, typer.Option(metavar="OUT.jsonl", help="The data file.")]
Geometry = Annotated[Shape, typer.Option(help="Boxes, or outlines; without an outline, the box's corners.")]
Order = Annotated[Sorting, typer.Option(help="Objects from top to bottom and left to right, or as in the file.")]
Classes = Annotated[str | None, typer.Option(metavar="A,B", help="Categories to keep; all by default.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Maximum number of records.")]
SplitObjects = Annotated[Split, typer.Option(help="Outline of an object of several parts, with --geometry poly.")]
Exif = Annotated[Reference, typer.Option(help="Pixels that annotations of an image rotated by EXIF refer to.")]
MaxObjects = Annotated[int | None, typer.Option(min=1, help="Leave out images with more objects.")]


@imports.command()
def coco(  # noqa: PLR0913 - one parameter for each option
    annotations: Annotated[Path, typer.Option(metavar="FILE", help="instances_*.json of COCO, or LVIS's file.")],
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
    """Import a COCO file; skipped items are counted by reason."""
    from stage2_trainer.prepare.coco import read_coco

    _require_folder("--images", images)
    choice = _choice(geometry, order, classes, limit, max_objects, exif, split_objects)
    _write(lambda tally: read_coco(annotations, images, tally, outlines=geometry == "poly"), output, choice)


@imports.command()
def yolo(  # noqa: PLR0913 - one parameter for each option
    data: Annotated[Path, typer.Argument(metavar="DATA", help="data.yaml of Ultralytics' layout, or its folder.")],
    output: Output,
    split: Annotated[str, typer.Option(help="train, val or test of data.yaml.")] = "train",
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
    _write(lambda tally: read_yolo(data, split, tally), output, choice)


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
    geometry: Geometry = "bbox",
    order: Order = "reading",
    classes: Classes = None,
    limit: Limit = None,
    max_objects: MaxObjects = None,
    exif: Exif = "auto",
    split_objects: SplitObjects = "box",
) -> None:
    """Import Pascal VOC's XML files: boxes, or their corners as polygons."""
    from stage2_trainer.prepare.voc import VocChoice, read_voc

    _require_folder("FOLDER", folder)
    what = VocChoice(split, difficult=difficult, from_zero=from_zero)
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
    what = HubChoice(boxes, split, numbered, image, objects)
    choice = _choice(geometry, order, classes, limit, max_objects, exif, split_objects)
    _write(lambda tally: read_hub(source, what, tally, outlines=geometry == "poly"), output, choice)


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
    from stage2_trainer.prepare.record_writer import check_new, write_records

    check_new(output)
    tally = Tally()
    images = read(tally)
    write_records(with_progress(images, "images", images.total), output, choice, tally)
    print_tally(tally, output)
    if not tally.records:
        output.unlink()
        console = plain_console(stderr=True)
        console.print("nothing was kept, and no file was written")
        for path, root in tally.missing:
            console.print(f"looked for {printable(str(path))}{_nearest(path, root)}")
        raise typer.Exit(os.EX_DATAERR)
    for folder in map(printable, sorted(tally.outside)):
        plain_console().print(
            f"  its images are in {folder}: name that in custom.image_roots, ROOT_IMAGE_DIR or `init --images`"
        )


def _nearest(path: Path, root: Path) -> str:
    """Return the file whose name is most like a missing one's; empty where none is."""
    from stage2_trainer.data.files import files_below

    below = {one.name: one for one in islice(files_below(root), MOST_FILES)}
    near = get_close_matches(path.name, below, n=1)
    return f"; there is {printable(str(below[near[0]]))}" if near else ""


def print_tally(tally: Tally, output: Path) -> None:
    """Print what was written, left out and changed."""
    console = plain_console()
    console.print(f"{printable(str(output))}: {counted(tally.records, 'record')}, {counted(tally.objects, 'object')}")
    for head, noun, reasons in (
        ("left out:", "image", tally.images_left_out),
        ("left out:", "object", tally.objects_left_out),
        ("noted", "time", tally.changed),
    ):
        for reason, count in reasons.most_common():
            names = tally.names[reason]
            more = ", …" if count > len(names) else ""
            console.print(f"  {head} {counted(count, noun)}: {reason} ({', '.join(map(printable, names))}{more})")
