"""Requests hold images and prompt; training begins with the prompt ids of the server; encoded prompts are cached."""

from __future__ import annotations

import base64
import copy
import io
import json
import threading

import pytest
import torch
from PIL import Image

from stage2_api.errors import ConfigError
from stage2_trainer.data import encode
from stage2_trainer.data.encode import Encoder, PromptCache
from stage2_trainer.data.images import image_url, load_image
from stage2_trainer.data.messages import chat_messages, image_sources
from stage2_trainer.data.records import Record
from stage2_trainer.matching import GTObject
from stage2_trainer.rollouts.hf import Decoding, HfBackend
from stage2_trainer.wire.requests import RolloutRequest, SeedPlan

ANSWER = '{"object_1": {"desc": "red box", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}}'


@pytest.fixture
def prompt(encoder, chats):
    return encoder.prompt(chats[0])


def rendered(processor, chat, image, *answer):
    messages = [*copy.deepcopy(chat), *({"role": "assistant", "content": text} for text in answer)]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=not answer)
    return processor(text=[text], images=[image], return_tensors="pt")


def test_encoded_prompt_equals_processor_output_for_whole_chat(encoder, processor, chats, image_paths):
    expected = rendered(processor, chats[1], load_image(image_paths[1]))
    found = encoder.prompt(chats[1])
    assert torch.equal(found.input_ids, expected["input_ids"][0])
    assert torch.equal(found.pixel_values, expected["pixel_values"])
    assert torch.equal(found.image_grid_thw, expected["image_grid_thw"])


def test_teacher_forced_encoding_equals_chat_template_of_whole_turn(encoder, processor, chats, image_paths):
    expected = rendered(processor, chats[0], load_image(image_paths[0]), ANSWER)
    ids = encoder.tokenizer.encode(ANSWER, add_special_tokens=False)
    found = encoder.teacher_forced(encoder.prompt(chats[0]), ids)
    assert torch.equal(found.input_ids, expected["input_ids"][0])
    assert torch.equal(found.mm_token_type_ids, expected["mm_token_type_ids"][0].long())


def test_encoding_does_not_modify_messages(encoder, chats):
    before = copy.deepcopy(chats[0])
    encoder.prompt(chats[0])
    assert chats[0] == before


def test_answer_tokens_lie_between_prompt_and_end_of_turn(encoder, prompt):
    encoding = encoder.teacher_forced(prompt, [300, 301])
    after = encoding.prompt_len + encoding.answer_len
    assert encoding.input_ids[encoding.prompt_len : after].tolist() == [300, 301]
    assert encoder.tokenizer.decode(encoding.input_ids[after:]) == "<|im_end|>\n"


def test_equal_prompt_ids_of_server_pass_check(encoder, prompt):
    encoder.check_prompt(prompt, prompt.input_ids.tolist(), "http://server")


@pytest.mark.parametrize(
    ("change", "position"),
    [(lambda ids: [*ids[:7], 9, *ids[8:]], 7), (lambda ids: ids[:-1], -1), (lambda ids: [*ids, 9], 0)],
    ids=["another token", "shorter", "longer"],
)
def test_prompt_mismatch_error_names_server_and_first_differing_position(encoder, prompt, change, position):
    ids = prompt.input_ids.tolist()
    expected = {7: 7, -1: len(ids) - 1, 0: len(ids)}[position]
    with pytest.raises(ConfigError, match="prompt tokenization mismatch") as error:
        encoder.check_prompt(prompt, change(ids), "http://server")
    assert f"position {expected} of" in str(error.value)
    assert "http://server" in str(error.value)


def test_chat_template_without_end_of_turn_is_refused(processor):
    broken = copy.copy(processor)
    broken.chat_template = processor.chat_template.replace("<|im_end|>\\n", "")
    with pytest.raises(ConfigError, match="chat template"):
        Encoder(broken)


def square(color):
    file = io.BytesIO()
    Image.new("RGB", (10, 10), color).save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


RECORD = Record(
    index=0,
    sample_id="s",
    images=(square("red"), square("blue")),
    width=10,
    height=10,
    objects=(GTObject("secret", "bbox", (1, 2, 3, 4)),),
)


def test_user_turn_holds_images_before_prompt():
    (user,) = chat_messages(RECORD, "List.")
    assert [part["type"] for part in user["content"]] == ["image_url", "image_url", "text"]
    assert user["content"][-1]["text"] == "List."


def test_system_prompt_comes_first():
    assert [turn["role"] for turn in chat_messages(RECORD, "List.", system="Be exact.")] == ["system", "user"]


def test_ground_truth_is_not_in_request():
    assert "secret" not in json.dumps(chat_messages(RECORD, "List."))


def test_image_sources_are_in_token_order():
    assert image_sources(chat_messages(RECORD, "List.", system="Be exact.")) == list(RECORD.images)


class Counted:
    """An encoder that counts the prompts which it encodes."""

    def __init__(self, encoder):
        self._encoder = encoder
        self.count = 0

    def __getattr__(self, name):
        return getattr(self._encoder, name)

    def prompt(self, messages):
        self.count += 1
        return self._encoder.prompt(messages)


@pytest.fixture
def counted(encoder):
    return Counted(encoder)


def names(image_paths):
    return [(path,) for path in image_paths]


def test_prompt_cache_keeps_pixels_within_memory_limit_and_reloads_others(encoder, image_paths, chats):
    whole = encoder.prompt(chats[0])
    for limit in (2**30, 0, whole.pixel_values.nbytes):
        cache = PromptCache(encoder, limit)
        prompt = cache.prompt((image_paths[0],), lambda: chats[0])
        cache.prompt((image_paths[1],), lambda: chats[1])
        assert prompt.pixel_values is None
        assert torch.equal(prompt.input_ids, whole.input_ids)
        assert torch.equal(cache.pixels((image_paths[0],)), whole.pixel_values)


def test_data_url_key_counts_towards_prompt_cache_memory(counted, image_paths, chats):
    url = image_url(image_paths[0]) + " " * 2**20  # far longer than its pixels are
    whole = counted.prompt(chats[0])
    for limit, encoded in ((2**20 + 2**18, 1), (2**20, 2)):
        assert whole.pixel_values.nbytes < 2**18
        cache, before = PromptCache(counted, limit), counted.count
        for _ in range(2):
            cache.prompt((url,), lambda: chats[0])
        assert counted.count - before == encoded


def test_hf_rollouts_do_not_process_cached_images_again(model, counted, image_paths, chats):
    cache = PromptCache(counted, 2**30)
    prompts = [cache.prompt(one, lambda chat=chat: chat) for one, chat in zip(names(image_paths), chats, strict=True)]
    requests = [RolloutRequest(chat, images=one) for one, chat in zip(names(image_paths), chats, strict=True)]
    backend = HfBackend(model, counted, Decoding(max_new_tokens=2), cache=cache)
    rollouts = backend.generate(requests, seed_plan=SeedPlan(17, 0, 0))
    assert [one.prompt_token_ids for one in rollouts] == [one.input_ids.tolist() for one in prompts]
    assert counted.count == len(chats)


def test_two_threads_asking_for_same_prompt_encode_it_once(counted, image_paths, chats, monkeypatch):
    cache, read, other_asks, found = PromptCache(counted, 0), [], threading.Event(), []

    class Awaited(encode.Future):
        def result(self, timeout=None):
            other_asks.set()
            return super().result(timeout)

    monkeypatch.setattr(encode, "Future", Awaited)

    def chat():
        read.append(1)
        assert len(read) > 1 or other_asks.wait(60)
        other_asks.set()
        return chats[0]

    def ask():
        found.append(cache.whole((image_paths[0],), chat))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted.count == 1
    assert found[0] is found[1]


def test_unreadable_image_is_reported_on_each_request(encoder, tmp_path):
    cache, missing = PromptCache(encoder, 2**30), str(tmp_path / "missing.png")
    for _ in range(2):
        with pytest.raises((OSError, ValueError), match="missing"):
            cache.prompt((missing,), lambda: [{"role": "user", "content": image_url(missing)}])
