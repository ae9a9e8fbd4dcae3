"""A model folder's tokenizer from `tokenizer.json` alone, which takes a twentieth of the time that transformers takes.

transformers imports torch to make a tokenizer, and adds the tokens that only the files beside `tokenizer.json` name.
Where those name none, the file spells and tokenises as the learner does; where they do, transformers is asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Fast

_FILE, _CONFIG, _ADDED = "tokenizer.json", "tokenizer_config.json", "added_tokens.json"
# Classes of transformers that take the file as it is, Qwen's by building the same again; others may change it.
_AS_FILED = {"TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast"}
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")


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

    def added_tokens(self) -> set[str]:
        """The tokens that are looked for before the text is split."""
        return {token.content for token in self._fast.get_added_tokens_decoder().values()}

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        """The id of each token; None for one that there is not."""
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
        """The numbers of ids of texts, by all processors."""
        return [len(one.ids) for one in self._fast.encode_batch_fast(list(texts), add_special_tokens=False)]


def token_counts(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Return how many tokens each text has, by whichever tokenizer `load_tokenizer` found."""
    if isinstance(tokenizer, FileTokenizer):
        return tokenizer.counts(texts)
    return [len(tokenizer.encode(text, add_special_tokens=False)) for text in texts]


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a model folder, without transformers where its file says all."""
    config = _json(folder / _CONFIG)
    if (folder / _FILE).is_file() and config.get("tokenizer_class") in _AS_FILED:
        found = FileTokenizer(folder / _FILE)
        if found.added_tokens().issuperset([*_json(folder / _ADDED), *_named(config)]):
            return found
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _named(config: dict[str, Any]) -> Iterator[str]:
    """The tokens that `tokenizer_config.json` names."""
    for token in (*(config.get(key) for key in _NAMED), *config.get("added_tokens_decoder", {}).values()):
        yield from _contents(token)
    for key in _LISTED:
        listed = config.get(key) or ()
        for token in listed.values() if isinstance(listed, dict) else listed:
            yield from _contents(token)


def _contents(token: str | dict[str, Any] | None) -> Iterator[str]:
    if token is not None:
        yield token["content"] if isinstance(token, dict) else token


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found
