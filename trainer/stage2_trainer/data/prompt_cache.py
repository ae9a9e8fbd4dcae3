"""Encoded prompts, their pixels held while memory allows: an image is processed once, not once for each use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from typing import Any

import torch

from stage2_trainer.data.encode import Encoder, Prompt

GIB = 2**30
Images = tuple[str, ...]  # a prompt's images, as its record names them


class PromptCache:
    """A cache of the prompts of one run, which differ in their images alone; thread-safe.

    limit_bytes: pixels that are held at most; those that were not used for longest go first, and are read again when
    they are needed.
    """

    def __init__(self, encoder: Encoder, limit_bytes: int) -> None:
        self._encoder = encoder
        self._limit = limit_bytes
        self._held: OrderedDict[Images, Prompt] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def prompt(self, images: Images, chat: Callable[[], list[dict[str, Any]]]) -> Prompt:
        """Return the prompt of the chat with these images, without its pixels; `chat` makes it where it is needed."""
        found = self._found(images)
        if found is None:
            found = self._encoder.prompt(chat())
            self._hold(images, found)
        return replace(found, pixel_values=None)

    def pixels(self, images: Images) -> torch.Tensor | None:
        """Return the pixels of a prompt's images."""
        found = self._found(images)
        return self._encoder.pixels(images) if found is None else found.pixel_values

    def _found(self, images: Images) -> Prompt | None:
        with self._lock:
            if images in self._held:
                self._held.move_to_end(images)
            return self._held.get(images)

    def _hold(self, images: Images, prompt: Prompt) -> None:
        with self._lock:
            if images in self._held or _size(prompt) > self._limit:
                return
            self._held[images] = prompt
            self._bytes += _size(prompt)
            while self._bytes > self._limit:
                self._bytes -= _size(self._held.popitem(last=False)[1])


def _size(prompt: Prompt) -> int:
    return 0 if prompt.pixel_values is None else prompt.pixel_values.nbytes
