"""The weights that ZeRO-3 has spread over the processes, whole for a block: for servers, or for a rollout of their own.

For servers they are gathered bucket by bucket, while the first process pushes. For a rollout of the processes
themselves all weights are whole: each process then generates by itself, as many tokens as it needs. ZeRO's hooks would
release every layer after its first use, so they are removed meanwhile, through DeepSpeed's private fields, as
`unwrap_model_for_generation` does (huggingface/trl#1617, deepspeedai/DeepSpeed#5658). Restoring them leaves the
coordinator's trace stale unless DeepSpeed drops it (deepspeedai/DeepSpeed#8043, in 0.19.8). It goes when DeepSpeed has
a public context manager for this that takes the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from stage2_trainer.sync.tensors.announcement import DEFAULT_BUCKET_BYTES
from stage2_trainer.sync.tensors.merge import T, WeightAccess

GatherWeights = Callable[[Any], AbstractContextManager[object]]
"""Returns a context in which all weights of a model are whole in this process."""


class GatheredWeights(WeightAccess):
    """Weights that ZeRO-3 spreads: whole in all processes for a block, or read by the first one, which pushes them.

    What the first process reads, the others gather with it, and all release it when the next step begins: with
    DeepSpeed's `enable_sanity_checks` they meet there. `find_engine` returns DeepSpeed's engine once training has
    begun. `together` lets the other processes `follow` a step for the time of a block.
    """

    def __init__(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        super().__init__(bucket_bytes)
        self.find_engine: Callable[[], Any] = lambda: None
        self.together: Callable[..., AbstractContextManager[None]] = lambda *step: nullcontext()
        self._held = ExitStack()

    def gather(self, parameters: Sequence[torch.Tensor]) -> None:
        ids = [one.ds_id for one in parameters if hasattr(one, "ds_id")]
        self._take(GatheredWeights._hold, ids)

    def compute(self, work: Callable[..., T], model: Any, *arguments: Any) -> T:
        found: T = self._take(GatheredWeights._run, work, *arguments)
        return found

    def follow(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Take a step of the first process, in each process."""
        self.let_go()
        return step(self, *arguments)

    def let_go(self) -> None:
        """Let go of what the last step gathered. All processes must call it."""
        self._held.close()

    def _take(self, step: Callable[..., Any], *arguments: Any) -> Any:
        with self.together(step, *arguments):
            return self.follow(step, *arguments)

    def _hold(self, ids: Sequence[int]) -> None:
        """Gather the parameters that DeepSpeed has given these numbers, the same in each process."""
        import deepspeed

        if ids:
            chosen = [one for one in self.find_engine().module.parameters() if one.ds_id in ids]
            self._held.enter_context(deepspeed.zero.GatheredParameters(chosen))

    def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run a forward pass, for which ZeRO gathers layer by layer; afterwards nothing stays whole or on its way."""
        engine = self.find_engine()
        root = engine.module  # ZeRO's hooks follow its forward pass
        inside = getattr(root, "compute", None)
        found: T = inside(work, *arguments) if inside else work(root, *arguments)
        engine.empty_partition_cache()
        return found

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
