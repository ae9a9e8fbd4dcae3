"""Teacher-forced batches: prompts with their images, and the answers the model is to give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tiny_model.answers import PROMPT, write
from tiny_model.foreign import Model, Processor
from tiny_model.scenes import MAX_SHAPES, Scene, draw, make_scene
from tiny_model.tokenizer import TURN_END

IGNORED = -100
_AFTER_ANSWER = TURN_END + "\n"  # as the chat template closes an assistant's turn


@dataclass(frozen=True)
class Task:
    """Questions about scenes, and the answers to learn, of up to `longest_answer` tokens.

    scene: returns the scene of an index; None: a scene of up to `max_shapes` shapes.
    """

    prompt: str
    write: Callable[[Scene], str] = write
    max_shapes: int = MAX_SHAPES
    longest_answer: int = 128
    scene: Callable[[int], Scene] | None = None


LISTING = Task(PROMPT, write)


@dataclass(frozen=True)
class Batch:
    """`inputs` go to the model; `labels` (batch, answer) are the answer's ids, right-padded with IGNORED.

    The logits that `inputs["logits_to_keep"]` selects are those that predict `labels`, position by position.
    """

    inputs: dict[str, Tensor | bool]
    labels: Tensor


class Batches:
    """Endless training batches: scenes of the "warm-up" part, each seen once."""

    def __init__(self, processor: Processor, model: Model, *, seed: int, size: int, task: Task = LISTING) -> None:
        self._processor, self._seed, self._size, self._task = processor, seed, size, task
        prompt = encode_prompts(processor, [self._scene(0)], task.prompt)
        self._prompt_ids: Tensor = prompt["input_ids"][0]
        self._position_ids = _positions(model, prompt, task.longest_answer)

    def __iter__(self) -> Iterator[Batch]:
        first = 0
        while True:
            yield self.batch([self._scene(first + i) for i in range(self._size)])
            first += self._size

    def batch(self, scenes: Sequence[Scene]) -> Batch:
        """Return the scenes with the answers that are taught.

        No attention mask: attention is causal and the padding is on the right, so no answer sees it.
        """
        images = self._processor.image_processor(_images(scenes), return_tensors="pt")
        labels = pad_sequence([self._answer_ids(scene) for scene in scenes], batch_first=True, padding_value=IGNORED)
        prompts = self._prompt_ids.expand(len(scenes), -1)
        answers = labels.where(labels != IGNORED, self._processor.tokenizer.pad_token_id)
        # The last token of an answer is predicted, never read.
        input_ids = torch.cat([prompts, answers], dim=1)[:, :-1]
        inputs = {
            **images,
            "input_ids": input_ids,
            "position_ids": self._position_ids[..., : input_ids.shape[1]].expand(-1, len(scenes), -1),
            "logits_to_keep": torch.arange(prompts.shape[1] - 1, input_ids.shape[1]),
            "use_cache": False,
        }
        return Batch(inputs, labels)

    def _scene(self, index: int) -> Scene:
        if self._task.scene is not None:
            return self._task.scene(index)
        return make_scene(self._seed, "warm-up", index, max_shapes=self._task.max_shapes)

    def _answer_ids(self, scene: Scene) -> Tensor:
        return torch.tensor(self._processor.tokenizer(self._task.write(scene) + _AFTER_ANSWER)["input_ids"])


def encode_prompts(processor: Processor, scenes: Sequence[Scene], question: str = PROMPT) -> dict[str, Tensor]:
    """Return the prompts of the scenes, ready for the model; all are equally long, as the images are of one size."""
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return dict(processor(text=[text] * len(scenes), images=_images(scenes), return_tensors="pt"))


def _images(scenes: Sequence[Scene]) -> list[Tensor]:
    return [torch.from_numpy(draw(scene)).permute(2, 0, 1) for scene in scenes]


def _positions(model: Model, prompt: Mapping[str, Tensor], longest_answer: int) -> Tensor:
    """Return the rotary positions (3, 1, tokens) of a prompt and the longest answer: the same for every row."""
    answer = torch.zeros(1, longest_answer, dtype=torch.long)
    positions: Tensor = model.model.get_rope_index(
        torch.cat([prompt["input_ids"], answer], dim=1),
        image_grid_thw=prompt["image_grid_thw"],
        mm_token_type_ids=torch.cat([prompt["mm_token_type_ids"], answer], dim=1),
    )[0]
    return positions
