"""The tokens that close a list of objects, of several kinds of tokenizers; and what a bias against them does."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from stage2_api.errors import ConfigError
from stage2_trainer.matching.closing import closing_bias, closing_tokens
from stage2_trainer.matching.ground_truth import GTObject, serialize_objects
from tests.unit.trainer.matching.vocabularies import ALIGNED, FUSED, build_tokenizer
from tiny_model.tokenizer import build_tokenizer as build_tiny_tokenizer

EXAMPLES = Path(__file__).parents[4] / "examples"
QWEN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
BYTES = r"."
BOX, OUTLINE = GTObject("red box", "bbox", (1, 2, 3, 4)), GTObject("blue triangle", "poly", (1, 2, 3, 4, 5, 6))
TOKENIZERS = {
    **{name: EXAMPLES / name for name in ("tiny-qwen3-vl", "tiny-unordered", "tiny-few", "tiny-summaries")},
    "aligned": ALIGNED,
    "fused": FUSED,
    "qwen": QWEN,
}


def tokenizer_of(source):
    return AutoTokenizer.from_pretrained(source) if isinstance(source, Path) else build_tokenizer(source)


def encoder(tokenizer):
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("objects", [[BOX], [OUTLINE], [BOX, OUTLINE], [OUTLINE, BOX, BOX]])
def test_closing_token_occurs_once_in_answer_after_last_object(name, objects):
    tokenizer = tokenizer_of(TOKENIZERS[name])
    encode = encoder(tokenizer)
    closing = closing_tokens(encode)
    answer = encode(serialize_objects(objects))
    (place,) = [place for place, token in enumerate(answer) if token in closing]
    assert tokenizer.decode(answer[place:]).strip('"]') in ("}", "}}")


@pytest.mark.parametrize(("name", "text"), [("tiny-qwen3-vl", "}"), ("aligned", "}"), ("fused", '"]}}')])
def test_closing_tokens_include_expected_text(name, text):
    tokenizer = tokenizer_of(TOKENIZERS[name])
    assert text in [tokenizer.decode([token]) for token in closing_tokens(encoder(tokenizer))]


def test_closing_tokens_of_stock_tokenizer_end_its_json_lists():
    """Its pieces of punctuation take the end of their line, as Qwen's do, so that brackets and line ends are joined."""
    bpe = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    bpe.decoder = decoders.ByteLevel()
    entry = '{"bbox_2d": [1, 2, 3, 4], "label": "cat"}'
    lists = [f"[{', '.join([entry] * 3)}]", "[\n\t" + ",\n\t".join([entry] * 3) + "\n]"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(lists * 4, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    closing = closing_tokens(lambda text: bpe.encode(text).ids)
    assert {bpe.decode([token]) for token in closing} == {'"}]', '"}\n'}


@pytest.mark.parametrize("build", [lambda: build_tokenizer(BYTES), lambda: build_tiny_tokenizer(3, plain=True)])
def test_closing_token_that_also_occurs_within_answer_is_refused(build):
    with pytest.raises(ConfigError, match=r"close a list, and have other places in an answer.*leave out --longer"):
        closing_tokens(encoder(build()))


def test_tokenizer_without_closing_token_is_refused():
    with pytest.raises(ConfigError, match="no token closes a list"):
        closing_tokens(lambda text: [text.count("object_")] * (2 + text.count("desc")))


def test_closing_bias_is_subtracted_from_each_closing_token():
    encode = encoder(tokenizer_of(TOKENIZERS["tiny-qwen3-vl"]))
    (token,) = closing_tokens(encode)
    assert closing_bias(encode, 1.5) == {token: -1.5}
    assert closing_bias(encode, 0.0) == {}


@pytest.mark.parametrize("nats", [-0.1, 101.0, float("nan")])
def test_closing_bias_out_of_range_is_refused(nats):
    with pytest.raises(ConfigError, match="must lie in 0 to 100 nats"):
        closing_bias(encoder(build_tokenizer(ALIGNED)), nats)
