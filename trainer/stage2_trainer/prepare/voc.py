"""Pascal VOC's annotations, an XML file for each image, as annotated images.

Format: http://host.robots.ox.ac.uk/pascal/VOC/voc2012/devkit_doc.pdf, section 10
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from xml.etree import ElementTree

from PIL.Image import DecompressionBombError

from stage2_trainer.data.files import read_regular
from stage2_trainer.data.images import ImageError, read_header
from stage2_trainer.prepare.annotations import (
    IMAGE_ENDINGS,
    AnnotatedImage,
    AnnotatedObject,
    AnnotatedSet,
    Box,
    LeftOut,
    Outlines,
    Tally,
    four_numbers,
    number_of,
    refused,
    said_size,
)
from stage2_trainer.prepare.outlines import outlines_by_number

ANNOTATIONS, IMAGES, SPLITS = "Annotations", "JPEGImages", Path("ImageSets", "Main")
MASKS = "SegmentationObject"
MARKS = re.compile(r"(\s+[-+]?[0-9]+)+$")
CORNERS = ("xmin", "ymin", "xmax", "ymax")

NO_ANNOTATION = "its annotation file is missing"
BROKEN_ANNOTATION = "its annotation file cannot be read"
NO_NAME = "it has no name"
DIFFICULT = "it is marked as difficult: VOC counts it neither as found nor as missed (--difficult keeps it)"
BROKEN_MASK = "its mask of SegmentationObject cannot be read: its objects have boxes alone"
OTHER_MASK = "its mask of SegmentationObject has another size than its image: its objects have boxes alone"
NO_OBJECT = "its mask of SegmentationObject has a number that no object of its annotation file has"
NO_PIXELS = "its mask of SegmentationObject has no pixel of an object, whose outline is the corners of its box"
FROM_ZERO = "a box has a coordinate below 1, where VOC's pixels begin; if they begin at 0 here, give --from-zero"


@dataclass(frozen=True)
class VocChoice:
    """What is read of a VOC folder.

    split: a list of ImageSets/Main; None reads all annotation files. difficult: objects that are marked so are kept.
    masks: outlines are read of SegmentationObject, where an image has such a file.
    from_zero: boxes are distances from the image's edge, not numbers of its first and last pixel, counted from 1.
    """

    split: str | None = None
    difficult: bool = False
    from_zero: bool = False
    masks: bool = False


def read_voc(folder: Path, choice: VocChoice, tally: Tally) -> AnnotatedSet:
    """Return the images of a folder, by name. Raises ConfigError where it is none, or lacks the split."""
    annotations = folder / ANNOTATIONS if os.path.isdir(folder / ANNOTATIONS) else folder
    images = _Images(folder / IMAGES if os.path.isdir(folder / IMAGES) else annotations)
    files = _listed(folder, annotations, choice.split) if choice.split else _files(annotations, ".xml")
    if not files:
        raise refused("FOLDER", str(folder), "must have annotation files (*.xml)", "give the folder of VOC2012, say")

    def read() -> Iterator[AnnotatedImage]:
        for file in files:
            try:
                yield _image(file, images, choice, tally)
            except LeftOut as left_out:
                tally.leave_out_image(str(left_out), file.stem)
        if not choice.split:
            stems = {file.stem for file in files}
            for path in images.not_taken():
                if path.stem not in stems:
                    tally.leave_out_image(NO_ANNOTATION, path.name)

    return AnnotatedSet(len(files), read())


class _Images:
    """The images of a folder, which is listed once, where annotations name files that it has not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._taken: set[Path] = set()

    def named(self, file_name: str, stem: str) -> Path:
        """Return the file that an annotation names, or the first of its own name where that is not there."""
        path = self.folder / (file_name or f"{stem}.jpg")
        if not os.path.isfile(path):  # which answers of a name that is too long, too
            path = self._by_stem.get(stem, self.folder / f"{stem}.jpg")
        self._taken.add(path)
        return path

    def not_taken(self) -> Iterator[Path]:
        """Yield the images that no annotation named, nor had the name of."""
        return (path for path in _files(self.folder, *IMAGE_ENDINGS) if path not in self._taken)

    @cached_property
    def _by_stem(self) -> Mapping[str, Path]:
        return {path.stem: path for path in reversed(_files(self.folder, *IMAGE_ENDINGS))}


def _files(folder: Path, *endings: str) -> list[Path]:
    """Return the files of a folder with one of these endings, in whichever case, by name."""
    return [folder / name for name in sorted(os.listdir(folder)) if os.path.splitext(name)[1].lower() in endings]


def _listed(folder: Path, annotations: Path, split: str) -> list[Path]:
    """Return the annotation files of a split: one a line, behind whose name marks (1, -1) may stand."""
    path = folder / SPLITS / f"{split}.txt"
    try:
        lines = read_regular(path).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        there = sorted(one.stem for one in path.parent.glob("*.txt"))[:10]
        rule = f"must be a list of {folder / SPLITS}, which has {', '.join(there) or 'none'}"
        raise refused("--split", split, rule, "name one of them") from error
    names = [line.strip() for line in lines if line.strip()]
    whole = (annotations / f"{name}.xml" for name in names)
    marked = (annotations / f"{MARKS.sub('', name)}.xml" for name in names)
    pairs = zip(whole, marked, strict=True)
    return list(dict.fromkeys(file if os.path.exists(file) else other for file, other in pairs))


def _image(file: Path, images: _Images, choice: VocChoice, tally: Tally) -> AnnotatedImage:
    """Return the image of an annotation file. Raises LeftOut."""
    try:
        root = ElementTree.fromstring(read_regular(file))
    except FileNotFoundError as error:
        raise LeftOut(NO_ANNOTATION) from error
    except (OSError, ElementTree.ParseError, ValueError, LookupError) as error:  # LookupError: an unknown encoding
        raise LeftOut(BROKEN_ANNOTATION) from error
    if root.tag != "annotation":
        raise LeftOut(BROKEN_ANNOTATION)
    size, image = _size(root), images.named(root.findtext("filename", "").strip(), file.stem)
    place = images.folder.parent if images.folder.name == IMAGES else images.folder
    mask = place / MASKS / f"{file.stem}.png"
    elements = root.findall("object")
    outlines = (
        _outlines(mask, size or _shown_size(image), len(elements), tally)
        if choice.masks and os.path.exists(mask)
        else {}
    )
    objects = list(_objects(elements, choice, tally, file.stem, outlines))
    return AnnotatedImage(file.stem, image, size, objects)


def _shown_size(image: Path) -> tuple[int, int] | None:
    """Return an image's own size; None where it cannot be read, for which the writer leaves it out."""
    try:
        return read_header(str(image)).size
    except ImageError:
        return None


def _outlines(mask: Path, size: tuple[float, float] | None, objects: int, tally: Tally) -> Mapping[int, Outlines]:
    """Return the outlines of a mask's objects, numbered from 1 in the order of the annotation file's."""
    try:
        found_size, outlines = outlines_by_number(mask)
    except (OSError, ValueError, SyntaxError, DecompressionBombError):  # what Pillow's decoders raise
        tally.change(BROKEN_MASK, mask.stem)
        return {}
    if size is not None and size != found_size:
        tally.change(OTHER_MASK, mask.stem)
        return {}
    for number in outlines:
        if number > objects:
            tally.leave_out_object(NO_OBJECT, f"{mask.stem} {number}")
    for number in range(1, objects + 1):
        if number not in outlines:
            tally.change(NO_PIXELS, f"{mask.stem} {number}")
    return outlines


def _size(root: ElementTree.Element) -> tuple[float, float] | None:
    """Return the size that the annotation says; None where it says none, or writes zeros for that."""
    said = said_size(root.findtext("size/width"), root.findtext("size/height"))
    return said if said is not None and all(said) else None


def _objects(
    elements: Sequence[ElementTree.Element],
    choice: VocChoice,
    tally: Tally,
    name: str,
    outlines: Mapping[int, Outlines],
) -> Iterator[AnnotatedObject]:
    for number, element in enumerate(elements, start=1):
        try:
            yield replace(_object(element, choice, tally, name), outlines=outlines.get(number, Outlines()))
        except LeftOut as left_out:
            tally.leave_out_object(str(left_out), f"{name} {element.findtext('name', '').strip()}")


def _object(element: ElementTree.Element, choice: VocChoice, tally: Tally, name: str) -> AnnotatedObject:
    """Return the object of an element; of one that is truncated the box is of what is to be seen. Raises LeftOut."""
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
        return four_numbers([number_of(element.findtext(f"bndbox/{corner}", "")) for corner in CORNERS])
    except ValueError:
        return four_numbers(None)
