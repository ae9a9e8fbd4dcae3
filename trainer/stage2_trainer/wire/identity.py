"""The identity of a processor, which decides a prompt's ids and pixels: tokenizer, chat template, images.

Both sides describe themselves with this module. A server does so at GET /stage2/identity: the stub by a route of its
own, vLLM through a middleware that asks the processor which the running engine uses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

IDENTITY_ROUTE = "/stage2/identity"
ENGINE = "engine"  # in a server's answer: what computes, in words
STATE_OF_CALLS = ("truncation", "padding")  # parts of a tokenizer that calls leave behind; they tell nothing about it

PICTURE = (150, 97)  # pixels; neither side is a multiple of a patch


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> str:
    """Describe where two lists of ids differ first."""
    position = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if position is None:
        return f"{len(ours)} against {len(theirs)}, equal up to the shorter one's end"
    return f"{len(ours)} against {len(theirs)}, first at {position}: {ours[position]} against {theirs[position]}"


def describe(processor: Any) -> dict[str, str | int]:
    """Return the identity of a Hugging Face processor, a flat JSON object."""
    tokenizer = json.loads(processor.tokenizer.backend_tokenizer.to_str())
    state = {name: part for name, part in tokenizer.items() if name not in STATE_OF_CALLS}
    images = processor.image_processor
    return {
        "tokenizer_sha256": _sha256(json.dumps(state, sort_keys=True)),
        "chat_template_sha256": _sha256(processor.chat_template or processor.tokenizer.chat_template or ""),
        "image_min_pixels": int(images.size["shortest_edge"]),
        "image_max_pixels": int(images.size["longest_edge"]),
        "image_patch_size": int(images.patch_size),
        "image_merge_size": int(images.merge_size),
        "image_pixels_sha256": _pixels_sha256(images),
    }


def _pixels_sha256(images: Any) -> str:
    """Return a digest of what becomes of a picture: values in hundredths, for other kernels round the last digits."""
    across, down = np.meshgrid(np.arange(PICTURE[0]), np.arange(PICTURE[1]))
    colours = np.stack([across * 255 // PICTURE[0], down * 255 // PICTURE[1], across * down % 256], axis=-1)
    # vLLM may leave the last two to the device that it runs on
    found = images(
        images=[Image.fromarray(colours.astype(np.uint8))], return_tensors="pt", do_rescale=True, do_normalize=True
    )
    hundredths = np.rint(np.asarray(found["pixel_values"], dtype=np.float64) * 100).astype(np.int32)
    grid = np.asarray(found["image_grid_thw"], dtype=np.int32)
    return hashlib.sha256(hundredths.tobytes() + grid.tobytes()).hexdigest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
