"""The tokenizer, and answers in the product's format that its parser reads back."""

import pytest

from stage2_trainer.matching.tokens import CoordVocab
from tiny_model.answers import COORD_TOKENS, PROMPT, read, truth, write
from tiny_model.scenes import Scene, Shape, make_scene

BOX_TOKENS, TRIANGLE_TOKENS = 19, 23


@pytest.mark.parametrize("text", ["été ü", "日本語", "object_12: {x}\n\t", PROMPT, '{"object_1": {"desc": "ça"}}'])
def test_text_survives_encoding_and_decoding(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_coordinate_tokens_have_single_consecutive_ids(tokenizer):
    ids = tokenizer.convert_tokens_to_ids(COORD_TOKENS)
    assert ids == list(range(ids[0], ids[0] + 1000))
    assert tokenizer("<|coord_7|>")["input_ids"] == [ids[7]]


def test_coordinate_tokens_are_not_skipped_as_special_tokens(tokenizer):
    ids = tokenizer("<|coord_7|><|im_end|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<|coord_7|>"


def test_box_object_is_19_tokens_and_triangle_23(tokenizer):
    for index in range(50):
        scene = make_scene(7, "train", index)
        expected = sum(BOX_TOKENS if found.kind == "bbox" else TRIANGLE_TOKENS for found in truth(scene))
        # Before the first object `{"` stands where `, "` does before the others, and one `}` ends them all.
        assert len(tokenizer(write(scene))["input_ids"]) == expected + 1


def test_answer_can_be_cut_between_tokens_after_any_closed_object(tokenizer):
    answer = write(make_scene(7, "train", 0))
    whole = tokenizer(answer)["input_ids"]
    cuts = [i + 1 for i, character in enumerate(answer) if character == "}"]
    for cut in cuts:
        head, tail = (tokenizer(text)["input_ids"] for text in (answer[:cut], answer[cut:]))
        assert head + tail == whole


def test_chat_template_renders_turns_like_qwen3_vl(tokenizer):
    user = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "Hi"}],
    }
    messages = [{"role": "system", "content": "Be brief."}, user, {"role": "assistant", "content": "Yes"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Hi<|im_end|>\n"
        "<|im_start|>assistant\nYes<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True).endswith(
        "Hi<|im_end|>\n<|im_start|>assistant\n"
    )


SCENE = Scene(
    100,
    (255, 255, 255),
    (
        Shape("red", "box", (215, 45, 45), (1, 2, 30, 40)),
        Shape("blue", "triangle", (50, 85, 215), (10, 50, 30, 70), ((10, 50), (30, 50), (20, 70))),
    ),
)
ANSWER = (
    '{"object_1": {"desc": "red box", "bbox_2d": ["<|coord_10|>", "<|coord_20|>", "<|coord_300|>", "<|coord_400|>"]}, '
    '"object_2": {"desc": "blue triangle", "poly": [["<|coord_100|>", "<|coord_500|>"], '
    '["<|coord_300|>", "<|coord_500|>"], ["<|coord_200|>", "<|coord_700|>"]]}}'
)


@pytest.fixture(scope="session")
def read_text(tokenizer):
    vocab = CoordVocab.from_tokenizer(tokenizer)
    return lambda text: read(tokenizer(text)["input_ids"], vocab)


def test_answer_is_single_line_json_with_coordinate_tokens_and_point_pairs():
    assert write(SCENE) == ANSWER


def test_written_answer_is_read_back(read_text):
    for scene in (SCENE, *(make_scene(7, "train", index) for index in range(50))):
        answer = read_text(write(scene) + "<|im_end|>\n")
        assert answer.well_formed
        assert list(answer.objects) == truth(scene)
        assert answer.text == write(scene)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The shapes are red.",
        ANSWER[:-1],
        ANSWER + " and more",
        ANSWER.replace("desc", "name", 1),
        ANSWER.replace("<|coord_10|>", "10"),
        ANSWER.replace('"<|coord_10|>", ', ""),
    ],
)
def test_answer_of_other_form_is_not_well_formed(read_text, text):
    assert not read_text(text).well_formed


def test_readable_objects_of_broken_answer_are_kept(read_text):
    assert list(read_text(ANSWER.replace("red box", " ")).objects) == truth(SCENE)[1:]
