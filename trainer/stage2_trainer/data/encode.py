"""Encoding: chat messages become token ids and pixels, and an answer becomes a teacher-forced sequence.

The prompt's ids must equal those of the rollout server, image tokens expanded; otherwise every later position would be
supervised in the wrong context. The answer is appended as ids, never as text: tokenising its text again could train the
model on tokens that it did not generate.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch

from stage2_api.errors import refused
from stage2_trainer.data.images import load_image
from stage2_trainer.data.messages import load_images
from stage2_trainer.matching import vision_ids

GIB = 2**30
Images = tuple[str, ...]  # a prompt's images, as its record names them
_ANSWER = "STAGE2ANSWER"
_TEXT = 0  # the processor's mm_token_type_ids: text 0, image 1, video 2


@dataclass(frozen=True)
class Prompt:
    """An encoded prompt.

    input_ids, mm_token_type_ids: int64 (P,), image tokens expanded. pixel_values: (patches, values), None without
    images. image_grid_thw: (images, 3), None without images.
    """

    input_ids: torch.Tensor
    mm_token_type_ids: torch.Tensor
    pixel_values: torch.Tensor | None
    image_grid_thw: torch.Tensor | None


@dataclass(frozen=True)
class Encoding(Prompt):
    """A teacher-forced sequence of L tokens: prompt, answer, end of turn.

    The answer is at `prompt_len .. prompt_len + answer_len`, and the end-of-turn token follows it.
    """

    prompt_len: int
    answer_len: int


class Encoder:
    """Encodes with a Hugging Face processor: its tokenizer, image processor and chat template. Thread-safe."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self._lock = Lock()  # a tokenizer serves one thread at a time
        self.tokenizer = processor.tokenizer
        self.end_of_turn_ids: list[int] = self.encode(self._end_of_turn())
        self.vision_ids = vision_ids(processor.tokenizer)

    def encode(self, text: str) -> list[int]:
        """Tokenise text without adding special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, messages: list[dict[str, Any]]) -> Prompt:
        """Encode the messages, including the tokens that open the assistant's turn."""
        text = self._render(messages, add_generation_prompt=True)
        images = load_images(messages)
        with self._lock:
            encoded = self.processor(
                text=[text], images=images or None, return_tensors="pt", add_special_tokens=False, truncation=False
            )
        input_ids = encoded["input_ids"][0]
        return Prompt(
            input_ids=input_ids,
            mm_token_type_ids=encoded["mm_token_type_ids"][0].to(input_ids.dtype),
            pixel_values=encoded.get("pixel_values"),
            image_grid_thw=encoded.get("image_grid_thw"),
        )

    def pixels(self, images: Sequence[str]) -> torch.Tensor | None:
        """Return the pixels of a prompt's images, as in `prompt`. Raises ValueError for an unreadable image."""
        if not images:
            return None
        with self._lock:
            encoded = self.processor.image_processor(images=[load_image(one) for one in images], return_tensors="pt")
        pixels: torch.Tensor = encoded["pixel_values"]
        return pixels

    def teacher_forced(self, prompt: Prompt, answer_ids: Sequence[int]) -> Encoding:
        """Append the answer's ids and the chat template's end of turn."""
        tail = torch.tensor([*answer_ids, *self.end_of_turn_ids], dtype=torch.int64)
        return Encoding(
            input_ids=torch.cat([prompt.input_ids, tail]),
            mm_token_type_ids=torch.cat([prompt.mm_token_type_ids, torch.full_like(tail, _TEXT)]),
            pixel_values=prompt.pixel_values,
            image_grid_thw=prompt.image_grid_thw,
            prompt_len=len(prompt.input_ids),
            answer_len=len(answer_ids),
        )

    def check_prompt(self, prompt: Prompt, served_ids: Sequence[int], server: str) -> None:
        """Raise ConfigError if the server's prompt ids differ from ours; names the first difference."""
        ours = prompt.input_ids.tolist()
        if ours == list(served_ids):
            return
        position = next(
            (i for i, (mine, theirs) in enumerate(zip(ours, served_ids, strict=False)) if mine != theirs),
            min(len(ours), len(served_ids)),
        )
        found = f"{self._piece(served_ids, position)} at position {position} of {len(served_ids)}"
        expected = f"{self._piece(ours, position)} at position {position} of {len(ours)}"
        rule = f"prompt tokenization mismatch: the learner has {expected}"
        way_out = "give server and learner the same model directory (tokenizer, chat template, pixel limits)"
        raise refused(f"server {server} prompt_token_ids", found, rule, way_out)

    def _piece(self, ids: Sequence[int], position: int) -> str:
        if position >= len(ids):
            return "the end"
        return f"token {ids[position]} {self.tokenizer.decode([ids[position]])!r}"

    def _end_of_turn(self) -> str:
        user = {"role": "user", "content": [{"type": "text", "text": "question"}]}
        opened = self._render([user], add_generation_prompt=True)
        closed = self._render([user, {"role": "assistant", "content": _ANSWER}], add_generation_prompt=False)
        head, separator, suffix = closed.partition(_ANSWER)
        if not separator or head != opened or not suffix:
            rule = f"an assistant turn must open with the generation prompt {opened!r} and be closed after it"
            way_out = "use a model directory whose chat template does so"
            raise refused("model.model chat template", closed, rule, way_out)
        return str(suffix)

    def _render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        # A copy: the processor rewrites image parts in place, and the same messages go to the servers.
        copied = copy.deepcopy(messages)
        return str(
            self.processor.apply_chat_template(copied, tokenize=False, add_generation_prompt=add_generation_prompt)
        )


class PromptCache:
    """Encoded prompts of one run, which differ only in their images: an image is processed once, not at each use.

    limit_bytes: limit of pixels, ids and image names together (a `data:` URL is its own name). The least recently used
    prompt is dropped first, and encoded again when needed. Thread-safe.
    """

    def __init__(self, encoder: Encoder, limit_bytes: int) -> None:
        self._encoder = encoder
        self._limit = limit_bytes
        self._held: OrderedDict[Images, Prompt] = OrderedDict()
        self._pending: dict[Images, Future[Prompt]] = {}
        self._bytes = 0
        self._lock = Lock()

    def prompt(self, images: Images, chat: Callable[[], list[dict[str, Any]]]) -> Prompt:
        """Return the prompt with these images, without its pixels; `chat` builds the messages if it is not cached."""
        return replace(self.whole(images, chat), pixel_values=None)

    def whole(self, images: Images, chat: Callable[[], list[dict[str, Any]]]) -> Prompt:
        """Return the prompt with its pixels."""
        with self._lock:
            cached = self._cached(images)
            if cached is not None:
                return cached
            pending = self._pending.get(images)
            if pending is None:
                mine = self._pending[images] = Future()
        if pending is not None:
            return pending.result()
        try:
            mine.set_result(self._encoder.prompt(chat()))
        except BaseException as error:  # noqa: BLE001  # raised to every caller that waits
            mine.set_exception(error)
        with self._lock:
            del self._pending[images]
            if mine.exception() is None:
                self._hold(images, mine.result())
        return mine.result()

    def pixels(self, images: Images) -> torch.Tensor | None:
        """Return the pixels of a prompt's images."""
        with self._lock:
            cached = self._cached(images)
        return self._encoder.pixels(images) if cached is None else cached.pixel_values

    def _cached(self, images: Images) -> Prompt | None:
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
