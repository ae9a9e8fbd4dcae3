"""The server's end of a push: it loads tensors that arrive whole, merges others itself, and confirms all by digests.

A merge takes base weights from the server's own model folder and adapters from the learner, by one recipe. The weights
that the engine holds are never read: each update begins again from the folder, so nothing accumulates, and a server
that started with random weights has all weights after its first update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from stage2_trainer.sync.tensors.announcement import DIFFERS, MARK, change_from, digested
from stage2_trainer.sync.tensors.digest import Digests, differing
from stage2_trainer.sync.tensors.merge_math import served_weight
from stage2_trainer.sync.tensors.model_folder import ModelFolder

Item = TypeVar("Item")
END: Any = object()


def one_ahead(items: Iterator[Item], device: torch.device) -> Iterator[Item]:
    """Yield items; a thread computes the next one while the caller uses the current one, and no more than that.

    device: on a GPU, the thread works on the caller's stream, so an item is complete before its use. An error of the
    thread is raised to the caller. A caller who stops waits for the item under way.
    """
    stream = (torch.cuda.set_stream, (torch.cuda.current_stream(device),)) if device.type == "cuda" else ()
    with ThreadPoolExecutor(1, "one-ahead", *stream) as executor:
        coming = executor.submit(next, items, END)
        while (item := coming.result()) is not END:
            coming = executor.submit(next, items, END)
            yield item
            del item  # or two would be held while the caller waits for the next one


Named = list[tuple[str, Tensor]]
NAMED_LAYERS = 8  # in an error


class ServerMerge:
    """The weights that one worker loads in an update. model: its folder. device: where merges are computed."""

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
        """Receive what the header's recipe needs and load the result; or, given digests, check what was loaded.

        receive: passes every bucket of tensors that arrives to its argument.

        Raises:
            RuntimeError: the weights loaded last have other digests than the header expects.
        """
        if (expected := header.get("expected")) is not None:
            self._check_digests(expected)
            return
        digests = Digests()
        parts: dict[str, Tensor] = {}

        def arrived(tensors: Named) -> None:
            self._loaded = {}  # not before: a call that is refused has loaded nothing
            # not copied: tensors cut from a bucket may be kept
            parts.update({name: tensor.to(self._device) for name, tensor in tensors if MARK in name})
            if whole := [(name, tensor) for name, tensor in tensors if MARK not in name]:
                load(digested(whole, digests))

        receive(arrived)
        if header["tensors"]:
            merged = self._merged(header, parts)
            load(digested(one_ahead(merged, self._device), digests))
        self._loaded = digests.by_layer()

    @torch.no_grad()
    def _merged(self, recipe: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        self._folder = self._folder or ModelFolder(self._model)
        for made in recipe["tensors"]:
            name, change = made["name"], change_from(made, parts)
            base = self._folder.tensor(name).to(self._device, getattr(torch, made["dtype"]))
            yield name, base if change is None else served_weight(name, base, change, recipe["rounding"])

    def _check_digests(self, expected: Mapping[str, str]) -> None:
        wrong = differing(expected, self._loaded)
        if wrong:
            more = f" and {len(wrong) - NAMED_LAYERS} more" if len(wrong) > NAMED_LAYERS else ""
            layers = ", ".join(wrong[:NAMED_LAYERS]) + more
            raise RuntimeError(f"{DIFFERS} in {layers}")
