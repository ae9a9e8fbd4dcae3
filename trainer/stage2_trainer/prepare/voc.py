"""Pascal VOC's annotations, an XML file for each image, as annotated images.

Format: http://host.robots.ox.ac.uk/pascal/VOC/voc2012/devkit_doc.pdf, section 10
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

from stage2_api.errors import refused
from stage2_trainer.data.files import read_regular
from stage2_trainer.prepare.annotations import (
    IMAGE_ENDINGS,
    AnnotatedImage,
    AnnotatedObject,
    AnnotatedSet,
    Box,
    LeftOut,
    Tally,
    four_numbers,
    stated_size,
)

ANNOTATIONS, IMAGES, SPLITS = "Annotations", "JPEGImages", Path("ImageSets", "Main")
MARKS = re.compile(r"(\s+[-+]?[0-9]+)+$")
CORNERS = ("xmin", "ymin", "xmax", "ymax")

NO_ANNOTATION = "its annotation file is missing"
BROKEN_ANNOTATION = "its annotation file cannot be read"
NO_NAME = "it has no name"
DIFFICULT = "it is marked as difficult: VOC counts it neither as found nor as missed (--difficult keeps it)"
FROM_ZERO = "a box has a coordinate below 1, where VOC's pixels begin; if they begin at 0 here, give --from-zero"


@dataclass(frozen=True)
class VocChoice:
    """What is read of a VOC folder.

    split: a list of ImageSets/Main; None reads all annotation files. difficult: keep objects that are marked so.
    from_zero: boxes are distances from the image's edge, not numbers of the first and last pixel, counted from 1.
    """

    split: str | None = None
    difficult: bool = False
    from_zero: bool = False


def read_voc(folder: Path, choice: VocChoice, tally: Tally) -> AnnotatedSet:
    """Return the images of a folder, by name. Raises ConfigError where it has no annotations, or lacks the split."""
    annotations = folder / ANNOTATIONS if os.path.isdir(folder / ANNOTATIONS) else folder
    images = folder / IMAGES if os.path.isdir(folder / IMAGES) else annotations
    files = _split_files(folder, annotations, choice.split) if choice.split else _files(annotations, ".xml")
    if not files:
        raise refused("FOLDER", str(folder), "must have annotation files (*.xml)", "give a folder such as VOC2012")

    def read() -> Iterator[AnnotatedImage]:
        pictures = _files(images, *IMAGE_ENDINGS)
        by_stem = {path.stem: path for path in reversed(pictures)}
        used = set()
        for file in files:
            try:
                image = _image(file, images, by_stem, choice, tally)
            except LeftOut as left_out:
                tally.leave_out_image(str(left_out), file.stem)
                continue
            used.add(image.path)
            yield replace(image, root=folder)
        stems = {file.stem for file in files}
        for path in pictures if not choice.split else ():
            if path not in used and path.stem not in stems:
                tally.leave_out_image(NO_ANNOTATION, path.name)

    return AnnotatedSet(len(files), read())


def _files(folder: Path, *endings: str) -> list[Path]:
    """Return the files of a folder with one of these endings, in upper or lower case, by name."""
    return [folder / name for name in sorted(os.listdir(folder)) if os.path.splitext(name)[1].lower() in endings]


def _split_files(folder: Path, annotations: Path, split: str) -> list[Path]:
    """Return the annotation files of a split: one name a line, which marks (1, -1) may follow."""
    path = folder / SPLITS / f"{split}.txt"
    try:
        lines = read_regular(path).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        there = sorted(one.stem for one in path.parent.glob("*.txt"))[:10]
        rule = f"must be a list of {folder / SPLITS}, which has {', '.join(there) or 'none'}"
        raise refused("--split", split, rule, "name one of them") from error
    names = [line.strip() for line in lines if line.strip()]
    pairs = [(annotations / f"{name}.xml", annotations / f"{MARKS.sub('', name)}.xml") for name in names]
    return list(dict.fromkeys(file if os.path.exists(file) else unmarked for file, unmarked in pairs))


def _image(file: Path, images: Path, by_stem: Mapping[str, Path], choice: VocChoice, tally: Tally) -> AnnotatedImage:
    """Return the image of an annotation file: the one that it names, or else the first with its own name.

    Raises LeftOut.
    """
    try:
        root = ElementTree.fromstring(read_regular(file))
    except FileNotFoundError as error:
        raise LeftOut(NO_ANNOTATION) from error
    except (OSError, ElementTree.ParseError, ValueError, LookupError) as error:  # LookupError: an unknown encoding
        raise LeftOut(BROKEN_ANNOTATION) from error
    if root.tag != "annotation":
        raise LeftOut(BROKEN_ANNOTATION)
    size = stated_size(root.findtext("size/width"), root.findtext("size/height"))
    if size is not None and not all(size):
        size = None  # some tools write zeros where they do not know it
    image = images / (root.findtext("filename", "").strip() or f"{file.stem}.jpg")
    if not os.path.isfile(image):  # false for a name that is too long, too
        image = by_stem.get(file.stem, images / f"{file.stem}.jpg")
    objects = []
    for element in root.findall("object"):
        try:
            objects.append(_object(element, choice, tally, file.stem))
        except LeftOut as left_out:
            tally.leave_out_object(str(left_out), f"{file.stem} {element.findtext('name', '').strip()}")
    return AnnotatedImage(file.stem, image, size, objects)


def _object(element: ElementTree.Element, choice: VocChoice, tally: Tally, name: str) -> AnnotatedObject:
    """Return the object of an element; a truncated object has the box of its visible part. Raises LeftOut."""
    desc = element.findtext("name", "").strip()
    if not desc:
        raise LeftOut(NO_NAME)
    if element.findtext("difficult", "0").strip().lower() in ("1", "true") and not choice.difficult:
        raise LeftOut(DIFFICULT)
    left, top, right, bottom = _corners(element)
    if choice.from_zero:
        return AnnotatedObject(desc, (left, top, right, bottom))
    if min(left, top) < 1:
        tally.change(FROM_ZERO, f"{name} {desc}")
    return AnnotatedObject(desc, (left - 1, top - 1, right, bottom))


def _corners(element: ElementTree.Element) -> Box:
    try:
        return four_numbers([float(element.findtext(f"bndbox/{corner}", "")) for corner in CORNERS])
    except ValueError:
        return four_numbers(None)
