"""`stage2 import`: annotations of other formats as a data file of records, by one writer and one set of rules."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from stage2_api.errors import ConfigError, Problem
from stage2_cli.plain_console import plain_console
from stage2_trainer.prepare.annotated_image import AnnotatedImage, AnnotatedSet, Tally
from stage2_trainer.prepare.coco import read_coco
from stage2_trainer.prepare.hugging_face import HubChoice, read_hub
from stage2_trainer.prepare.new_files import check_new
from stage2_trainer.prepare.record_writer import RecordChoice, write_records
from stage2_trainer.prepare.voc import VocChoice, read_voc
from stage2_trainer.prepare.yolo import read_yolo


def import_coco(annotations: Path, images: Path, output: Path, choice: RecordChoice) -> int:
    """Write the records of a COCO file, and say what was left out; 0. Raises ConfigError."""
    _require_folder("--images", images)
    outlines = choice.geometry == "poly"
    return _write(lambda tally: read_coco(annotations, images, tally, outlines=outlines), output, choice)


def import_yolo(data: Path, split: str, output: Path, choice: RecordChoice) -> int:
    """Write the records of a data set in YOLO's layout, and say what was left out; 0. Raises ConfigError."""
    return _write(lambda tally: read_yolo(data, split, tally), output, choice)


def import_voc(folder: Path, what: VocChoice, output: Path, choice: RecordChoice) -> int:
    """Write the records of a folder of Pascal VOC, and say what was left out; 0. Raises ConfigError."""
    _require_folder("FOLDER", folder)
    return _write(lambda tally: read_voc(folder, what, tally), output, choice)


def import_hub(source: str, what: HubChoice, output: Path, choice: RecordChoice) -> int:
    """Write the records of a data set of Hugging Face, and say what was left out; 0. Raises ConfigError."""
    outlines = choice.geometry == "poly"
    return _write(lambda tally: read_hub(source, what, tally, outlines=outlines), output, choice)


def _require_folder(option: str, folder: Path) -> None:
    if not os.path.isdir(folder):
        raise ConfigError([Problem(option, str(folder), "must be a folder", "check the path")])


def _write(read: Callable[[Tally], AnnotatedSet], output: Path, choice: RecordChoice) -> int:
    check_new(output)
    tally = Tally()
    found = read(tally)
    write_records(_shown(found, found.total), output, choice, tally)
    say_tally(tally, output)
    return 0


def _shown(images: Iterable[AnnotatedImage], total: int) -> Iterator[AnnotatedImage]:
    """Yield them with a progress bar, where there is a terminal."""
    console = Console(stderr=True)
    yield from track(images, "images", total=total, console=console, transient=True, disable=not console.is_terminal)


def say_tally(tally: Tally, output: Path, *, to_stderr: bool = False) -> None:
    """Say what was written, left out and changed."""
    console = plain_console(stderr=to_stderr)
    console.print(f"{shown_name(str(output))}: {tally.records:,} records, {tally.objects:,} objects")
    lines = (
        *_lines("left out: {:,} images: ", tally.images_left_out, tally),
        *_lines("left out: {:,} objects: ", tally.objects_left_out, tally),
        *_lines("noted {:,} times: ", tally.changed, tally),
    )
    for line in lines:
        console.print(line)


def _lines(head: str, reasons: Counter[str], tally: Tally) -> Sequence[str]:
    return [
        f"  {head.format(count)}{reason} ({_few(tally.names[reason], count)})"
        for reason, count in reasons.most_common()
    ]


def shown_name(name: str) -> str:
    """Return a text of the data for a terminal: with escapes for what would act on it, or cannot be shown."""
    return name if name.isprintable() else repr(name)[1:-1]


def _few(names: Sequence[str], count: int) -> str:
    return ", ".join(shown_name(name) for name in names) + (", …" if count > len(names) else "")
