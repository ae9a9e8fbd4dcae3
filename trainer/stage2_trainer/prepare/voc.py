"""Pascal VOC's annotations, an XML file for each image, as annotated images.

Format: http://host.robots.ox.ac.uk/pascal/VOC/voc2012/devkit_doc.pdf, section 10
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from stage2_api.errors import refused
from stage2_trainer.data.files import files_below, name_below, read_regular
from stage2_trainer.prepare.annotations import (
    BROKEN_BOX,
    BROKEN_OUTLINE,
    IMAGE_ENDINGS,
    REACH,
    SHARES,
    AnnotatedImage,
    AnnotatedObject,
    AnnotatedSet,
    Box,
    LeftOut,
    Outlines,
    Tally,
    Units,
    all_shares,
    is_number,
    stated_size,
)
from stage2_trainer.prepare.shapes import ROTATED_SHARES, rotated_object, shaped_object

ANNOTATIONS, IMAGES, SPLITS = "Annotations", "JPEGImages", Path("ImageSets", "Main")
WORD, MARK = re.compile(r"\S+"), re.compile("[-+]?[0-9]+")
LARGEST_ANNOTATION = 16 << 20  # bytes of an annotation file
PART = 1 << 16
MOST_ELEMENTS, DEEPEST = 400_000, 32  # of an annotation file
CORNERS = ("xmin", "ymin", "xmax", "ymax")
ROTATED_BOX = ("cx", "cy", "w", "h", "angle")  # of roLabelImg: centre, size, and radians clockwise

NO_ANNOTATION = "its annotation file is missing"
BROKEN_ANNOTATION = "its annotation file cannot be read"
NO_NAME = "it has no name"
DIFFICULT = "it is marked as difficult: VOC counts it neither as found nor as missed (--difficult keeps it)"
FROM_ZERO = "a box has a coordinate below 1, where VOC's pixels begin; if they begin at 0 here, give --from-zero"
BELOW = "annotation files of a folder below were read, too"
OWN_IMAGE = "an annotation file names an image that belongs to another one; the image with its own name was taken"
NAMED_IMAGE = "an annotation file names another image than that with its own name; the named one was taken"
SHARED_IMAGE = "an image has several annotation files, and a record for each"


@dataclass(frozen=True)
class VocChoice:
    """What is read of a VOC folder.

    split: a list of ImageSets/Main; None reads all annotation files. difficult: keep objects that are marked so.
    from_zero: boxes are distances from the image's edge, not numbers of the first and last pixel, counted from 1.
    """

    split: str | None = None
    difficult: bool = False
    from_zero: bool = False
    units: Units = "pixels"


def read_voc(folder: Path, choice: VocChoice, tally: Tally) -> AnnotatedSet:
    """Return the images of a folder and those below, by name.

    Raises ConfigError where it has no annotations, or lacks the split.
    """
    annotations = folder / ANNOTATIONS if os.path.isdir(folder / ANNOTATIONS) else folder
    images = folder / IMAGES if os.path.isdir(folder / IMAGES) else annotations
    if annotations == folder and (sets := sorted(path.parent.name for path in folder.glob(f"*/{ANNOTATIONS}"))):
        rule = f"has no {ANNOTATIONS} of its own, and data sets in {', '.join(sets)}"
        raise refused("FOLDER", str(folder), rule, f"give {folder / sets[0]}, say")
    there = _files(annotations, frozenset({".xml"}))
    files = _split_files(folder, annotations, there, choice.split) if choice.split else there
    if not files:
        raise refused("FOLDER", str(folder), "must have annotation files (*.xml)", "give a folder such as VOC2012")
    for below in sorted({name_below(file.parent, annotations) for file in files} - {"."}):
        tally.change(BELOW, below)

    def read() -> Iterator[AnnotatedImage]:
        pictures = _Pictures(annotations, images, files)
        for file in files:
            name = name_below(file, annotations)
            try:
                path = pictures.choose(file, tally, name)
                yield _image(file, path, Path(name).with_suffix("").as_posix(), folder, choice, tally)
            except LeftOut as left_out:
                tally.leave_out_image(left_out, name)
        for path in pictures.unused if not choice.split else ():
            tally.leave_out_image(NO_ANNOTATION, name_below(path, folder))

    return AnnotatedSet(len(files), read())


def _files(folder: Path, endings: frozenset[str]) -> list[Path]:
    """Return the files of a folder and below with one of these endings, in upper or lower case, by name."""
    return sorted(path for path in files_below(folder) if path.suffix.lower() in endings)


def _split_files(folder: Path, annotations: Path, there: Sequence[Path], split: str) -> list[Path]:
    """Return the annotation files of a split: one name a line, which marks (1, -1) may follow."""
    path = folder / SPLITS / f"{split}.txt"
    try:
        lines = read_regular(path).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        lists = sorted(text.stem for text in path.parent.glob("*.txt"))[:10]
        rule = f"must be a list of {folder / SPLITS}, which has {', '.join(lists) or 'none'}"
        raise refused("--split", split, rule, "name one of them") from error
    names = [line.strip() for line in lines if line.strip()]
    by_name = {name_below(file, annotations)[: -len(".xml")]: file for file in there}
    by_stem = _by_stem(there)

    def find(name: str) -> Path | None:
        plain = os.path.splitext(name)[0] if Path(name).suffix.lower() in IMAGE_ENDINGS else name
        same = by_stem.get(plain, [])
        return by_name.get(name) or by_name.get(plain) or (same[0] if len(same) == 1 else None)

    plain_names = [unmarked(name) for name in names]
    files = (
        find(name) or find(plain) or annotations / f"{plain}.xml"
        for name, plain in zip(names, plain_names, strict=True)
    )
    return list(dict.fromkeys(files))


def unmarked(name: str) -> str:
    """Return a line of a split without the marks behind its name."""
    first, *further = WORD.finditer(name)
    last = next((word for word in reversed(further) if not MARK.fullmatch(word[0])), first)
    return name[: last.end()]


def _by_stem(files: Sequence[Path]) -> dict[str, list[Path]]:
    by_stem: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        by_stem[file.stem].append(file)
    return by_stem


class _Pictures:
    """The images of a data set, and which of them belongs to which annotation file.

    An annotation file's own image has its name, in the same folder or as the only one. The image that it names counts
    more, unless that is the own image of another annotation file, or another one names it as well.
    """

    def __init__(self, annotations: Path, images: Path, files: Sequence[Path]) -> None:
        self._annotations, self._images = annotations, images
        self._pictures = _files(images, IMAGE_ENDINGS)
        self._by_name = {picture.with_suffix(""): picture for picture in reversed(self._pictures)}
        self._by_stem = _by_stem(self._pictures)
        self._stated = {file: name for file in files if (name := _stated_name(file))}
        self._own = {file: path for file in files if (path := self._own_image(file)) is not None}
        self._owners = Counter(self._own.values())
        named = {file: self._named_image(file) for file in files}
        self._named = {file: path for file, path in named.items() if path is not None}
        self._namings = Counter(self._named.values())
        self._used: Counter[Path] = Counter()

    def choose(self, file: Path, tally: Tally, name: str) -> Path:
        """Return the image of an annotation file; it may be missing."""
        own, named = self._own.get(file), self._named.get(file)
        path = named or own or self._folder(file) / self._stated.get(file, f"{file.stem}.jpg")
        if own is not None and named is not None and own != named:
            is_taken = self._namings[named] > 1 or self._owners[named] > 0
            path = own if is_taken else named
            tally.change(OWN_IMAGE if is_taken else NAMED_IMAGE, f"{name}: {name_below(path, self._images)}")
        self._used[path] += 1
        if self._used[path] == 2:
            tally.change(SHARED_IMAGE, name_below(path, self._images))
        return path

    @property
    def unused(self) -> list[Path]:
        """The images that no annotation file has chosen or bears the name of."""
        return [path for path in self._pictures if path not in self._used and path not in self._owners]

    def _folder(self, file: Path) -> Path:
        """Return the folder of images that matches an annotation file's."""
        return self._images / file.parent.relative_to(self._annotations)

    def _own_image(self, file: Path) -> Path | None:
        """Return the image with an annotation file's own name."""
        same = self._by_stem.get(file.stem, [])
        path = self._by_name.get(self._folder(file) / file.stem)
        return path or (same[0] if len(same) == 1 else None)

    def _named_image(self, file: Path) -> Path | None:
        """Return the image that an annotation file names, beside it or from the folder of all images."""
        if (name := self._stated.get(file)) is None:
            return None
        places = (self._folder(file) / name, self._images / name)
        return next((path for path in places if os.path.isfile(path)), None)  # false for a name that is too long, too


class _BoundedTree(ElementTree.TreeBuilder):
    """Builds the tree of an annotation file. Raises ValueError for one that no annotations need."""

    def __init__(self) -> None:
        super().__init__()
        self._elements, self._depth = 0, 0

    def start(self, tag: str, attrs: dict[str, str], /) -> ElementTree.Element:
        """Open an element."""
        self._elements, self._depth = self._elements + 1, self._depth + 1
        if self._elements > MOST_ELEMENTS:
            raise ValueError(f"it has more than {MOST_ELEMENTS:,} elements")
        if self._depth > DEEPEST:
            raise ValueError(f"its elements are nested deeper than {DEEPEST} levels")
        return super().start(tag, attrs)

    def end(self, tag: str, /) -> ElementTree.Element:
        """Close an element."""
        self._depth -= 1
        return super().end(tag)


def _parsed(file: Path) -> ElementTree.Element:
    """Return the root of an annotation file. Raises LeftOut."""
    try:
        parser = ElementTree.XMLParser(target=_BoundedTree())
        content = read_regular(file, LARGEST_ANNOTATION)
        for start in range(0, len(content), PART):  # a parser sees an error of the tree at the end of what it is fed
            parser.feed(content[start : start + PART])
        root: ElementTree.Element = parser.close()
    except FileNotFoundError as error:
        raise LeftOut(NO_ANNOTATION) from error
    except (OSError, ElementTree.ParseError, ValueError, LookupError) as error:  # LookupError: an unknown encoding
        raise LeftOut(BROKEN_ANNOTATION, str(error)) from error
    if root.tag != "annotation":
        raise LeftOut(BROKEN_ANNOTATION, f"its root is <{root.tag}>, not <annotation>")
    return root


def _stated_name(file: Path) -> str:
    """Return the name of the image that an annotation file states; empty if there is none."""
    try:
        return _parsed(file).findtext("filename", "").strip()
    except LeftOut:
        return ""


def _image(file: Path, path: Path, sample_id: str, root: Path, choice: VocChoice, tally: Tally) -> AnnotatedImage:
    """Return the image of an annotation file. Raises LeftOut."""
    annotation = _parsed(file)
    size = stated_size(annotation.findtext("size/width"), annotation.findtext("size/height"))
    objects = []
    for element in annotation.findall("object"):
        desc = element.findtext("name", "").strip()
        try:
            objects.append(_object(element, desc, choice, tally, sample_id))
        except LeftOut as left_out:
            tally.leave_out_object(left_out, f"{sample_id} {desc}")
    return AnnotatedImage(sample_id, path, size, objects, shares=choice.units == "shares", root=root)


def _object(element: ElementTree.Element, desc: str, choice: VocChoice, tally: Tally, name: str) -> AnnotatedObject:
    """Return the object of an element; a truncated object has the box of its visible part. Raises LeftOut."""
    if not desc:
        raise LeftOut(NO_NAME)
    if element.findtext("difficult", "0").strip().lower() in ("1", "true") and not choice.difficult:
        raise LeftOut(DIFFICULT)

    def from_edge(box: Box) -> Box:
        left, top, right, bottom = box
        if choice.from_zero or choice.units == "shares":
            return box
        if left < right and top < bottom and all_shares(box, REACH):
            raise LeftOut(SHARES, [*box])
        if min(left, top) < 1:
            tally.change(FROM_ZERO, f"{name} {desc}")
        return left - 1, top - 1, right, bottom

    if (rotated := element.find("robndbox")) is not None:
        if choice.units == "shares":
            raise LeftOut(ROTATED_SHARES)
        x, y, width, height, angle = _numbers(rotated, ROTATED_BOX)
        box = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
        return rotated_object(desc, box, angle, Outlines())
    outline = _outline(element)
    numbers = _box_numbers(element, beside_outline=bool(outline))
    turned = {key: element.findtext(key) or element.findtext(f"bndbox/{key}") for key in ("rotation", "angle")}
    further = {"segmentation": outline, "attributes": _attributes(element), **turned}
    return shaped_object(desc, further, numbers, from_edge, outlines=True, shares=choice.units == "shares")


def _box_numbers(element: ElementTree.Element, *, beside_outline: bool) -> list[float] | None:
    """Return the numbers of an object's box; None if it has none, or no numbers beside an outline. Raises LeftOut."""
    bounds = element.find("bndbox")
    try:
        return None if bounds is None else _numbers(bounds, CORNERS)
    except LeftOut:
        if beside_outline:
            return None
        raise


def _numbers(element: ElementTree.Element, tags: Sequence[str]) -> list[float]:
    """Return the numbers of an element. Raises LeftOut."""
    texts = [element.findtext(tag, "") for tag in tags]
    try:
        numbers = [float(text) for text in texts]
    except ValueError as error:
        raise LeftOut(BROKEN_BOX, texts) from error
    if not all(map(is_number, numbers)):
        raise LeftOut(BROKEN_BOX, texts)
    return numbers


def _outline(element: ElementTree.Element) -> list[list[float]]:
    """Return the polygon of an object (x1, y1, x2, ... or points with x and y), as COCO writes it. Raises LeftOut."""
    polygon = element.find("polygon")
    numbers = polygon.iter() if polygon is not None else ()
    texts = [number.text or "" for number in numbers if number.tag[:1] in ("x", "y")]
    try:
        return [[float(text) for text in texts]] if texts else []
    except ValueError as error:
        raise LeftOut(BROKEN_OUTLINE, texts) from error


def _attributes(element: ElementTree.Element) -> Mapping[str, str]:
    """Return the attributes that CVAT writes, by name."""
    attributes = element.findall("attributes/attribute")
    return {attribute.findtext("name", ""): attribute.findtext("value", "") for attribute in attributes}
