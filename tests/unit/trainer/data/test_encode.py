"""What the learner trains on begins with the server's prompt ids and ends as the chat template ends a turn."""

from __future__ import annotations

import copy

import pytest
import torch

from stage2_api.errors import ConfigError
from stage2_trainer.data.encode import Encoder
from stage2_trainer.data.images import load_image

ANSWER = '{"object_1": {"desc": "red box", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}}'


@pytest.fixture
def prompt(encoder, chats):
    return encoder.prompt(chats[0])


def rendered(processor, chat, image, *answer):
    messages = [*copy.deepcopy(chat), *({"role": "assistant", "content": text} for text in answer)]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=not answer)
    return processor(text=[text], images=[image], return_tensors="pt")


def test_a_prompt_is_what_the_processor_makes_of_the_whole_chat(encoder, processor, chats, image_paths):
    expected = rendered(processor, chats[1], load_image(image_paths[1]))
    found = encoder.prompt(chats[1])
    assert torch.equal(found.input_ids, expected["input_ids"][0])
    assert torch.equal(found.pixel_values, expected["pixel_values"])
    assert torch.equal(found.image_grid_thw, expected["image_grid_thw"])


def test_a_teacher_forced_answer_is_what_the_chat_template_makes_of_a_whole_turn(
    encoder, processor, chats, image_paths
):
    expected = rendered(processor, chats[0], load_image(image_paths[0]), ANSWER)
    ids = encoder.tokenizer.encode(ANSWER, add_special_tokens=False)
    found = encoder.teacher_forced(encoder.prompt(chats[0]), ids)
    assert torch.equal(found.input_ids, expected["input_ids"][0])
    assert torch.equal(found.mm_token_type_ids, expected["mm_token_type_ids"][0].long())


def test_encoding_leaves_the_messages_as_they_were(encoder, chats):
    before = copy.deepcopy(chats[0])
    encoder.prompt(chats[0])
    assert chats[0] == before


def test_the_answer_lies_between_prompt_and_end_of_turn(encoder, prompt):
    encoding = encoder.teacher_forced(prompt, [300, 301])
    after = encoding.prompt_len + encoding.answer_len
    assert encoding.input_ids[encoding.prompt_len : after].tolist() == [300, 301]
    assert encoder.tokenizer.decode(encoding.input_ids[after:]) == "<|im_end|>\n"


def test_equal_prompt_ids_pass(encoder, prompt):
    encoder.check_prompt(prompt, prompt.input_ids.tolist(), "http://server")


@pytest.mark.parametrize(
    ("change", "position"),
    [(lambda ids: [*ids[:7], 9, *ids[8:]], 7), (lambda ids: ids[:-1], -1), (lambda ids: [*ids, 9], 0)],
    ids=["another token", "shorter", "longer"],
)
def test_a_differing_prompt_names_server_and_first_position(encoder, prompt, change, position):
    ids = prompt.input_ids.tolist()
    expected = {7: 7, -1: len(ids) - 1, 0: len(ids)}[position]
    with pytest.raises(ConfigError, match="prompt tokenization mismatch") as error:
        encoder.check_prompt(prompt, change(ids), "http://server")
    assert f"position {expected} of" in str(error.value)
    assert "http://server" in str(error.value)


def test_a_chat_template_that_never_ends_a_turn_is_refused(processor):
    broken = copy.copy(processor)
    broken.chat_template = processor.chat_template.replace("<|im_end|>\\n", "")
    with pytest.raises(ConfigError, match="chat template"):
        Encoder(broken)
