"""`stage2 import`: annotations of other formats as a data file of records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.prepare.annotated_image import AnnotatedImage, Tally
from stage2_trainer.prepare.coco import count_images, read_coco
from stage2_trainer.prepare.record_writer import RecordChoice, write_records


def import_coco(annotations: Path, images: Path, output: Path, choice: RecordChoice) -> int:
    """Write the records of a COCO file, and say what was left out; 0. Raises ConfigError."""
    if output.exists():
        raise ConfigError([Problem("--output", str(output), "must be a new file", "remove it, or name another one")])
    if not images.is_dir():
        raise ConfigError([Problem("--images", str(images), "must be a folder", "check the path")])
    tally = Tally()
    found = read_coco(annotations, images, tally, outlines=choice.geometry == "poly")
    write_records(_shown(found, count_images(annotations)), output, choice, tally)
    _say(tally, output)
    return 0


def _shown(images: Iterable[AnnotatedImage], total: int) -> Iterator[AnnotatedImage]:
    """Yield them with a progress bar, where there is a terminal."""
    console = Console(stderr=True)
    yield from track(images, "images", total=total, console=console, transient=True, disable=not console.is_terminal)


def _say(tally: Tally, output: Path) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{output}: {tally.records:,} records, {tally.objects:,} objects", markup=False)
    for line in (*_lines("images", tally.images_left_out, tally), *_lines("objects", tally.objects_left_out, tally)):
        console.print(line, markup=False)


def _lines(what: str, reasons: Counter[str], tally: Tally) -> Sequence[str]:
    return [
        f"  left out: {count:,} {what}: {reason} ({_few(tally.names[reason], count)})"
        for reason, count in reasons.most_common()
    ]


def _few(names: Sequence[str], count: int) -> str:
    return ", ".join(names) + (", …" if count > len(names) else "")
