"""What a server loads, and answers for: tensors that the learner sends whole, and those that it merges itself.

A merge takes base weights from the server's own model folder and adapters from the learner, by one recipe. The weights
that the engine holds are never read: each update begins again from the folder, so nothing accumulates, and a server
that was started with random weights becomes whole by its first update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from stage2_trainer.sync.tensors.digest import Digests, differing
from stage2_trainer.sync.tensors.merge_math import Rounding, served_weight
from stage2_trainer.sync.tensors.model_folder import ModelFolder
from stage2_trainer.sync.tensors.recipe import DIFFERS, MARK, MadeTensor, Recipe, change_from, digested

Item = TypeVar("Item")
END: Any = object()


def one_ahead(items: Iterator[Item], device: torch.device) -> Iterator[Item]:
    """Yield the items, of which a thread of its own makes the next: at most one more is held than is in use.

    device: on a GPU, what that thread does is queued on the caller's stream, so that an item's making comes before its
    use. What making an item raises is raised where it is asked for. A caller who stops waits for the item being made.
    """
    with _maker(device) as maker:
        coming = maker.submit(next, items, END)
        while (item := coming.result()) is not END:
            coming = maker.submit(next, items, END)
            yield item
            del item  # or two would be held while the next one is waited for


def _maker(device: torch.device) -> ThreadPoolExecutor:
    if device.type != "cuda":
        return ThreadPoolExecutor(1, "one-ahead")
    stream = torch.cuda.current_stream(device)
    return ThreadPoolExecutor(1, "one-ahead", torch.cuda.set_stream, (stream,))


Named = list[tuple[str, Tensor]]
NAMED_LAYERS = 8  # in an error


class ServerMerge:
    """What one worker loads of what it is sent, and makes of its folder.

    model: the folder. device: where merges are computed.
    """

    def __init__(self, model: str, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._folder: ModelFolder | None = None
        self._loaded: dict[str, str] = {}

    def update(
        self,
        header: Mapping[str, Any],
        receive: Callable[[Callable[[Named], Any]], None],
        load: Callable[[Iterable[tuple[str, Tensor]]], Any],
    ) -> None:
        """Receive what the header's recipe needs, and load all that comes of it; or answer for what was loaded.

        receive: hands every bucket of tensors that arrives to the function it is given.

        Raises:
            RuntimeError: what was loaded last has other digests than the header says.
        """
        if (expected := header.get("expected")) is not None:
            self._answer_for(expected)
            return
        recipe, digests = Recipe.from_wire(header), Digests()
        parts: dict[str, Tensor] = {}

        def arrived(tensors: Named) -> None:
            self._loaded = {}  # not before: a call that is refused has loaded nothing
            # none is copied, though a fused layer waits for what is made last: what is cut from a bucket may be kept
            parts.update({name: tensor.to(self._device) for name, tensor in tensors if MARK in name})
            if whole := [(name, tensor) for name, tensor in tensors if MARK not in name]:
                load(digested(whole, digests))

        receive(arrived)
        if recipe.tensors:
            load(digested(one_ahead(self._made(recipe, parts), self._device), digests))
        self._loaded = digests.of_layers()

    @torch.no_grad()
    def _made(self, recipe: Recipe, parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        self._folder = self._folder or ModelFolder(self._model)
        for made in recipe.tensors:
            base = self._folder.tensor(made.name).to(self._device, getattr(torch, made.dtype))
            yield made.name, _served(made, base, parts, Rounding(recipe.rounding))

    def _answer_for(self, expected: Mapping[str, str]) -> None:
        wrong = differing(expected, self._loaded)
        if wrong:
            more = f" and {len(wrong) - NAMED_LAYERS} more" if len(wrong) > NAMED_LAYERS else ""
            layers = ", ".join(wrong[:NAMED_LAYERS]) + more
            raise RuntimeError(f"{DIFFERS} in {layers}")


def _served(made: MadeTensor, base: Tensor, parts: Mapping[str, Tensor], rounding: Rounding) -> Tensor:
    change = change_from(made, parts)
    return base if change is None else served_weight(made.name, base, change, rounding)
