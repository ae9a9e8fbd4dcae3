"""The commands of `stage2 import`, one for each format; what they share is declared once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stage2_api.errors import ConfigError, Problem

if TYPE_CHECKING:
    from stage2_trainer.prepare.record_writer import RecordChoice

imports = typer.Typer(no_args_is_help=True, help="Make a data file of records from annotations of another format.")

Output = Annotated[Path, typer.Option(metavar="OUT.jsonl", help="The data file.")]
Geometry = Annotated[
    Literal["bbox", "poly"], typer.Option(help="Boxes, or outlines; where there is none, the box's corners.")
]
Order = Annotated[
    Literal["reading", "file"], typer.Option(help="Objects from top to bottom and left to right, or as they come.")
]
Classes = Annotated[str | None, typer.Option(metavar="A,B", help="Categories that are kept.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Most records.")]
MaxObjects = Annotated[int | None, typer.Option(min=1, help="Images with more objects are left out.")]


def _choice(
    geometry: Literal["bbox", "poly"],
    order: Literal["reading", "file"],
    classes: str | None,
    limit: int | None,
    max_objects: int | None,
) -> RecordChoice:
    from stage2_trainer.prepare.record_writer import RecordChoice

    kept = None if classes is None else frozenset(name.strip() for name in classes.split(",") if name.strip())
    if kept is not None and not kept:
        raise ConfigError([Problem("--classes", classes, "must name a category", "leave it out to keep all")])
    return RecordChoice(geometry=geometry, order=order, classes=kept, limit=limit, max_objects=max_objects)


def _numbered(text: str | None) -> list[str]:
    """Return names by their places: a blank one keeps its own, or those behind it would be others' names."""
    return [] if text is None else text.split(",")


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
) -> None:
    """Make records of a COCO file; what is left out is counted, each for its reason."""
    from stage2_cli.importing import import_coco

    choice = _choice(geometry, order, classes, limit, max_objects)
    raise typer.Exit(import_coco(annotations, images, output, choice))


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
) -> None:
    """Make records of a data set in the layout of Ultralytics' YOLO: boxes, or segments as polygons."""
    from stage2_cli.importing import import_yolo

    raise typer.Exit(import_yolo(data, split, output, _choice(geometry, order, classes, limit, max_objects)))


@imports.command()
def voc(  # noqa: PLR0913 - one parameter for each option
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="VOC2012, say, or a folder of images and XML.")],
    output: Output,
    split: Annotated[str | None, typer.Option(help="A list of ImageSets/Main; all annotations if not given.")] = None,
    difficult: Annotated[bool, typer.Option("--difficult", help="Keep objects that are marked as difficult.")] = False,
    from_zero: Annotated[
        bool, typer.Option("--from-zero", help="Boxes count from the image's edge, not from pixel 1.")
    ] = False,
    geometry: Geometry = "bbox",
    order: Order = "reading",
    classes: Classes = None,
    limit: Limit = None,
    max_objects: MaxObjects = None,
) -> None:
    """Make records of Pascal VOC's XML files: boxes, or the masks of SegmentationObject as polygons."""
    from stage2_cli.importing import import_voc
    from stage2_trainer.prepare.voc import VocChoice

    what = VocChoice(split, difficult=difficult, from_zero=from_zero, masks=geometry == "poly")
    raise typer.Exit(import_voc(folder, what, output, _choice(geometry, order, classes, limit, max_objects)))


@imports.command()
def hf(  # noqa: PLR0913 - one parameter for each option
    source: Annotated[str, typer.Argument(metavar="NAME_OR_DIR", help="A name on the hub, or save_to_disk's folder.")],
    output: Output,
    boxes: Annotated[
        Literal["coco", "voc", "yolo"],
        typer.Option(help="Four numbers of a box: x y width height, or x1 y1 x2 y2, or centre and size as shares."),
    ],
    split: Annotated[str | None, typer.Option(help="Needed where there are several.")] = None,
    names: Annotated[str | None, typer.Option(metavar="A,B", help="Names of numbered categories, from 0.")] = None,
    image: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of the images.")] = None,
    objects: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of the objects.")] = None,
    geometry: Geometry = "bbox",
    order: Order = "reading",
    classes: Classes = None,
    limit: Limit = None,
    max_objects: MaxObjects = None,
) -> None:
    """Make records of a data set of Hugging Face; images that lie inside it are written beside the data file."""
    from stage2_cli.importing import import_hub
    from stage2_trainer.prepare.hugging_face import HubChoice

    what = HubChoice(boxes, split, _numbered(names), image, objects)
    raise typer.Exit(import_hub(source, what, output, _choice(geometry, order, classes, limit, max_objects)))
