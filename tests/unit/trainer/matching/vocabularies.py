"""Tiny byte-level BPE tokenizers with 1000 coordinate tokens, wrapped as Hugging Face tokenizers."""

from functools import cache

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stage2_api.coordinates import coord_token
from stage2_trainer.matching.ground_truth import GTObject, serialize_objects
from stage2_trainer.matching.tokens import CoordVocab

# `}` ends every piece, so a cut after an object falls between two tokens ...
ALIGNED = r"bbox_2d|[A-Za-z]+_?|\d| [A-Za-z]+|[^A-Za-z0-9}]*\}|[^A-Za-z0-9}]+"
# ... and here it does not: the answers hold the piece `"]}, "`, the end of one object and the start of the next.
FUSED = r"bbox_2d|[A-Za-z]+_?|\d| [A-Za-z]+|[^A-Za-z0-9]+"
STOP_IN_TOKEN = '"]}}<|im_end|>'
END_IN_TOKEN = '"]]}, $'


def _corpus() -> list[str]:
    box = GTObject("red box", "bbox", (1, 2, 3, 4))
    triangle = GTObject("blue triangle", "poly", (1, 2, 3, 4, 5, 6))
    answer = serialize_objects([box, triangle, box, box])
    for k in range(1, 7):
        answer = answer.replace(coord_token(k), "\0")
    return [part for part in answer.split("\0") if part] * 4


@cache
def build_tokenizer(pieces: str, *extra: str) -> PreTrainedTokenizerFast:
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(), trainer)
    added = [*(coord_token(k) for k in range(1000)), *extra]
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", clean_up_tokenization_spaces=False)


@cache
def aligned_vocab() -> CoordVocab:
    return CoordVocab.from_tokenizer(build_tokenizer(ALIGNED))


@cache
def fused_vocab() -> CoordVocab:
    return CoordVocab.from_tokenizer(build_tokenizer(FUSED, STOP_IN_TOKEN, END_IN_TOKEN))
