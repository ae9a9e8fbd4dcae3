"""The tokens that close an answer's list of objects, and the bias against them that makes a model list more.

An answer is closed where an answer with one object more continues: `}` against `, "object_2"`, or, with a tokenizer
that joins brackets, `]}}` against `]},`. A model that was trained on incomplete labels closes its answers too early.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from stage2_api.coordinates import coord_token
from stage2_api.errors import refused
from stage2_trainer.matching.ground_truth import GTObject, serialize_objects

Encode = Callable[[str], Sequence[int]]
"""Tokenises text without adding special tokens."""
Bias = dict[int, float]
"""What is added to the logits of tokens, by their ids."""
LARGEST_BIAS = 100.0
"""In nats. OpenAI's API, and so vLLM, takes no larger one."""
LONGER = "--longer"
SEQUENCE_BIAS = "sequence_bias"
"""The field of transformers' GenerationConfig with biases of tokens."""

_KINDS = (GTObject("object", "bbox", (0,) * 4), GTObject("object", "poly", (0,) * 6))


def closing_bias(encode: Encode, nats: float) -> Bias:
    """Return the bias against the tokens that close a list of objects.

    Raises ConfigError for a number out of range, and where no token closes a list and does nothing else.
    """
    if not 0 <= nats <= LARGEST_BIAS:  # a bias for the tokens would close lists inside objects
        rule = f"must lie in 0 to {LARGEST_BIAS:g} nats"
        raise refused(LONGER, nats, rule, "1 or 2 nats make a visible difference; too many break answers")
    return dict.fromkeys(closing_tokens(encode), -nats) if nats else {}


def generation_fields(bias: Mapping[int, float]) -> dict[str, Any]:
    """Return the fields of transformers' GenerationConfig that have this bias; none without one.

    >>> generation_fields({99: -1.5})
    {'sequence_bias': [[[99], -1.5]]}
    """
    return {SEQUENCE_BIAS: [[[token], value] for token, value in bias.items()]} if bias else {}


def take_bias(generation_config: Any) -> Bias:
    """Return the biases of single tokens in a model's GenerationConfig, which has none afterwards.

    transformers adds them to each answer of the model, also to one whose own settings have no bias.
    """
    pairs = getattr(generation_config, SEQUENCE_BIAS, None) or ()
    setattr(generation_config, SEQUENCE_BIAS, None)
    return {int(tokens[0]): float(value) for tokens, value in pairs if len(tokens) == 1}


def closing_tokens(encode: Encode) -> list[int]:
    """Return the ids of the tokens with which a list of one object or more is closed.

    The form of the answers is stage2's if the tokenizer has coordinate tokens, else Qwen3-VL's JSON with plain numbers.
    Raises ConfigError where no token closes a list, or one that does has another place in an answer, too.
    """
    closing: set[int] = set()
    others: set[int] = set()
    for answers in _examples(encode):
        for shorter, longer in pairwise(answers):
            place = next((i for i, pair in enumerate(zip(shorter, longer, strict=False)) if pair[0] != pair[1]), None)
            if place is None:
                raise _refused("no token closes a list: an answer is the beginning of a longer one")
            closing.add(shorter[place])
            others.update(shorter[:place], [longer[place]])
    if both := sorted(closing & others):
        rule = f"the tokens {both} close a list, and have other places in an answer, too"
        raise _refused(rule)
    return sorted(closing)


def _refused(rule: str) -> Exception:
    way_out = f"leave out {LONGER}: with this tokenizer a bias would change more than the length of the list"
    return refused(LONGER, "the model's tokenizer", rule, way_out)


def _examples(encode: Encode) -> Iterator[list[list[int]]]:
    """Yield example answers of one, two and three objects, for each way in which a list can end."""
    one_token = len(encode(coord_token(0))) == 1
    for write in (serialize_objects,) if one_token else (_in_one_line, _in_lines):
        for kind in _KINDS:
            yield [list(encode(write([kind] * count))) for count in (1, 2, 3)]


def _in_one_line(objects: Sequence[GTObject]) -> str:
    return json.dumps([_plain(one) for one in objects])


def _in_lines(objects: Sequence[GTObject]) -> str:
    return "```json\n[\n\t" + ",\n\t".join(json.dumps(_plain(one)) for one in objects) + "\n]\n```"


def _plain(one: GTObject) -> dict[str, object]:
    return {"bbox_2d" if one.kind == "bbox" else "poly": list(one.bins), "label": one.desc}
