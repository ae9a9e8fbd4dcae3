"""The byte-level tokenizer: coordinate tokens, round trips, and where pieces end."""

import pytest

from tiny_model.answers import COORD_TOKENS, PROMPT, truth, write
from tiny_model.scenes import make_scene

BOX_TOKENS, TRIANGLE_TOKENS = 19, 23


@pytest.mark.parametrize("text", ["été ü", "日本語", "object_12: {x}\n\t", PROMPT, '{"object_1": {"desc": "ça"}}'])
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_coord_token_is_one_id_and_they_lie_in_order(tokenizer):
    ids = tokenizer.convert_tokens_to_ids(COORD_TOKENS)
    assert ids == list(range(ids[0], ids[0] + 1000))
    assert tokenizer("<|coord_7|>")["input_ids"] == [ids[7]]


def test_coord_tokens_stay_when_special_tokens_are_skipped(tokenizer):
    ids = tokenizer("<|coord_7|><|im_end|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<|coord_7|>"


def test_an_object_is_19_tokens_as_a_box_and_23_as_a_triangle(tokenizer):
    for index in range(50):
        scene = make_scene(7, "train", index)
        expected = sum(BOX_TOKENS if found.kind == "bbox" else TRIANGLE_TOKENS for found in truth(scene))
        # Before the first object `{"` stands where `, "` does before the others, and one `}` ends them all.
        assert len(tokenizer(write(scene))["input_ids"]) == expected + 1


def test_an_answer_cut_after_a_closed_object_is_cut_between_tokens(tokenizer):
    answer = write(make_scene(7, "train", 0))
    whole = tokenizer(answer)["input_ids"]
    cuts = [i + 1 for i, character in enumerate(answer) if character == "}"]
    for cut in cuts:
        head, tail = (tokenizer(text)["input_ids"] for text in (answer[:cut], answer[cut:]))
        assert head + tail == whole


def test_the_template_renders_turns_as_qwen3_vl_does(tokenizer):
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
