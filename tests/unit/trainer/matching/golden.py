"""Reads tests/golden/matching.json, and the toy tokenizer that its cases are written for."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from stage2_api.coordinates import coord_token
from stage2_trainer.matching.tokens import CoordVocab

FILE = Path(__file__).parents[3] / "golden" / "matching.json"


@cache
def golden() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


@cache
def toy_vocab() -> CoordVocab:
    """Ids 0..999 are the coordinate tokens, then come the file's pieces, then single characters; longest match wins."""
    spelled = [coord_token(k) for k in range(1000)] + golden()["pieces"] + [chr(k) for k in range(32, 127)] + ["\n"]
    spelled = list(dict.fromkeys(spelled))
    ids = {piece: token_id for token_id, piece in enumerate(spelled)}
    lengths = sorted({len(piece) for piece in spelled}, reverse=True)

    def encode(text: str) -> list[int]:
        found = []
        while text:
            size = next(size for size in lengths if text[:size] in ids)
            found.append(ids[text[:size]])
            text = text[size:]
        return found

    return CoordVocab(
        ids=np.arange(1000),
        decode=lambda token_ids: "".join(spelled[token_id] for token_id in token_ids),
        encode=encode,
        size=len(spelled),
    )
