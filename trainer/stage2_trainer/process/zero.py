"""Weights that DeepSpeed ZeRO-3 has spread over the processes, whole for the time of a rollout.

Each process then generates by itself, as many tokens as it likes. ZeRO's hooks would take every layer away again after
its first use, so they are off meanwhile (as in huggingface/trl, `unwrap_model_for_generation`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class GatheredWeights:
    """A context in which weights are whole. `find_engine` returns DeepSpeed's engine once training has begun."""

    def __init__(self) -> None:
        self.find_engine: Callable[[], Any] = lambda: None

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        """Gather the weights in all processes, and spread them again. All processes must call it."""
        import deepspeed

        hooks = self.find_engine().optimizer.parameter_offload
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            _remove(hooks)
            try:
                yield
            finally:
                hooks._register_deepspeed_module(hooks.module)


def _remove(hooks: Any) -> None:
    for parameter in hooks.module.parameters():
        parameter.ds_active_sub_modules.clear()
    for hook in (*hooks.forward_hooks, *hooks.backward_hooks):
        hook.remove()
    hooks.forward_hooks, hooks.backward_hooks = [], []
