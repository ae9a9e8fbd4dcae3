"""The tokenizers of the benchmarks of drafts: the tiny model's, and one that splits COCO's 80 names as Qwen's would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stage2_api.coordinates import BINS, coord_token
from stage2_trainer.matching import GTObject, serialize_objects

EXAMPLES = Path(__file__).parents[1] / "examples"
MODEL = EXAMPLES / "tiny-qwen3-vl"
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen's tokenizer splits text before it merges bytes."""
COCO = {
    "person": 262465, "car": 43867, "chair": 38491, "book": 24715, "bottle": 24342, "cup": 20650, "dining table": 15714,
    "bowl": 14358, "traffic light": 12884, "handbag": 12354, "umbrella": 11431, "bird": 10806, "boat": 10759,
    "truck": 9973, "bench": 9838, "sheep": 9509, "banana": 9458, "kite": 9076, "motorcycle": 8725, "backpack": 8720,
    "potted plant": 8652, "cow": 8147, "wine glass": 7913, "carrot": 7852, "knife": 7770, "broccoli": 7308,
    "donut": 7179, "bicycle": 7113, "skis": 6646, "vase": 6613, "horse": 6587, "tie": 6496, "cell phone": 6434,
    "orange": 6399, "cake": 6353, "sports ball": 6347, "clock": 6334, "suitcase": 6192, "spoon": 6165,
    "surfboard": 6126, "bus": 6069, "apple": 5851, "pizza": 5821, "tv": 5805, "couch": 5779, "remote": 5703,
    "sink": 5610, "skateboard": 5543, "elephant": 5513, "dog": 5508, "fork": 5479, "zebra": 5303, "airplane": 5135,
    "giraffe": 5131, "laptop": 4970, "tennis racket": 4812, "teddy bear": 4793, "cat": 4768, "train": 4571,
    "sandwich": 4373, "bed": 4192, "toilet": 4157, "baseball glove": 3747, "oven": 3334, "baseball bat": 3276,
    "hot dog": 2918, "keyboard": 2855, "snowboard": 2685, "frisbee": 2682, "refrigerator": 2637, "mouse": 2262,
    "stop sign": 1983, "toothbrush": 1954, "fire hydrant": 1865, "microwave": 1673, "scissors": 1481, "bear": 1294,
    "parking meter": 1285, "toaster": 225, "hair drier": 198,
}  # fmt: skip
"""Instances of each name in COCO's training set of 2017, to draw names by."""


def qwen_like_tokenizer(names: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE that splits as Qwen's does, in which the frame's words and those of names are tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    answers = [serialize_objects([GTObject(name, "bbox", (1, 2, 3, 4))] * 3) for name in names]
    polygon = serialize_objects([GTObject("object", "poly", (1, 2, 3, 4, 5, 6))] * 2)
    text = [part for one in (*answers, polygon, "assistant\n") for part in _without_coordinates(one)]
    trainer = trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text * 2, trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(coord_token(k), normalized=False) for k in range(BINS)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def _without_coordinates(answer: str) -> list[str]:
    pieces = answer.split("<|coord_")
    return [pieces[0], *(piece.partition("|>")[2] for piece in pieces[1:])]
