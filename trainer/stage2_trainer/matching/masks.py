"""The supervision of each token of a teacher-forced sequence, or of several packed into a row.

Source: semantics, section 5. The end of turn is supervised too (sections 5 and 17).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stage2_trainer.matching.targets import MatchedTarget
from stage2_trainer.matching.tokens import BoolArray, CoordVocab, FloatArray, IntArray, MatchingError

IGNORED = -100


@dataclass(frozen=True)
class SegmentMeta:
    """Describes a segment, a sequence of `encoded_len` tokens: prompt, `Y_train`, end of turn.

    prompt_ids: the prompt as the rollout engine saw it. prefix_len, train_len: tokens of the prefix and of all of
    `Y_train`. end_of_turn_len: tokens after `Y_train` that end the turn, and are learnt too (`<|im_end|>`: 1).
    prefix_coord_pos / prefix_coord_target_bins, tail_ignore_pos, weights, text_labels: as in `MatchedTarget`.
    plain_coords: whether coordinates of the tail have the cross entropy of any other token.
    """

    prompt_ids: tuple[int, ...]
    prefix_len: int
    train_len: int
    end_of_turn_len: int
    encoded_len: int
    prefix_coord_pos: tuple[int, ...] = ()
    prefix_coord_target_bins: tuple[int, ...] = ()
    tail_ignore_pos: tuple[int, ...] = ()
    plain_coords: bool = False
    weights: tuple[tuple[int, float], ...] = ()
    text_labels: tuple[tuple[int, int], ...] = ()

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)


@dataclass(frozen=True)
class Supervision:
    """The supervision of a row of T tokens; the logits at position p - 1 predict position p.

    labels (T,) int64: the id that is taught where a token has cross entropy, its own but in a wrong name; else -100.
    coord_positions, coord_targets (C,) int64: where a coordinate is supervised, and its bin.
    coord_in_prefix (C,) bool: whether it belongs to one of the rollout's own objects, not to a missed one.
    weights (T,) float64: factors of the tokens' losses, below 0 where the token is taught against; None: all are 1.
    """

    labels: IntArray
    coord_positions: IntArray
    coord_targets: IntArray
    coord_in_prefix: BoolArray
    weights: FloatArray | None = None


def segment_meta(
    target: MatchedTarget,
    prompt_ids: Sequence[int],
    *,
    encoded_len: int,
    end_of_turn_len: int = 1,
    plain_coords: bool = False,
) -> SegmentMeta:
    """Describe a target whose encoding, prompt and template included, has `encoded_len` tokens."""
    return SegmentMeta(
        prompt_ids=tuple(prompt_ids),
        prefix_len=target.prefix_len,
        train_len=target.train_len,
        end_of_turn_len=end_of_turn_len,
        encoded_len=encoded_len,
        prefix_coord_pos=target.prefix_coord_pos,
        prefix_coord_target_bins=target.prefix_coord_target_bins,
        tail_ignore_pos=target.tail_ignore_pos,
        plain_coords=plain_coords,
        weights=target.weights,
        text_labels=target.text_labels,
    )


def unsupervised_meta(prompt_ids: Sequence[int], answer_len: int, *, encoded_len: int) -> SegmentMeta:
    """Describe a segment without supervision."""
    return SegmentMeta(tuple(prompt_ids), answer_len, answer_len, 0, encoded_len)


def supervision(meta: SegmentMeta, input_ids: Sequence[int] | IntArray, vocab: CoordVocab) -> Supervision:
    """Return the masks of one segment. Raises MatchingError if prompt or lengths of the ids contradict `meta`."""
    ids = np.asarray(input_ids, dtype=np.int64)
    _check(meta, ids)
    prompt, tail = meta.prompt_len, meta.prompt_len + meta.prefix_len
    end = prompt + meta.train_len
    labels = np.full(len(ids), IGNORED, dtype=np.int64)
    labels[tail : end + meta.end_of_turn_len] = ids[tail : end + meta.end_of_turn_len]
    bins = vocab.bins_of(ids[tail:end])
    bins[slice(None) if meta.plain_coords else list(meta.tail_ignore_pos)] = -1
    labels[tail + np.asarray(meta.tail_ignore_pos, dtype=np.int64)] = IGNORED
    tail_coords = tail + np.flatnonzero(bins >= 0)
    labels[tail_coords] = IGNORED
    prefix_coords = prompt + np.asarray(meta.prefix_coord_pos, dtype=np.int64)
    weighted = [prompt + position for position, _ in meta.weights]
    labels[weighted] = ids[weighted]
    for position, label in meta.text_labels:
        labels[prompt + position] = label
    return Supervision(
        labels=labels,
        coord_positions=np.concatenate([prefix_coords, tail_coords]),
        coord_targets=np.concatenate([np.asarray(meta.prefix_coord_target_bins, dtype=np.int64), bins[bins >= 0]]),
        coord_in_prefix=np.arange(len(prefix_coords) + len(tail_coords)) < len(prefix_coords),
        weights=_weights(len(ids), weighted, [weight for _, weight in meta.weights]) if weighted else None,
    )


def _weights(length: int, positions: Sequence[int], weights: Sequence[float]) -> FloatArray:
    found = np.ones(length)
    found[list(positions)] = weights
    return found


def packed_supervision(
    metas: Sequence[SegmentMeta], input_ids: Sequence[int] | IntArray, vocab: CoordVocab
) -> Supervision:
    """Return the masks of a row with these segments one after the other; padding after the last is ignored."""
    ids = np.asarray(input_ids, dtype=np.int64)
    lengths = np.array([meta.encoded_len for meta in metas], dtype=np.int64)
    if lengths.sum() > len(ids):
        raise MatchingError(
            f"packed row: segments of {lengths.tolist()} tokens in a row of {len(ids)}; their sum must fit the row"
        )
    offsets = np.cumsum(lengths) - lengths
    parts = [
        supervision(meta, ids[offset : offset + meta.encoded_len], vocab)
        for meta, offset in zip(metas, offsets, strict=True)
    ]
    return concatenate(parts, offsets, len(ids))


def concatenate(parts: Sequence[Supervision], offsets: Sequence[int] | IntArray, row_len: int) -> Supervision:
    """Combine the supervision of several segments into one row, each at its offset."""
    labels = np.full(row_len, IGNORED, dtype=np.int64)
    for part, offset in zip(parts, offsets, strict=True):
        labels[offset : offset + len(part.labels)] = part.labels
    weights = None if all(part.weights is None for part in parts) else np.ones(row_len)
    for part, offset in zip(parts, offsets, strict=True):
        if weights is not None and part.weights is not None:
            weights[offset : offset + len(part.weights)] = part.weights
    none = np.zeros(0, dtype=np.int64)
    moved = [part.coord_positions + offset for part, offset in zip(parts, offsets, strict=True)]
    return Supervision(
        labels=labels,
        coord_positions=np.concatenate([none, *moved]),
        coord_targets=np.concatenate([none, *(part.coord_targets for part in parts)]),
        coord_in_prefix=np.concatenate([none.astype(np.bool_), *(part.coord_in_prefix for part in parts)]),
        weights=weights,
    )


def _check(meta: SegmentMeta, ids: IntArray) -> None:
    prompt, end = meta.prompt_len, meta.prompt_len + meta.train_len + meta.end_of_turn_len
    if meta.encoded_len != len(ids):
        raise MatchingError(f"segment: {len(ids)} ids; meta data say {meta.encoded_len}; encode it again")
    if meta.encoded_len <= prompt:
        raise MatchingError(
            f"segment: {meta.encoded_len} tokens encoded, {prompt} of them prompt; the answer must follow the prompt; "
            "it was truncated away or never injected: raise global_max_length or check the template"
        )
    expected = np.asarray(meta.prompt_ids, dtype=np.int64)
    if len(differing := np.flatnonzero(ids[:prompt] != expected)):
        first = int(differing[0])
        raise MatchingError(
            f"prompt tokenization mismatch: {len(differing)} of {prompt} prompt ids differ, first at position {first} "
            f"(rollout engine {expected[first]}, learner {ids[first]})"
        )
    if prompt < 1 or end > len(ids) or not 0 <= meta.prefix_len <= meta.train_len:
        raise MatchingError(
            f"segment: prompt {prompt}, prefix {meta.prefix_len}, train {meta.train_len}, end of turn "
            f"{meta.end_of_turn_len}, encoded {meta.encoded_len} tokens; supervised tokens must follow a prompt and "
            "lie inside the segment; encode it again"
        )
    _check_positions("prefix_coord_pos", meta.prefix_coord_pos, meta.prefix_len)
    _check_positions("weights", tuple(position for position, _ in meta.weights), meta.train_len)
    _check_positions("text_labels", tuple(position for position, _ in meta.text_labels), meta.train_len)
    _check_positions("tail_ignore_pos", meta.tail_ignore_pos, meta.train_len - meta.prefix_len)
    if len(meta.prefix_coord_pos) != len(meta.prefix_coord_target_bins):
        raise MatchingError(
            f"prefix_coord_pos: {len(meta.prefix_coord_pos)} positions, {len(meta.prefix_coord_target_bins)} targets; "
            "every position needs one target"
        )


def _check_positions(name: str, positions: tuple[int, ...], length: int) -> None:
    if positions and not (min(positions) >= 0 and max(positions) < length):
        raise MatchingError(f"{name}: {min(positions)}..{max(positions)}; must lie in 0..{length - 1}")
