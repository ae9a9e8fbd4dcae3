"""The tower before stage 1: the vision tower learns to name what lies in the true boxes of the training pictures.

The loss of stage 1 has one token in fifteen that depends on which digit it is, and a tower that knows only coloured
shapes then learns to find digits long before it learns to read them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from stage2_api.coordinates import BINS
from stage2_trainer.data.records import Record, load_records
from stage2_trainer.matching import GTObject
from stage2_trainer.matching.tokens import FloatArray
from stage2_trainer.model.policy import load_model, load_processor

LEAST_SHARE = 0.25  # of a token's width and height that lies in a box
WARM_UP = 50


@dataclass(frozen=True)
class TowerLesson:
    """How the tower is taught. batch: pictures of a step. rate: its peak. pixels: least and most of a picture."""

    steps: int
    batch: int
    rate: float
    pixels: tuple[int, int]
    seed: int = 17


def teach_tower(model_folder: Path, data: Path, output: Path, lesson: TowerLesson) -> None:
    """Write the model of a folder to another one, with a tower that has learnt the names of `data`'s objects."""
    least, most = lesson.pixels
    processor = load_processor(model_folder, min_pixels=least, max_pixels=most)
    model = load_model(str(model_folder), dtype=torch.float32, attn_implementation="sdpa")
    records = load_records(data)
    names = sorted({one.desc for record in records for one in record.objects})
    torch.manual_seed(lesson.seed)
    reader = _Reader(model, len(names))
    optimizer = torch.optim.AdamW(reader.parameters(), lr=lesson.rate, betas=(0.9, 0.98), weight_decay=0.05)
    cosine = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, lesson.rate, total_steps=lesson.steps, pct_start=min(0.3, WARM_UP / lesson.steps)
    )
    history = []
    for batch in _batches(records, lesson):
        logits, labels = reader.read(processor, batch, varied=True), _labels(batch, names)
        loss = functional.cross_entropy(logits, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
        optimizer.step()
        cosine.step()
        optimizer.zero_grad()
        history.append((float(loss.detach()), float((logits.argmax(-1) == labels).float().mean())))
    shutil.copytree(model_folder, output)
    model.save_pretrained(output)
    last = np.mean(history[-50:], axis=0)
    (output / "tower.json").write_text(json.dumps({"loss": last[0], "accuracy": last[1]}), encoding="utf-8")


class _Reader(nn.Module):
    """The tower and a head over the mean of the tokens in a box."""

    def __init__(self, model: Any, names: int) -> None:
        super().__init__()
        self.tower = model.model.visual
        self.merge = model.config.vision_config.spatial_merge_size
        self.head = nn.Linear(model.config.vision_config.out_hidden_size, names)

    def read(self, processor: Any, records: Sequence[Record], *, varied: bool = False) -> Tensor:
        """Return the logits of each object, (objects, names). varied: in other colours, half as negatives."""
        images = [Image.open(record.images[0]).convert("RGB") for record in records]
        inputs = processor.image_processor(images, return_tensors="pt")
        grids = (inputs["image_grid_thw"][:, 1:] // self.merge).tolist()
        pixels = _varied(inputs["pixel_values"], inputs["image_grid_thw"]) if varied else inputs["pixel_values"]
        tokens = self.tower(pixels, inputs["image_grid_thw"]).pooler_output
        shares = torch.block_diag(*(_shares(record.objects, grid) for record, grid in zip(records, grids, strict=True)))
        found: Tensor = self.head(shares @ tokens)
        return found


def _varied(pixels: Tensor, grids: Tensor) -> Tensor:
    """Return patches (patches, 3 channels of values around 0) with their channels mixed, and of half the images' signs
    changed.
    """
    signs = (torch.randint(2, (len(grids),)) * 2 - 1).repeat_interleave(grids.prod(1))
    mixed = pixels.reshape(len(pixels), 3, -1)[:, torch.randperm(3)].flatten(1)
    return mixed * signs[:, None]


def _shares(objects: Sequence[GTObject], grid: tuple[int, int]) -> Tensor:
    """Return the share of each token of an image in each object's mean, (objects, tokens)."""
    rows, columns = grid
    found = torch.zeros(len(objects), rows, columns)
    for place, one in enumerate(objects):
        left, top, right, bottom = (bin_ / BINS for bin_ in one.bins)
        inside = np.outer(_inside(top, bottom, rows), _inside(left, right, columns))
        found[place] = torch.from_numpy(inside / inside.sum())
    return found.flatten(1)


def _inside(low: float, high: float, cells: int) -> FloatArray:
    """Return 1 for each of so many cells of an axis that lies in a span by enough, or by most."""
    edges = np.arange(cells)
    shared = np.minimum(high * cells, edges + 1) - np.maximum(low * cells, edges)
    found: FloatArray = (shared >= min(LEAST_SHARE, shared.max())).astype(np.float64)
    return found


def _labels(records: Sequence[Record], names: Sequence[str]) -> Tensor:
    return torch.tensor([names.index(one.desc) for record in records for one in record.objects])


def _batches(records: Sequence[Record], lesson: TowerLesson) -> Iterator[list[Record]]:
    rng = np.random.default_rng(lesson.seed)
    for _ in range(lesson.steps):
        yield [records[place] for place in rng.choice(len(records), min(lesson.batch, len(records)), replace=False)]
