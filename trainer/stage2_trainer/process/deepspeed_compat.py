"""What this project needs of DeepSpeed beyond its public interface.

Weights that ZeRO-3 has spread over the processes are gathered for the time of a rollout. Each process then generates by
itself, as many tokens as it likes. ZeRO's hooks would take every layer away again after its first use, so they are off
meanwhile, by DeepSpeed's private fields: the way of `unwrap_model_for_generation` (pull requests huggingface/trl#1617
and deepspeedai/DeepSpeed#5658). Putting the hooks back leaves the coordinator's trace stale unless DeepSpeed drops it
(deepspeedai/DeepSpeed#8043, in 0.19.8). Goes when DeepSpeed has a public context manager for it that takes the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

GatherWeights = Callable[[Any], AbstractContextManager[object]]
"""Returns a context in which all weights of a model are whole in this process."""


def compile_nothing() -> None:
    """Keep DeepSpeed on CPUs from compiling an all-reduce over shared memory at its first start.

    That takes minutes and a C++ compiler; without it gloo reduces. To be called before processes join. The attribute
    is one that DeepSpeed fills when it is first asked for, by compiling other things to see whether it could.
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
