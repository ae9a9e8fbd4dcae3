"""The frame of answers is drafted wherever the answer stands, in the tokens of any tokenizer."""

from types import SimpleNamespace

import numpy as np
import pytest
from bench.coco_names import qwen_like_tokenizer
from transformers import AutoTokenizer

from stage2_trainer.matching import ground_truth, serialize_objects
from stage2_trainer.serve.frame import LEAD, NEVER, Frame
from tests.integration.conftest import ROOT

MOST = 24
PROMPT = "<|im_start|>user\nList the objects.<|im_end|>\n<|im_start|>assistant\n"
OBJECTS = [
    {"desc": "dog", "bbox_2d": [1, 2, 3, 4]},
    {"desc": "dog", "bbox_2d": [5, 6, 70, 80]},
    {"desc": "traffic light", "poly": [[9, 9], [20, 9], [20, 30], [9, 30]]},
    *[{"desc": "cat", "bbox_2d": [i, i, i + 5, i + 6]} for i in range(8)],
]
ANSWER = serialize_objects(ground_truth({f"object_{i}": one for i, one in enumerate(OBJECTS, 1)}).objects)


@pytest.fixture(scope="module", params=["tiny", "qwen-like"])
def tokenizer(request):
    if request.param == "qwen-like":
        return qwen_like_tokenizer(("dog", "cat", "traffic light"))
    return AutoTokenizer.from_pretrained(ROOT / "examples" / "tiny-qwen3-vl")


@pytest.fixture(scope="module")
def frame(tokenizer):
    return Frame(tokenizer)


def encode(tokenizer, text):
    return np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


def draft(frame, tokenizer, text, most=MOST):
    return tokenizer.decode(frame.draft(encode(tokenizer, PROMPT + text), most), skip_special_tokens=False)


@pytest.mark.parametrize(
    ("written", "follows"),
    [
        ('{"', 'object_1": {"desc": "'),
        ('{"object_1": {"desc": "dog", "', 'bbox_2d": ["'),
        ('{"object_1": {"desc": "dog", "poly', '": [["'),
        ('{"object_1": {"desc": "dog", "bbox_2d": ["<|coord_1|>', '", "'),
        (ANSWER[: ANSWER.index('"]}, "object_2"')], '"]}, "object_2": {"desc": "'),
        (ANSWER[: ANSWER.index('"]}, "object_10"')], '"]}, "object_10": {"desc": "cat", "bbox_2d": ["'),
        (ANSWER[: ANSWER.index('"], ["<|coord_20|>", "<|coord_30')], '"], ["'),
        (ANSWER[:-1] + ', "object_12": {"desc": "traffic', ' light", "poly": [["'),
        (ANSWER, "<|im_end|>"),
    ],
)
def test_frame_is_drafted_up_to_next_coordinate(frame, tokenizer, written, follows):
    found = draft(frame, tokenizer, written)
    assert found.startswith(follows)
    assert "<|coord_" not in found
    assert (
        draft(frame, tokenizer, written, most=2) == tokenizer.decode(encode(tokenizer, follows)[:2])
        or tokenizer.decode(frame.draft(encode(tokenizer, PROMPT + written), 2))
        == found[: len(draft(frame, tokenizer, written, most=2))]
    )


def test_frame_follows_name_that_only_prompt_has(frame, tokenizer):
    prompt = "<|im_start|>user\nList each traffic light, cat, and dog.<|im_end|>\n<|im_start|>assistant\n"
    tokens = encode(tokenizer, prompt + '{"object_1": {"desc": "traffic light')
    assert tokenizer.decode(frame.draft(tokens, MOST)) == '", "bbox_2d": ["'


def test_number_follows_last_one_of_request_where_digits_differ(frame, tokenizer):
    one = {"desc": "dog", "bbox_2d": [1, 2, 3, 4]}
    for count in (9, 10, 99, 999):
        answer = serialize_objects(ground_truth({f"object_{i}": one for i in range(1, count + 1)}).objects)
        assert draft(frame, tokenizer, answer[:-4]).startswith(f'"]}}, "object_{count + 1}": {{"desc": "')


def test_drafting_saves_most_decoding_steps(frame, tokenizer):
    tokens, answer = encode(tokenizer, PROMPT), encode(tokenizer, ANSWER + "<|im_end|>")
    position, steps = 1, 1
    while position < len(answer):
        drafted = frame.draft(np.concatenate((tokens, answer[:position])), MOST)
        right = [a == b for a, b in zip(drafted, answer[position:], strict=False)]
        position += (right.index(False) if False in right else len(right)) + 1
        steps += 1
    coordinates = ANSWER.count("coord")
    assert coordinates < steps < 0.4 * len(answer)


def test_frame_of_other_answer_format_is_learned_from_first_object(frame, tokenizer):
    one = '{"box":["<|coord_1|>","<|coord_2|>"],"name":"dog"};'
    assert draft(frame, tokenizer, one + '{"box":["<|coord_3|>').startswith('","')


def test_tokens_that_tokenizer_lacks_are_drafted(tokenizer):
    surrogates = np.array([0xD800, 0xDFFF, 0xDC00, 7], dtype=np.int32)
    assert Frame(tokenizer, 0xE000).draft(np.tile(surrogates, 3)[:-2], 3) == [0xDC00, 7, 0xD800]


def test_frame_between_coordinates_is_drafted_without_tokens_for_keys(tokenizer, monkeypatch):
    monkeypatch.setattr(Frame, "_lead", lambda *_: np.full(LEAD, NEVER, dtype=np.int32))
    assert draft(Frame(tokenizer), tokenizer, '{"object_1": {"desc": "dog", "bbox_2d": ["<|coord_1|>') == '", "'


def test_vllm_gets_drafts_only_for_requests_with_new_tokens_and_room(tokenizer, monkeypatch):
    pytest.importorskip("vllm")
    from stage2_trainer.serve import frame_proposer

    monkeypatch.setattr(frame_proposer, "cached_tokenizer_from_config", lambda _: tokenizer)
    text = encode(tokenizer, PROMPT + '{"object_1": {"desc": "dog", "bbox_2d": ["<|coord_1|>')
    longest = len(text) + 1
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=MOST),
        model_config=SimpleNamespace(max_model_len=longest, get_vocab_size=lambda: 0),
    )
    rows = np.zeros((3, longest), dtype=np.int32)
    rows[:, : len(text)] = text
    first = encode(tokenizer, '", "')[:1].tolist()
    proposer = frame_proposer.FrameProposer(config)
    lengths = np.array([len(text), len(text), longest], dtype=np.int32)
    assert proposer.propose([[int(text[-1])], [], [0]], lengths, rows) == [first, [], []]


def test_endless_digits_in_object_key_are_not_read_as_number():
    tokenizer = qwen_like_tokenizer(("dog",))
    tokenizer.add_tokens(["1" * 10])
    frame = Frame(tokenizer)
    looping = '{"object_' + "1" * 5000 + '": {"desc": "dog", "bbox_2d": ["' + '", "'.join(["<|coord_1|>"] * 4)
    assert draft(frame, tokenizer, looping).startswith('"]}')
