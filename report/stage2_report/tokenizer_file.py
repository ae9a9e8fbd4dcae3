"""A model folder's tokenizer, read from `tokenizer.json` alone in a twentieth of the time that transformers takes.

transformers imports torch to build a tokenizer. Qwen's classes take the file as it is, so both tokenize alike, unless
an older folder lists added tokens only in the files beside it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Fast

from stage2_api.errors import refused
from stage2_trainer.matching import CoordVocab
from stage2_trainer.process.activity import ACTIVITY, LIBRARIES


class FileTokenizer:
    """The part of a tokenizer that `stage2_trainer.matching` needs, by the names that Hugging Face gives it."""

    def __init__(self, path: Path) -> None:
        self._fast: Any = Fast.from_file(str(path))
        self._fast.no_truncation()
        self._fast.no_padding()

    def __len__(self) -> int:
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    def get_vocab(self) -> dict[str, int]:
        """The ids of all tokens."""
        return dict(self._fast.get_vocab(with_added_tokens=True))

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        """The id of each token; None for an unknown one."""
        return [self._fast.token_to_id(token) for token in tokens]

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of ids. Spaces are never cleaned up: matching needs what was generated."""
        assert not clean_up_tokenization_spaces
        return str(self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text."""
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def counts(self, texts: Sequence[str]) -> list[int]:
        """The number of ids of each text, computed by all processors."""
        return [len(one.ids) for one in self._fast.encode_batch_fast(list(texts), add_special_tokens=False)]


def token_counts(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Return how many tokens each text has, with a tokenizer of `load_tokenizer`."""
    if isinstance(tokenizer, FileTokenizer):
        return tokenizer.counts(texts)
    return [len(tokenizer.encode(text, add_special_tokens=False)) for text in texts]


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a model folder; through transformers where `tokenizer.json` is missing or incomplete."""
    if (folder / "tokenizer.json").is_file():
        tokenizer = FileTokenizer(folder / "tokenizer.json")
        added = {
            one["content"] for one in _json(folder / "tokenizer_config.json").get("added_tokens_decoder", {}).values()
        }
        if tokenizer.get_vocab().keys() >= {*added, *_json(folder / "added_tokens.json")}:
            return tokenizer
    with ACTIVITY.doing(LIBRARIES):
        from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def load_coord_tokenizer(folder: Path, *, option: str) -> tuple[Any, CoordVocab]:
    """Return a model folder's tokenizer and its coordinate tokens. Raises ConfigError if either is missing."""
    if not os.path.isfile(folder / "tokenizer_config.json"):  # Path.is_file raises OSError for a name that is too long
        rule = "must be a folder with a Hugging Face tokenizer (tokenizer_config.json)"
        raise refused(option, str(folder), rule, "give the model's folder")
    tokenizer = load_tokenizer(folder)
    try:
        return tokenizer, CoordVocab.from_tokenizer(tokenizer)
    except ValueError as error:
        rule = f"must have the coordinate tokens ({error})"
        way_out = f"give a stage-1 model's folder; stage2 prepare {folder} --output DIR adds them to a stock model"
        raise refused(option, str(folder), rule, way_out) from error


def _json(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return document
