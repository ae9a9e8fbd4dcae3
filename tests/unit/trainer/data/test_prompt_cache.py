"""Encoded prompts are held while memory allows: each image is processed once, whoever asks for it."""

from __future__ import annotations

import threading

import pytest
import torch

from stage2_trainer.data.encode import PromptCache
from stage2_trainer.data.images import image_url
from stage2_trainer.rollouts.hf import Decoding, HfBackend
from stage2_trainer.wire.requests import RolloutRequest, SeedPlan


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


def test_pixels_are_held_while_memory_allows_and_else_read_again(encoder, image_paths, chats):
    whole = encoder.prompt(chats[0])
    for limit in (2**30, 0, whole.pixel_values.nbytes):
        cache = PromptCache(encoder, limit)
        prompt = cache.prompt((image_paths[0],), lambda: chats[0])
        cache.prompt((image_paths[1],), lambda: chats[1])
        assert prompt.pixel_values is None
        assert torch.equal(prompt.input_ids, whole.input_ids)
        assert torch.equal(cache.pixels((image_paths[0],)), whole.pixel_values)


def test_an_image_that_is_its_own_name_takes_memory_too(counted, image_paths, chats):
    url = image_url(image_paths[0]) + " " * 2**20  # far longer than its pixels are
    whole = counted.prompt(chats[0])
    for limit, encoded in ((2**20 + 2**18, 1), (2**20, 2)):
        assert whole.pixel_values.nbytes < 2**18
        cache, before = PromptCache(counted, limit), counted.count
        for _ in range(2):
            cache.prompt((url,), lambda: chats[0])
        assert counted.count - before == encoded


def test_rollouts_of_the_own_model_process_no_image_that_is_held(model, counted, image_paths, chats):
    cache = PromptCache(counted, 2**30)
    prompts = [cache.prompt(one, lambda chat=chat: chat) for one, chat in zip(names(image_paths), chats, strict=True)]
    requests = [RolloutRequest(chat, images=one) for one, chat in zip(names(image_paths), chats, strict=True)]
    backend = HfBackend(model, counted, Decoding(max_new_tokens=2), cache=cache)
    rollouts = backend.generate(requests, seed_plan=SeedPlan(17, 0, 0))
    assert [one.prompt_token_ids for one in rollouts] == [one.input_ids.tolist() for one in prompts]
    assert counted.count == len(chats)


def test_two_threads_that_want_one_prompt_encode_it_once(counted, image_paths, chats):
    cache, barrier, found = PromptCache(counted, 0), threading.Barrier(2), []

    def chat():
        for thread in threads:  # the other one has time to ask while this one reads
            thread is not threading.current_thread() and thread.join(0.2)
        return chats[0]

    def ask():
        barrier.wait()
        found.append(cache.whole((image_paths[0],), chat))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted.count == 1
    assert found[0] is found[1]


def test_an_image_that_cannot_be_read_is_named_each_time(encoder, tmp_path):
    cache, missing = PromptCache(encoder, 2**30), str(tmp_path / "missing.png")
    for _ in range(2):
        with pytest.raises((OSError, ValueError), match="missing"):
            cache.prompt((missing,), lambda: [{"role": "user", "content": image_url(missing)}])
