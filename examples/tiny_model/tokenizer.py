"""A byte-level BPE tokenizer made for the answers: 256 bytes, a few merges, control tokens and 1000 coord tokens."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stage2_api.coordinates import COORD_TOKEN
from tiny_model.answers import COORD_TOKENS, PROMPT, write
from tiny_model.foreign import Tokenizer
from tiny_model.scenes import make_scene

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
CONTROL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD]

# Pieces of an answer become one token each. `}` always ends a piece: an answer cut after its last closed object is cut
# between two tokens, and what is appended there is split as it is in a whole answer.
_PIECES = r"bbox_2d|[A-Za-z]+_?|\d| [A-Za-z]+|[^A-Za-z0-9}]*\}|[^A-Za-z0-9}]+"
_CORPUS_ANSWERS = 3000
_LARGEST_VOCABULARY = 512

# How Qwen3-VL's own template renders system, user and assistant turns with images, without its tools and videos.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for content in message.content %}
            {%- if content.type == 'image' or 'image' in content or 'image_url' in content %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in content %}
                {{- content.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def build_tokenizer(seed: int, *, plain: bool = False) -> Tokenizer:
    """Return the tokenizer, its merges learnt from the answers to `seed`'s warm-up scenes and from the prompt.

    plain: it has no coordinate tokens, as a stock model's.
    """
    bpe = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(_corpus(seed), _trainer())
    # Not "special": `skip_special_tokens` must leave the coordinates in an answer.
    known = () if plain else COORD_TOKENS
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in known])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD, TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def _trainer() -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=_LARGEST_VOCABULARY,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS],
        show_progress=False,
    )


def _corpus(seed: int) -> Sequence[str]:
    answers = [write(make_scene(seed, "warm-up", index)) for index in range(_CORPUS_ANSWERS)]
    # Coord tokens are tokens of their own: what the merges see is the text between them.
    between = [piece for answer in answers for piece in _without_coords(answer)]
    return [*between, *[f"system\nuser\nassistant\n{PROMPT}"] * 2]


def _without_coords(answer: str) -> list[str]:
    return COORD_TOKEN.sub("\0", answer).split("\0")
