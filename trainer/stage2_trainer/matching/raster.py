"""Polygon masks with the rules of COCO's run-length encoder, for many polygons at once.

pycocotools walks the outline of a polygon on a grid five times finer than the canvas, and records the row at which the
outline crosses each column's centre; between two crossings the column is filled. For a straight edge that row has a
closed form. So all (edge, column) pairs are computed at once, and a column's fill is the parity of its crossings: the
exclusive or of "all rows below" bit masks. Results equal `pycocotools.mask.frPyObjects`, pixel by pixel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from stage2_trainer.matching.tokens import IntArray

FloatArray = npt.NDArray[np.float64]
Bits = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]

_SCALE = 5  # COCO's upsampling factor
_WORD = 64


@dataclass(frozen=True)
class Masks:
    """N masks, each stored only in the columns that its outline spans.

    bits: (C, W) uint64, W = ceil(R / 64): one bit a row for each kept column, mask after mask.
    first: (N,) the first column of each mask; offset: (N + 1,) where its columns begin in `bits`.
    """

    bits: Bits
    first: IntArray
    offset: IntArray

    @property
    def areas(self) -> IntArray:
        """Set pixels of each mask, (N,) int64."""
        before = np.concatenate([[0], np.cumsum(_count(self.bits))])
        areas: IntArray = np.diff(before[self.offset])
        return areas


def rasterize(points: FloatArray, sizes: IntArray, resolution: int) -> Masks:
    """Return the masks of N polygons on a canvas of R x R pixels.

    points: (T, 2) the vertices of all polygons, x and y in pixels, 0 <= value <= R; sizes: (N,) vertices of each, at
    least 1.
    """
    fine = _upsample(points)
    starts = np.cumsum(sizes) - sizes
    first = (np.minimum.reduceat(fine[:, 0], starts) + 2) // _SCALE
    widths = (np.maximum.reduceat(fine[:, 0], starts) + 2) // _SCALE - first
    offset = np.concatenate([[0], np.cumsum(widths)])
    bits = np.zeros((offset[-1], -(-resolution // _WORD)), dtype=np.uint64)
    owner, column, row = _crossings(fine, sizes)
    np.bitwise_xor.at(bits, offset[owner] + column - first[owner], _rows_below(resolution)[row])
    return Masks(bits, first, offset)


def shared_pixels(left: Masks, right: Masks, pairs: IntArray) -> IntArray:
    """Return the pixels set in both masks of each pair (K, 2) of indices into `left` and `right`, as int64 (K,)."""
    i, j = pairs.T
    low = np.maximum(left.first[i], right.first[j])
    high = np.minimum(_end(left)[i], _end(right)[j])
    widths = np.maximum(high - low, 0)
    pair = np.repeat(np.arange(len(pairs)), widths)
    column = np.arange(len(pair)) - np.repeat(np.cumsum(widths) - widths, widths) + low[pair]
    both = left.bits[(left.offset[:-1] - left.first)[i[pair]] + column]
    both &= right.bits[(right.offset[:-1] - right.first)[j[pair]] + column]
    return np.bincount(pair, weights=_count(both), minlength=len(pairs)).astype(np.int64)


def coarser(masks: Masks, side: int) -> Masks:
    """Return masks of cells of `side` x `side` pixels, each set if any of its pixels is."""
    if side == 1:
        return masks
    rows = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % side)))
    rows = rows.reshape(len(rows), rows.shape[1] // side, side).max(axis=2)
    widths = np.diff(masks.offset)
    first = masks.first // side
    kept = np.where(widths > 0, -(-_end(masks) // side) - first, 0)
    offset = np.concatenate([[0], np.cumsum(kept)])
    owner = np.repeat(np.arange(len(widths)), widths)
    column = np.arange(len(owner)) - masks.offset[:-1][owner] + masks.first[owner]
    cells = np.zeros((offset[-1], -(-rows.shape[1] // _WORD) * _WORD), dtype=np.uint8)
    np.maximum.at(cells[:, : rows.shape[1]], offset[owner] + column // side - first[owner], rows)
    bits: Bits = np.packbits(cells, axis=1, bitorder="little").view(np.uint64)
    return Masks(bits, first, offset)


def box_cells(boxes: FloatArray) -> IntArray:
    """Return the cells [x0, y0, x1, y1) that `rasterize` fills for axis-parallel rectangles (N, 4) of pixels."""
    cells: IntArray = (_upsample(boxes) + 2) // _SCALE
    return cells


def _end(masks: Masks) -> IntArray:
    """Return the column after each mask's last one."""
    return masks.first + np.diff(masks.offset)


def _count(bits: Bits) -> IntArray:
    """Count the set bits of each row of words."""
    counts: IntArray = np.bitwise_count(bits).sum(axis=1, dtype=np.int64)
    return counts


@lru_cache(maxsize=8)
def _rows_below(resolution: int) -> Bits:
    """(R + 1, W): row y holds the bits of all rows 0..y-1."""
    below = np.arange(resolution + 1)[:, None] > np.arange(-(-resolution // _WORD) * _WORD)[None, :]
    table: Bits = np.packbits(below, axis=1, bitorder="little").view(np.uint64)
    return table


def _upsample(values: FloatArray) -> IntArray:
    return (_SCALE * values + 0.5).astype(np.int64)


def _crossings(points: IntArray, sizes: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return every crossing of an edge with a column's centre: polygon, column and first row below it."""
    ends = np.cumsum(sizes)
    following = np.arange(1, len(points) + 1)
    following[ends - 1] = ends - sizes
    owner = np.repeat(np.arange(len(sizes)), sizes)
    edge, column = _columns(points[:, 0], points[following, 0])
    row = _rows(points[edge], points[following[edge]], column)
    return owner[edge], column, (row + 2) // _SCALE


def _columns(x0: IntArray, x1: IntArray) -> tuple[IntArray, IntArray]:
    """Return each (edge, column) pair where the edge passes between the fine columns 5c + 2 and 5c + 3."""
    low, high = np.minimum(x0, x1), np.maximum(x0, x1)
    first = (low + 2) // _SCALE
    counts = (high + 2) // _SCALE - first
    edge = np.repeat(np.arange(len(x0)), counts)
    column = np.arange(len(edge)) - np.repeat(np.cumsum(counts) - counts, counts) + first[edge]
    return edge, column


def _rows(start: IntArray, end: IntArray, column: IntArray) -> IntArray:
    """Return the fine row at which each edge crosses its column's centre: the smaller of the two points around it."""
    dx, dy = np.abs(end - start).T
    flat = dx >= dy
    rows = np.empty(len(column), dtype=np.int64)
    rows[flat] = _rows_flat(start[flat], end[flat], column[flat])
    rows[~flat] = _rows_steep(start[~flat], end[~flat], column[~flat])
    return rows


def _rows_flat(start: IntArray, end: IntArray, column: IntArray) -> IntArray:
    """Return `_rows` for edges with a point in every fine column."""
    flip = start[:, 0] > end[:, 0]
    low, high = np.where(flip[:, None], end, start), np.where(flip[:, None], start, end)
    slope = (high[:, 1] - low[:, 1]) / (high[:, 0] - low[:, 0])
    step = _SCALE * column + 2 - low[:, 0]
    here = (low[:, 1] + slope * step + 0.5).astype(np.int64)
    there = (low[:, 1] + slope * (step + 1) + 0.5).astype(np.int64)
    rows: IntArray = np.minimum(here, there)
    return rows


def _rows_steep(start: IntArray, end: IntArray, column: IntArray) -> IntArray:
    """Return `_rows` for edges with a point in every fine row: the last before the outline reaches the next column."""
    flip = start[:, 1] > end[:, 1]
    low, high = np.where(flip[:, None], end, start), np.where(flip[:, None], start, end)
    slope = (high[:, 0] - low[:, 0]) / (high[:, 1] - low[:, 1])
    right = _SCALE * column + 3
    guess = np.floor((right - 0.5 - low[:, 0]) / slope).astype(np.int64)
    # rounding may put the guess off by one, so the reference's own formula is evaluated around it
    steps = guess[:, None] + np.arange(-1, 3)
    x = (low[:, :1] + slope[:, None] * steps + 0.5).astype(np.int64)
    over = np.where(slope[:, None] > 0, x >= right[:, None], x < right[:, None])
    rows: IntArray = low[:, 1] + steps[np.arange(len(steps)), np.argmax(over, axis=1)] - 1
    return rows
