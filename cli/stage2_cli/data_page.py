"""The page of `stage2 data`: some records of a file with the boxes and names of their objects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.data.drawing import Outline, captioned_page, draw_outlines
from stage2_trainer.data.images import ImageError, load_image
from stage2_trainer.data.records import Record

COLUMNS = 4
WIDTH = 340
MOST_HEIGHT = 400
COLORS = ("#cf222e", "#0969da", "#1a7f37", "#8250df", "#bc4c00", "#bf3989", "#1b7c83", "#7d4e00")


def write_page(records: Sequence[Record], path: Path) -> None:
    """Draw records, those of one description in one colour. Raises ConfigError where there are none to show."""
    colors: dict[str, str] = {}
    cells = []
    for record in records:
        try:
            image = load_image(record.images[0])
        except ImageError:
            continue  # its header could be read, its pixels cannot
        outlines = [
            Outline(one.kind, one.bins, one.desc, colors.setdefault(one.desc, COLORS[len(colors) % len(COLORS)]))
            for one in record.objects
        ]
        width = max(1, min(WIDTH, MOST_HEIGHT * image.width // image.height))
        cells.append((draw_outlines(image, outlines, width=width), f"{record.sample_id} ({len(outlines)} objects)"))
    if not cells:
        rule, way_out = "a page needs records with objects whose images can be read", "see what the text says of them"
        raise ConfigError([Problem("--pictures", str(path), rule, way_out)])
    path.parent.mkdir(parents=True, exist_ok=True)
    captioned_page(cells, columns=COLUMNS, width=WIDTH).save(path, format="PNG")
