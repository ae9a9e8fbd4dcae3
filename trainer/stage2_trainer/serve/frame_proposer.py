"""Drafts for vLLM's speculative decoding: the JSON frame of an answer, which is known before the model writes it.

Only coordinates and names of an answer are unknown. The proposer looks for the place in the request, or in an example
answer, that repeats the end of the request for longest. There all coordinates count as equal, and so do all numbers of
keys and all names. It drafts what followed that place, up to the next coordinate, and counts the numbers of keys up. A
name is drafted, too: the one that stood where names and all repeat the end. vLLM verifies each draft with the model, so
a wrong one costs time and changes no answer (docs/semantics.md, section 11).

A draft depends on the request's own tokens alone, so that a seed gives the same answer whatever the other requests are.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config

from stage2_trainer.matching import GTObject, serialize_objects
from stage2_trainer.matching.tokens import CoordVocab

Tokens = npt.NDArray[np.int32]
ANY_COORDINATE, ANY_NUMBER, ANY_NAME = "\U0010fffd", "\U0010fffe", "\U0010ffff"  # no vocabulary has so many tokens
WINDOW = 4096
"""Tokens at the end of a request in which repetitions are looked for."""
LONGEST_REPETITION = 48
"""More tokens than an object has, so that the name of the object before helps to find the next name."""
SHORTEST_REPETITION = 2
KEY, NAME = "object_", 'desc": "'  # what leads to a number, and to a name


LONGEST_NUMBER = 6
"""Tokens of a key's number; more are the loop of an answer that does not end."""


def example_answer() -> str:
    """Return an answer with boxes first and last, and a polygon."""
    box = GTObject("object", "bbox", (0, 0, 0, 0))
    return serialize_objects([box, box, GTObject("object", "poly", (0,) * 6), box, box])


class FrameProposer:
    """A proposer of vLLM's method `custom_class`. It needs no weights."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        assert vllm_config.speculative_config is not None
        self._most = vllm_config.speculative_config.num_speculative_tokens
        self._longest_request = vllm_config.model_config.max_model_len
        self._frame = Frame(cached_tokenizer_from_config(vllm_config.model_config))

    def load_model(self, *_: object) -> None:
        """Do nothing; vLLM calls it when it loads weights."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Tokens,
        token_ids_cpu: Tokens,
        **_: object,
    ) -> list[list[int]]:
        """Return the draft of each request.

        sampled_token_ids: the tokens that each request gained in this step; none while its prompt is read.
        num_tokens_no_spec: (requests,) its length, including these. token_ids_cpu: (requests, length) its tokens.
        """
        drafts: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[row])
            most = min(self._most, self._longest_request - length) if sampled else 0
            drafts.append(self._frame.draft(token_ids_cpu[row, :length], most) if most > 0 else [])
        return drafts


class Frame:
    """The frame of answers, in the tokens of a Hugging Face tokenizer.

    Tokens are compared as text in which each token is one character, the one of its id.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        spelled = {chr(i): token for token, i in tokenizer.get_vocab().items()}
        self._digits = {one: token for one, token in spelled.items() if token.isascii() and token.isdigit()}
        coordinates = "".join(map(chr, CoordVocab.from_tokenizer(tokenizer).ids.tolist()))
        self._coordinate = re.compile(f"[{re.escape(coordinates)}]")
        number, digits = re.escape(self._leading_to(KEY)), re.escape("".join(self._digits))
        bounded = f"[{digits}]{{1,{LONGEST_NUMBER}}}(?![{digits}])"
        self._key_number = re.compile(f"(?<={number}){bounded}" if number else "(?!)")
        starting = (one for one, token in spelled.items() if token.startswith('"'))
        name, quotes = re.escape(self._leading_to(NAME)), re.escape("".join(starting))
        self._name = re.compile(f"(?<={name})[^{quotes}]+(?=[{quotes}])" if name else "(?!)")
        example = self._encode(f"<|im_start|>assistant\n{example_answer()}<|im_end|>")
        self._example, _ = self._generalized("".join(map(chr, example)))
        self._number = lru_cache(maxsize=1024)(self._spell_number)

    def draft(self, tokens: Tokens, most: int) -> list[int]:
        """Return at most `most` tokens that may follow those of a request, (length,)."""
        request = tokens[-WINDOW:].astype("<u4").tobytes().decode("utf-32-le", errors="surrogatepass")
        general, number = self._generalized(request)
        text = self._example + general
        frame = _follows(self._name.sub(ANY_NAME, text), most)
        known, end, _ = frame.partition(ANY_NAME)
        if end or not known:
            known += _follows(text + known, most)
        return list(map(ord, known.replace(ANY_NUMBER, self._number(number + 1))))[:most]

    def _generalized(self, text: str) -> tuple[str, int]:
        """Return a text with one character for all coordinates and one for all numbers of keys; and the last number."""
        numbers = self._key_number.findall(text)
        last = int("".join(self._digits[one] for one in numbers[-1])) if numbers else 0
        return self._coordinate.sub(ANY_COORDINATE, self._key_number.sub(ANY_NUMBER, text)), last

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _key_tokens(self, number: int) -> list[int]:
        return self._encode(f'{{"{KEY}{number}": {{')

    def _spell_number(self, number: int) -> str:
        return "".join(one for one in map(chr, self._key_tokens(number)) if one in self._digits)

    def _leading_to(self, known: str) -> str:
        """Return the tokens of an answer that spell `known`; none if its last one has more."""
        tokens = self._encode(f'{{"{KEY}1": {{"desc": "cat"}}}}')
        spelled = [self._tokenizer.decode(tokens[:i]) for i in range(len(tokens) + 1)]
        end = next((i for i, text in enumerate(spelled) if text.endswith(known)), 0)
        spelling = (i for i in reversed(range(end)) if known in self._tokenizer.decode(tokens[i:end]))
        return "".join(map(chr, tokens[next(spelling, end) : end]))


def _follows(text: str, most: int) -> str:
    """Return what followed the longest repetition of the text's end, up to a coordinate."""
    place = _end_of_repetition(text)
    return text[place : place + most].partition(ANY_COORDINATE)[0] if place else ""


def _end_of_repetition(text: str) -> int:
    """Return where the latest of the longest repetitions of the text's end is over; 0 without one.

    >>> _end_of_repetition("ab1 cab2 ab")
    7
    """
    least, most, place = SHORTEST_REPETITION, min(LONGEST_REPETITION, len(text) - 1), 0
    while least <= most:
        length = (least + most) // 2
        found = text.rfind(text[-length:], 0, len(text) - 1)
        if found >= 0:
            least, place = length + 1, found + length
        else:
            most = length - 1
    return place
