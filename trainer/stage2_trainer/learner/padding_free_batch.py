"""Segments and batches: teacher-forced sequences in padding-free rows, each sequence blind to the others.

Qwen3-VL's text model takes 4-row position ids: row 0 counts the tokens of each sequence from 0 (a new sequence begins
wherever it does not grow by one), rows 1..3 are the multimodal rotary positions. Row 0 separates sequences only without
an attention mask and a key-value cache; with a cache they silently run into one another, so every forward pass here has
`use_cache=False`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stage2_trainer.data.encode import Encoding
from stage2_trainer.data.images import ImageError
from stage2_trainer.learner.loss import loss_targets
from stage2_trainer.learner.step_record import SampleStats
from stage2_trainer.matching import CoordVocab, SegmentMeta, Supervision, packed_supervision
from stage2_trainer.matching.masks import concatenate

PixelSource = Callable[[tuple[str, ...]], torch.Tensor | None]
"""Returns the pixels of a prompt's images. Raises ImageError for one that cannot be read."""


@dataclass(frozen=True)
class Placed:
    """An encoding with its 4-row position ids, int64 (4, L)."""

    encoding: Encoding
    position_ids: torch.Tensor

    def __len__(self) -> int:
        return len(self.encoding.input_ids)


@dataclass(frozen=True)
class Segment:
    """One sample in training form: tokens with their positions, its supervision, and its figures.

    images: those whose pixels the encoding lacks; the batch loads them. sample_id: of its record.
    """

    placed: Placed
    meta: SegmentMeta
    stats: SampleStats
    images: tuple[str, ...] = ()
    sample_id: str = ""

    def __len__(self) -> int:
        return len(self.placed)

    def aged(self, staleness: int) -> Segment:
        """Return it with the number of optimizer steps between its rollout and the training on it."""
        return replace(self, stats=replace(self.stats, staleness=staleness))

    def with_pixels(self, pixels: PixelSource) -> Placed:
        """Return its tokens with the pixels of its images."""
        if not self.images:
            return self.placed
        encoding = replace(self.placed.encoding, pixel_values=pixels(self.images))
        return replace(self.placed, encoding=encoding)


@dataclass(frozen=True)
class PaddingFreeBatch:
    """Model inputs of B rows of equal length T: `input_ids` (B, T), `position_ids` (4, B, T), images in token order.

    sequence_ends: where each sequence ends, padding included, counted over all rows one after the other, from 0 on.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    pixel_values: torch.Tensor | None
    image_grid_thw: torch.Tensor | None
    sequence_ends: torch.Tensor

    def model_inputs(self) -> dict[str, Any]:
        """Return the forward pass's keyword arguments, without a mask and without a cache.

        Those of the flash kernels are included: without them each layer would compute the sequences again, and wait for
        the device three times.
        """
        longest = int(self.sequence_ends.diff().max())
        images = {"pixel_values": self.pixel_values, "image_grid_thw": self.image_grid_thw}
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "use_cache": False,
            "cu_seq_lens_q": self.sequence_ends,
            "cu_seq_lens_k": self.sequence_ends,
            "max_length_q": longest,
            "max_length_k": longest,
            **{name: value for name, value in images.items() if value is not None},
        }


def hidden_states(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return the last hidden states (B, T, H) of the model without its head, from `model_inputs`.

    The vision tower runs first: within the model it would get the sequences of the text too.
    """
    images = {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}
    text = {name: value for name, value in inputs.items() if name not in images}
    encoded = {"image": model.get_image_features(**images, return_dict=True)} if images else None
    hidden: torch.Tensor = model(**text, mm_encoder_outputs=encoded).last_hidden_state
    return hidden


def with_positions(encoding: Encoding, rope_model: Any) -> Placed:
    """Compute the position ids of one encoding with the model's own `get_rope_index` (no forward pass)."""
    rope, _ = rope_model.get_rope_index(
        encoding.input_ids[None],
        mm_token_type_ids=encoding.mm_token_type_ids[None],
        image_grid_thw=encoding.image_grid_thw,
    )
    text = torch.arange(len(encoding.input_ids), dtype=rope.dtype)
    return Placed(encoding, torch.cat([text[None], rope[:, 0]]))


def collate(rows: Sequence[Sequence[Placed]], pad_token_id: int) -> PaddingFreeBatch:
    """Lay out the sequences of each row one after the other, rows filled up with padding to the longest one.

    The padding is one more sequence of its row, without supervision.
    """
    length = max(sum(len(placed) for placed in row) for row in rows)
    encodings = [placed.encoding for row in rows for placed in row]
    return PaddingFreeBatch(
        input_ids=torch.stack([_row_ids(row, length, pad_token_id) for row in rows]),
        position_ids=torch.stack([_row_positions(row, length) for row in rows], dim=1),
        pixel_values=_joined([encoding.pixel_values for encoding in encodings]),
        image_grid_thw=_joined([encoding.image_grid_thw for encoding in encodings]),
        sequence_ends=_sequence_ends(rows, length),
    )


def row_supervision(rows: PaddingFreeBatch, metas: Sequence[Sequence[SegmentMeta]], vocab: CoordVocab) -> Supervision:
    """Return the supervision of the rows, with positions in the concatenated rows (B * T)."""
    length = rows.input_ids.shape[1]
    parts = [
        packed_supervision(row_metas, ids.numpy(), vocab) for row_metas, ids in zip(metas, rows.input_ids, strict=True)
    ]
    return concatenate(parts, [length * i for i in range(len(parts))], length * len(parts))


def _row_ids(row: Sequence[Placed], length: int, pad_token_id: int) -> torch.Tensor:
    ids = torch.cat([placed.encoding.input_ids for placed in row])
    return torch.cat([ids, ids.new_full((length - len(ids),), pad_token_id)])


def _row_positions(row: Sequence[Placed], length: int) -> torch.Tensor:
    positions = torch.cat([placed.position_ids for placed in row], dim=1)
    padding = torch.arange(length - positions.shape[1], dtype=positions.dtype)
    return torch.cat([positions, padding.expand(4, -1)], dim=1)


def _sequence_ends(rows: Sequence[Sequence[Placed]], length: int) -> torch.Tensor:
    """Return the ends of all sequences of rows of `length`, int32, the padding of a row being its last sequence."""
    lengths = [[len(placed) for placed in row] for row in rows]
    filled = [one for row in lengths for one in (*row, length - sum(row)) if one]
    return torch.tensor([0, *itertools.accumulate(filled)], dtype=torch.int32)


def _joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


def supervised_batch(
    rows: Sequence[Sequence[Segment]],
    vocab: CoordVocab,
    *,
    pad_token_id: int,
    device: torch.device,
    pixels: PixelSource,
    placeholder: Callable[[Segment, ImageError], Segment],
) -> dict[str, Any]:
    """Return the model's inputs (`model`, on the CPU), the loss's targets (`targets`) and the names of the samples.

    placeholder: returns the replacement of a segment whose pixels are lost. The tensors are new, so that a step cannot
    change rows that are kept for the next.
    """
    loaded = [[_loaded(segment, pixels, placeholder) for segment in row] for row in rows]
    batch = collate([[placed for _, placed in row] for row in loaded], pad_token_id)
    supervision = row_supervision(batch, [[segment.meta for segment, _ in row] for row in loaded], vocab)
    return {
        "model": batch.model_inputs(),
        "targets": loss_targets(supervision, device),
        "samples": [segment.sample_id for row in rows for segment in row],
    }


def _loaded(
    segment: Segment, pixels: PixelSource, placeholder: Callable[[Segment, ImageError], Segment]
) -> tuple[Segment, Placed]:
    try:
        return segment, segment.with_pixels(pixels)
    except ImageError as error:
        other = placeholder(segment, error)
        return other, other.with_pixels(pixels)
