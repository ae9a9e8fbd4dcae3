"""The stub's adapter: added to the weights while a request that names it is answered, and taken off exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stage2_trainer.serve.stub.requests import AdapterInfo

PEFT_PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"


class StubAdapters:
    """One adapter over the parameters of a model. The caller sees to it that one thread at a time uses it."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._name: str | None = None
        self._deltas: dict[str, Tensor] = {}

    def keep(self, adapter: AdapterInfo, tensors: Mapping[str, Tensor]) -> None:
        """Hold the adapter of these LoRA matrices, named as in PEFT's checkpoints; an older one goes.

        Raises:
            KeyError: a matrix belongs to no parameter.
        """
        scale = _Scale(adapter.config)
        deltas = {}
        for name, down in tensors.items():
            if name.endswith(DOWN):
                layer = name.removesuffix(DOWN)
                target = f"{layer.removeprefix(PEFT_PREFIX)}.weight"
                if target not in self._parameters:
                    raise KeyError(f"{name} belongs to no parameter of the model")
                deltas[target] = scale.of(layer) * tensors[f"{layer}{UP}"].float() @ down.float()
        self._name, self._deltas = adapter.name, deltas

    @property
    def names(self) -> list[str]:
        """The adapter's name, if there is one."""
        return [] if self._name is None else [self._name]

    def has(self, name: str | None) -> bool:
        """Whether the adapter of this name is held."""
        return self._name is not None and name == self._name

    def drop(self, name: str) -> bool:
        """Forget the adapter; False if there is none of this name."""
        if not self.has(name):
            return False
        self._name, self._deltas = None, {}
        return True

    @contextmanager
    @torch.no_grad()
    def applied(self, name: str | None) -> Iterator[None]:
        """Add the adapter for the time of the block, if it is the one that is asked for."""
        deltas = self._deltas if self.has(name) else {}
        plain = {target: self._parameters[target].clone() for target in deltas}
        for target, delta in deltas.items():
            self._parameters[target].copy_(plain[target].float() + delta)
        try:
            yield
        finally:
            for target, values in plain.items():
                self._parameters[target].copy_(values)


class _Scale:
    """PEFT's factor of an adapter: alpha / rank, where a pattern of either may end a layer's name."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def of(self, layer: str) -> float:
        rank = self._by_pattern(layer, "rank_pattern", self._config["r"])
        alpha = self._by_pattern(layer, "alpha_pattern", self._config["lora_alpha"])
        return alpha / (math.sqrt(rank) if self._config["use_rslora"] else rank)

    def _by_pattern(self, layer: str, patterns: str, otherwise: float) -> float:
        found = [value for end, value in self._config[patterns].items() if layer.endswith(f".{end}")]
        return float(found[0] if found else otherwise)
