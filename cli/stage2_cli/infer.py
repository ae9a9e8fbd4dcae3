"""`stage2 infer`: the objects of images as a model lists them, drawn, and as JSON in pixels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from stage2_api.errors import ConfigError, Problem, counted, refused
from stage2_api.log_lines import json_text, print_error
from stage2_cli.requests import InferenceRequest
from stage2_report.terminal import Terminal, print_json
from stage2_trainer.data.images import ImageError, load_image
from stage2_trainer.prepare.annotations import IMAGE_ENDINGS
from stage2_trainer.process.activity import ACTIVITY

if TYPE_CHECKING:
    from stage2_trainer.infer.answered_image import AnsweredImage

RESULTS = "boxes.jsonl"


def infer_images(request: InferenceRequest) -> int:
    """Answer each image; draw it and write a JSON line into the output folder; return 0.

    Raises ConfigError, before the model is loaded, for a named image that cannot be read.
    """
    found, output = _readable(request.images), request.output
    _check_output(output, found)
    from stage2_trainer.infer.model import Model

    asked = {name: getattr(request, name) for name in ("prompt", "max_pixels", "max_new_tokens")}
    options = {name: value for name, value in asked.items() if value is not None}
    loaded = Model(request.model, base=request.base, device=request.device, longer=request.longer, **options)
    output.mkdir(parents=True, exist_ok=True)
    names = _picture_names(found)
    lines = (output / RESULTS).open("w", encoding="utf-8")
    with ACTIVITY.doing("answering", len(found), "images") as doing, lines as results:
        for image, name in zip(found, names, strict=True):
            answer = loaded.answer(image)
            answer.picture().save(output / name)
            document = _document(answer, output / name)
            results.write(f"{json_text(document)}\n")
            results.flush()
            if request.as_json:
                print_json(document)
            else:
                _show(answer, output / name)
            doing.advance(1)
    if not request.as_json:
        Terminal().print(f"{output / RESULTS}: {counted(len(found), 'image')}, boxes in pixels")
    return os.EX_OK


def _readable(images: Sequence[Path]) -> list[Path]:
    """Return the images, those of a folder by name; what cannot be read in a folder is left out, and printed.

    Raises ConfigError with each image that was named and cannot be read, and if no image is left.
    """
    problems = [
        Problem("IMAGE", str(image), "the folder has no images", "name images, or folders of images")
        for image in images
        if not _files_of(image)
    ]
    files = [(file, image) for image in images for file in _files_of(image)]
    found: list[Path] = []
    left_out: list[Problem] = []
    with ACTIVITY.doing("reading", len(files), "images") as reading:
        for file, image in files:
            try:
                load_image(str(file))
            except ImageError as error:
                flaw = Problem("IMAGE", str(file), error.fault or str(error), "replace the file, or leave it out")
                (problems if file == image else left_out).append(flaw)
            else:
                found.append(file)
            reading.advance()
    if problems or not found:
        raise ConfigError(problems + left_out)
    for flaw in left_out:
        print_error(f"left out: {flaw.value}: {flaw.rule}")
    return found


def _files_of(image: Path) -> list[Path]:
    if not image.is_dir():
        return [image]
    return sorted(file for file in image.iterdir() if file.suffix.lower() in IMAGE_ENDINGS)


def _check_output(output: Path, images: Sequence[Path]) -> None:
    """Raise ConfigError for a folder with anything but an earlier result, or with the images themselves."""
    if output.resolve() in {image.resolve().parent for image in images}:
        rule = "has images to answer, and a picture could replace one"
        raise refused("--output", str(output), rule, "name another folder")
    if not output.exists():
        return
    if not output.is_dir() or (any(output.iterdir()) and not (output / RESULTS).is_file()):
        rule = f"must be a new folder, or one with an earlier {RESULTS}, which is replaced"
        raise refused("--output", str(output), rule, "name another folder")


def _picture_names(images: Sequence[Path]) -> list[str]:
    """Return a name for each picture: the image's own, with a number where another image has it, and never hidden.

    >>> _picture_names([Path("a/cat.jpg"), Path("b/cat.png"), Path("..dog.jpg")])
    ['cat.png', 'cat-2.png', 'dog.png']
    """
    names: list[str] = []
    for image in images:
        stem = image.stem.lstrip(".") or "image"
        name, number = f"{stem}.png", 1
        while name in names:
            number += 1
            name = f"{stem}-{number}.png"
        names.append(name)
    return names


def _document(answer: AnsweredImage, picture: Path) -> dict[str, Any]:
    boxes = [{key: value for key, value in asdict(one).items() if value} for one in answer.boxes]
    size = {"width": answer.width, "height": answer.height}
    return {"image": answer.image, **size, "boxes": boxes, "whole": answer.whole, "picture": str(picture)}


def _show(answer: AnsweredImage, picture: Path) -> None:
    terminal = Terminal()
    found = counted(len(answer.boxes), "object")
    cut = "" if answer.whole else "; the answer is not whole"
    terminal.print(f"{answer.image} ({answer.width} x {answer.height}): {found}{cut}; drawn in {picture}")
    if not answer.boxes:
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("object")
    for side in ("left", "top", "right", "bottom"):
        table.add_column(side, justify="right")
    for one in answer.boxes:
        table.add_row(one.desc, *(f"{number:g}" for number in one.box))
    terminal.print(table)
