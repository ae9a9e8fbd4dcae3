"""The frame of answers: drafts the tokens that follow those of a request. Other code drafts the same.

Only coordinates and names of an answer are unknown; the rest is JSON that is known before the model writes it. A draft
is what followed the longest earlier occurrence of the request's last tokens. There all coordinates count as equal, and
so do all digits. Example answers precede the request, so that the first object has a frame as well. A draft ends
before a coordinate, and its object number counts up. After a name that no earlier object has comes the frame of the
examples (docs/semantics.md, section 11).

vLLM's model runner V1 gets drafts from here (`frame_proposer`). In V2 two Triton kernels compute the same drafts on the
GPU (`frame_kernels`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from stage2_trainer.matching import GTObject, serialize_objects
from stage2_trainer.matching.tokens import CoordVocab

Tokens = npt.NDArray[np.int32]
COORDINATE, DIGIT = 0x10FFFD, 0x10FFFE
"""Classes of tokens that count as equal. Any other token is its own class; no vocabulary has so many."""
LONGEST_REPETITION = 48
"""More tokens than an object has, so that the name of the object before helps to find the next name."""
SHORTEST_REPETITION = 2
LONGEST_NAME = 32
"""Tokens since `"desc": "` that may be a name and the frame after it; more are the loop of an answer without an end."""
LONGEST_NUMBER = 4
"""Digits of an object's number."""
LEAD = 8
"""Tokens of `object_` or `desc": "` that are compared. Qwen3's tokenizer has 2 and 3."""
ANY, NEVER = -1, -2
"""In a lead: any token, and none."""
NUMBER_LEAD, NAME_LEAD = "object_", 'desc": "'


def example_answers() -> str:
    """Return a whole answer, and one that has not ended: its last objects are followed by another one."""
    box, polygon = GTObject("object", "bbox", (0, 0, 0, 0)), GTObject("object", "poly", (0,) * 6)
    start, end = "<|im_start|>assistant\n", "<|im_end|>\n"
    unfinished = serialize_objects([box, box, polygon, polygon, box, box]).rpartition(NAME_LEAD)
    return f"{start}{serialize_objects([box])}{end}{start}{''.join(unfinished[:2])}"


class Frame:
    """The frame of answers, in the tokens of a Hugging Face tokenizer, for a model of `vocabulary` tokens or more.

    A model can have more than its tokenizer, and sample them.

    classes: (vocabulary,) the class of each token. digits: (vocabulary,) its value, -1 for other tokens. closing:
    (vocabulary,) 1 where it begins with a quotation mark, which ends a name. digit_tokens: (10,). example: tokens of
    the example answers; after_name: where their first name ends. number_lead, name_lead: (LEAD,) the tokens before a
    number, and before a name.
    """

    def __init__(self, tokenizer: Any, vocabulary: int = 0) -> None:
        self._tokenizer = tokenizer
        known: dict[str, int] = tokenizer.get_vocab()
        size = max(vocabulary, *(token + 1 for token in known.values()))
        self.classes = np.arange(size, dtype=np.int32)
        self.digits = np.full(size, -1, dtype=np.int32)
        self.closing = np.zeros(size, dtype=np.int32)
        for spelled, token in known.items():
            self.closing[token] = spelled.startswith('"')
        self.digit_tokens = np.array([known[str(digit)] for digit in range(10)], dtype=np.int32)
        self.digits[self.digit_tokens] = range(10)
        self.classes[self.digit_tokens] = DIGIT
        self.classes[CoordVocab.from_tokenizer(tokenizer).ids] = COORDINATE
        self.example = self._encode(example_answers())
        self.number_lead, self.name_lead = self._lead(NUMBER_LEAD), self._lead(NAME_LEAD)
        starts = [at for at in range(len(self.example)) if _ends_with(self.example[:at], self.name_lead)]
        self.after_name = starts[0] + len(self._encode("object")) if starts else 0

    def draft(self, request: Tokens, most: int) -> list[int]:
        """Return at most `most` tokens that may follow those of a request, (length,)."""
        tokens = np.concatenate((self.example, request))
        longest = min(LONGEST_REPETITION, len(request))
        length, place = _longest_repetition(self.classes[tokens], longest)
        since, after_name = self._last_name(request)
        if since and length <= since:
            place = after_name  # the repetition does not reach back to the name's begin: no other object has this name
        elif length < SHORTEST_REPETITION:
            return []
        return self._copy(tokens, place, self._next_number(request), most)

    def _last_name(self, request: Tokens) -> tuple[int, int]:
        """Return the tokens since a request's last name began, and where the example continues as the request may.

        Zeros if there is no name, or if other tokens follow it than in the example.
        """
        start = _last_end(request, self.name_lead)
        since = request[start:]
        closing = self.closing[since].nonzero()[0]
        written = since[closing[0] :] if len(closing) else since[:0]
        place = self.after_name + len(written)
        agree = np.array_equal(written, self.example[self.after_name : place])
        return (len(since), place) if start and agree and len(since) <= LONGEST_NAME else (0, 0)

    def _copy(self, tokens: Tokens, place: int, number: list[int], most: int) -> list[int]:
        """Return what followed a place up to a coordinate, its first object number replaced."""
        draft: list[int] = []
        while len(draft) < most and place < len(tokens) and self.classes[tokens[place]] != COORDINATE:
            if number and self.digits[tokens[place]] >= 0 and _ends_with(tokens[:place], self.number_lead):
                draft += number
                number = []
                place += len(self._digits_at(tokens, place))
            else:
                draft.append(int(tokens[place]))
                place += 1
        return draft[:most]

    def _next_number(self, request: Tokens) -> list[int]:
        """Return the tokens of the object number that follows the last one of a request."""
        end = _last_end(request[:-1], self.number_lead)  # one that ends the request has no number yet
        last = self._digits_at(request, end) if end else []
        number = int("".join(map(str, last)) or 0) + 1
        return [int(self.digit_tokens[int(digit)]) for digit in str(number)]

    def _digits_at(self, tokens: Tokens, place: int) -> list[int]:
        """Return the values of the digits at a place."""
        values: list[int] = self.digits[tokens[place : place + LONGEST_NUMBER]].tolist()
        return values[: values.index(-1)] if -1 in values else values

    def _encode(self, text: str) -> Tokens:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def _lead(self, known: str) -> Tokens:
        """Return the last LEAD tokens of an answer that spell `known`; NEVER if its last one has more."""
        tokens = self._encode(f'{{"{NUMBER_LEAD}1": {{"{NAME_LEAD}cat"}}}}').tolist()
        spelled = [self._tokenizer.decode(tokens[:i]) for i in range(len(tokens) + 1)]
        end = next((i for i, text in enumerate(spelled) if text.endswith(known)), 0)
        start = next((i for i in reversed(range(end)) if known in self._tokenizer.decode(tokens[i:end])), end)
        lead = tokens[start:end][-LEAD:] or [NEVER]
        return np.array([ANY] * (LEAD - len(lead)) + lead, dtype=np.int32)


def _longest_repetition(classes: Tokens, longest: int) -> tuple[int, int]:
    """Return the length of the longest repetition of the end, and where the latest one is over.

    >>> _longest_repetition(np.array([7, 8, 1, 7, 8, 2, 7, 8], dtype=np.int32), 8)
    (2, 5)
    """
    text = _as_text(classes)
    least, length, place = 1, 0, 0
    while least <= longest:
        middle = (least + longest) // 2
        found = text.rfind(text[-middle:], 0, len(text) - 1)
        if found >= 0:
            least, length, place = middle + 1, middle, found + middle
        else:
            longest = middle - 1
    return length, place


def _ends_with(tokens: Tokens, lead: Tokens) -> bool:
    known = lead[lead != ANY]
    return len(tokens) >= len(known) and bool((tokens[len(tokens) - len(known) :] == known).all())


def _last_end(tokens: Tokens, lead: Tokens) -> int:
    """Return where the lead ends for the last time; 0 if it is nowhere.

    >>> _last_end(np.array([7, 8, 1, 7, 8], dtype=np.int32), np.array([ANY, 7, 8], dtype=np.int32))
    5
    """
    known = lead[lead != ANY]
    at = -1 if NEVER in known else _as_text(tokens).rfind(_as_text(known))
    return at + len(known) if at >= 0 else 0


def _as_text(tokens: Tokens) -> str:
    """Return a text with a character for each token, in which Python searches fast."""
    return tokens.astype("<u4").tobytes().decode("utf-32-le", errors="surrogatepass")
