"""Encoded prompts, their pixels held while memory allows: an image is processed once, not once for each use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from threading import Lock
from typing import Any

import torch

from stage2_trainer.data.encode import Encoder, Prompt

GIB = 2**30
Images = tuple[str, ...]  # a prompt's images, as its record names them


class PromptCache:
    """A cache of the prompts of one run, which differ in their images alone; thread-safe.

    limit_bytes: what is held at most, with the names of the images, which are the images themselves where they are
    `data:` URLs. What was not used for longest goes first, and is read again when it is needed.
    """

    def __init__(self, encoder: Encoder, limit_bytes: int) -> None:
        self._encoder = encoder
        self._limit = limit_bytes
        self._held: OrderedDict[Images, Prompt] = OrderedDict()
        self._making: dict[Images, Future[Prompt]] = {}
        self._bytes = 0
        self._lock = Lock()

    def prompt(self, images: Images, chat: Callable[[], list[dict[str, Any]]]) -> Prompt:
        """Return the prompt of the chat with these images, without its pixels; `chat` makes it where it is needed."""
        return replace(self.whole(images, chat), pixel_values=None)

    def whole(self, images: Images, chat: Callable[[], list[dict[str, Any]]]) -> Prompt:
        """Return it with its pixels."""
        with self._lock:
            found = self._found(images)
            if found is not None:
                return found
            made = self._making.get(images)
            if made is None:
                mine = self._making[images] = Future()
        if made is not None:
            return made.result()
        try:
            mine.set_result(self._encoder.prompt(chat()))
        except BaseException as error:  # noqa: BLE001  # it is raised where the prompt is asked for
            mine.set_exception(error)
        with self._lock:
            del self._making[images]
            if mine.exception() is None:
                self._hold(images, mine.result())
        return mine.result()

    def pixels(self, images: Images) -> torch.Tensor | None:
        """Return the pixels of a prompt's images."""
        with self._lock:
            found = self._found(images)
        return self._encoder.pixels(images) if found is None else found.pixel_values

    def _found(self, images: Images) -> Prompt | None:
        if images in self._held:
            self._held.move_to_end(images)
        return self._held.get(images)

    def _hold(self, images: Images, prompt: Prompt) -> None:
        if _size(images, prompt) > self._limit:
            return
        self._held[images] = prompt
        self._bytes += _size(images, prompt)
        while self._bytes > self._limit:
            self._bytes -= _size(*self._held.popitem(last=False))


def _size(images: Images, prompt: Prompt) -> int:
    pixels = 0 if prompt.pixel_values is None else prompt.pixel_values.nbytes
    return pixels + prompt.input_ids.nbytes + sum(map(len, images))
