"""Workarounds for DeepSpeed.

`GatheredWeights` gathers the weights that ZeRO-3 has spread over the processes, for the time of a rollout. Each process
then generates by itself, as many tokens as it needs. ZeRO's hooks would release every layer after its first use, so
they are removed meanwhile, through DeepSpeed's private fields, as `unwrap_model_for_generation` does
(huggingface/trl#1617, deepspeedai/DeepSpeed#5658). Restoring them leaves the coordinator's trace stale unless DeepSpeed
drops it (deepspeedai/DeepSpeed#8043, in 0.19.8). It goes when DeepSpeed has a public context manager for this that
takes the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

GatherWeights = Callable[[Any], AbstractContextManager[object]]
"""Returns a context in which all weights of a model are whole in this process."""


def compile_nothing() -> None:
    """Keep DeepSpeed on CPUs from compiling an all-reduce over shared memory at its first start; gloo reduces instead.

    Compiling takes minutes and a C++ compiler. Call it before processes join: DeepSpeed fills this attribute at its
    first use, by trying to compile other things. No upstream issue found. It goes when an option turns this off.
    """
    import deepspeed.ops

    deepspeed.ops.__dict__.setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


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
            start = hooks.module._forward_pre_hooks[hooks.fwd_pre_hook.id]  # it would meet the other processes
            _remove(hooks)
            try:
                yield
            finally:
                hooks.fwd_pre_hook = hooks.module.register_forward_pre_hook(start)
                hooks._register_deepspeed_module(hooks.module)


def _remove(hooks: Any) -> None:
    for parameter in hooks.module.parameters():
        parameter.ds_active_sub_modules.clear()
    for hook in (*hooks.forward_hooks, *hooks.backward_hooks, hooks.fwd_pre_hook):
        hook.remove()
    hooks.forward_hooks, hooks.backward_hooks = [], []
