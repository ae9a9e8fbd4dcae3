"""`custom.extra.rollout_matching.vllm`: how vLLM makes rollouts, and how the learner's weights reach it.

Source: semantics section 3 (keys, defaults, rules), 11 (server mode), 12 (weight sync).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StringConstraints

from stage2_api.section import Count, Port, Positive, Scale, Section, Url, Weight, free_mapping

ServerProtocol = Literal["vllm", "swift"]
SyncMode = Literal["full", "adapter", "auto"]
SyncTransport = Literal["auto", "tcp", "nccl"]
Transport = Literal["tcp", "nccl"]
TRANSPORT_PATH: Final = "custom.extra.rollout_matching.vllm.sync.transport"
SyncMerge = Literal["auto", "server", "learner"]
SyncRounding = Literal["nearest", "stochastic"]
EIGHT_BIT_TOLERANCE: Final = 0.15  # mean difference of log-probabilities; 0.04 with the trained tiny model
LoadFormat = Literal["auto", "dummy", "safetensors", "pt", "runai_streamer", "sharded_state"]


@dataclass(frozen=True)
class ServerAddress:
    """Where one rollout server is reached.

    base_url: `http://host:port` or `https://host:port` without a trailing slash.
    group_port: TCP port on the learner's side at which this server joins the weight-transfer group.
    """

    base_url: str
    group_port: int


class VllmServerEntry(Section):
    """One rollout server."""

    base_url: Annotated[Url, StringConstraints(pattern=r"^https?://[^/ ]+.*$")]
    """Address of the server with scheme, host and port, such as `http://127.0.0.1:8000`. An `https://` server needs a
    certificate from the authority in `STAGE2_TLS_CA_FILE`."""
    group_port: Port
    """TCP port of the weight-transfer group (not the HTTP port): the learner listens there, and the server connects."""


class VllmServer(Section):
    """The rollout servers of server mode, as `servers` or as `base_url` with `group_port`."""

    servers: list[VllmServerEntry] | None = Field(None, min_length=1, max_length=512)
    """List of the rollout servers. Leave it out of a job: the controller and `stage2 run` fill it in. The learner reads
    the list again when its file changes."""
    base_url: Annotated[
        Url | list[Url] | None, Field(json_schema_extra={"x-stage2-schema": {"type": "string", "maxLength": 2048}})
    ] = None
    """Address of the rollout server, or a list of addresses; the older form of `servers`."""
    group_port: Annotated[
        Port | list[Port] | None,
        Field(json_schema_extra={"x-stage2-schema": {"type": "integer", "minimum": 1, "maximum": 65535}}),
    ] = None
    """Weight-transfer port of the older form: one port, or a list of one per address. A single port with a list of
    addresses means port, port + 1, and so on."""
    protocol: ServerProtocol = "vllm"
    """Protocol of the servers: `vllm` for `stage2 serve`, or `swift` for ms-swift's `swift rollout`, which supports
    only full syncs and does not report its weight version."""
    learners: Literal["one", "sharded"] = "one"
    """Learner processes: `one`, or `sharded` for any number, which share the rows of each optimizer step by tokens.
    Their number changes neither answers nor rows nor the loss."""
    timeout_s: Scale = 240.0
    """Seconds to wait for a server to answer and to join the weight-transfer group. A large model takes minutes to
    load."""
    infer_timeout_s: float | None = None
    """Time limit of one rollout request in seconds; null, 0 or less means none. A hung server is noticed anyway: while
    it generates, it must report its weight version within `timeout_s`. After `timeout_s` a warning counts the pending
    requests."""

    def resolved_servers(self) -> tuple[ServerAddress, ...]:
        """Return the servers of either form, in order; empty when neither form is given."""
        if self.servers is not None:
            return tuple(ServerAddress(item.base_url.rstrip("/"), item.group_port) for item in self.servers)
        if self.base_url is None or self.group_port is None:
            return ()
        urls = [self.base_url] if isinstance(self.base_url, str) else self.base_url
        ports = self.group_port
        paired = [ports + index for index in range(len(urls))] if isinstance(ports, int) else ports
        return tuple(ServerAddress(url.rstrip("/"), port) for url, port in zip(urls, paired, strict=True))


def resolve_transport(requested: SyncTransport, *, on_cuda: bool) -> Transport:
    """Return the transport of weights. on_cuda: whether learner and servers have GPUs."""
    if requested == "auto":
        return "nccl" if on_cuda else "tcp"
    return requested


class VllmSync(Section):
    """How the learner's weights reach the rollout engine before fresh rollouts."""

    mode: SyncMode = "full"
    """Weights to send: `full` sends weights with adapters merged in, and works for every model and for DoRA; `adapter`
    sends only LoRA weights and needs `enable_lora`; `auto` chooses `adapter` if possible, else `full`."""
    transport: SyncTransport = "auto"
    """Transport of weights to servers: `nccl` between GPUs, or `tcp` between main memories, over one port per server;
    `auto` chooses `nccl` on GPUs and `tcp` elsewhere. Servers of `swift rollout` have their own transports."""
    fallback_to_full: bool = True
    """Whether a failed adapter sync switches the rest of the run to full syncs, with a warning, instead of ending
    it."""
    merge: SyncMerge = "auto"
    """Where a full sync merges adapters: `server` sends the adapter, about 1 % of the size of its layers, and each
    server merges it into its own base weights; `learner` sends merged layers; `auto` chooses `server` if the servers
    can do it and have the learner's base weights, else `learner`."""
    rounding: SyncRounding = "nearest"
    """Rounding of merged weights to bfloat16: `nearest` loses an update below half the spacing of bfloat16 numbers;
    `stochastic` keeps every update on average, with noise. `sync/rounding_kept` in the log is the share that the
    servers got."""
    changed_only: bool = True
    """Whether a full sync sends an up-to-date server only the layers that may have changed."""
    one_group_from: Positive = 2
    """Number of servers from which full training uses one NCCL group for all, so that the learner sends each byte once
    and the servers pass it on. When a server fails, each gets its own group for the rest of the run. With adapters, and
    over `tcp`, each server always has its own."""
    verify_every: Count = 20
    """Syncs between proofs. A proof compares each server's log-probabilities of a sample prompt with the learner's, and
    ends the run if the weights differ. The first sync is always proved; 0 means only that one."""
    verify_tolerance: Scale | None = None
    """Maximum mean difference of log-probabilities that rounding explains; the 99th percentile may be eight times as
    large. Above 2.5 times either limit the run ends. Unset means 0.0001 in float32, at least 0.06 in bfloat16 and
    float16, where the first proof calibrates it, and 0.15 where vLLM rounds weights or its cache to 8 bits."""


FRAME_PROPOSER = "stage2_trainer.serve.frame_proposer.FrameProposer"
LONGEST_DRAFT = 24
"""Tokens between the last coordinate of an object and the first of the next, as Qwen3's tokenizer splits them."""
MOST_AT_ONCE_ON_CPUS = 8
"""Sequences with which drafts were seen to pay on two cores: with 8, answers came 8 % faster, with 32 slower."""
FRAME_LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 48}
"""Lengths of repetitions by which `frame` on GPUs is told from `ngram`: vLLM's method is `ngram_gpu` for both."""
TOKENS_BY_BATCH = ((1, 16, 11), (17, 48, 7), (49, 64, 5), (65, 256, 2))
"""On GPUs: drafted tokens by the number of answers at once, from, to. Longer ones pay where memory bounds a step. Up to
170 answers fit vLLM's CUDA graphs with their drafts, 512 tokens."""
MOST_VERIFIED = 2048
"""Tokens that one step verifies at most; a vocabulary of 151,936 has 1.2 GB of logits for them."""


OLDER_OPTIONS = (
    "max_num_batched_tokens", "enable_chunked_prefill", "disable_chunked_mm_input", "skip_mm_profiling",
    "kv_cache_dtype", "cpu_offload_gb", "swap_space", "limit_mm_per_prompt", "mm_encoder_tp_mode",
)  # fmt: skip
"""Keys of `Vllm` that the original stack has, and that `engine` takes by the same name."""


def _older(name: str, *, max_length: int | None = None) -> Any:
    """Return the field of an older key."""
    assert name in OLDER_OPTIONS
    return Field(None, description=f"Older place of `engine.{name}`.", max_length=max_length)


class Vllm(Section):
    """The vLLM engine of the rollouts."""

    mode: Literal["colocate", "server"] = "colocate"
    """Where vLLM runs: `colocate` means in the learner's processes on its GPUs, `server` in separate processes on other
    GPUs."""
    tensor_parallel_size: Positive | None = None
    """GPUs that share one copy of the model. Unset means 4 with four colocated learner processes, else 1."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.45
    """Share of each GPU's memory for vLLM. The default leaves room for training on the same GPU; a server can use
    0.9."""
    max_model_len: Positive | None = None
    """Maximum length of prompt plus answer in tokens, with room for `max_new_tokens`. Required in colocate mode; for
    servers the model's own length is the default."""
    enable_lora: bool = False
    """Whether vLLM can load LoRA adapters, which `sync.mode: adapter` needs."""
    load_format: LoadFormat | None = None
    """Source of vLLM's initial weights. Unset means `auto` (the checkpoint) with `enable_lora`, else `dummy` (random):
    the learner sends its weights before the first rollout."""
    enable_prefix_caching: bool = True
    """Whether vLLM reuses the KV cache of common prompt prefixes. Each sync resets the cache."""
    sleep_level: Annotated[int, Field(ge=0, le=2)] = 0
    """Sleep level of a colocated engine between rollouts, which frees GPU memory for training: 0 none, 1 moves weights
    to the CPU, 2 drops them."""
    enforce_eager: bool = False
    """Whether vLLM runs without CUDA graphs: slower, but it starts sooner and needs less memory."""
    disable_custom_all_reduce: bool = True
    """Whether vLLM uses NCCL for all-reduce instead of a kernel of its own. That is slower between GPUs with NVLink;
    without NVLink vLLM uses NCCL anyway. Set it to false with `tensor_parallel_size` above 1."""
    max_num_seqs: Positive = 256
    """Maximum number of concurrent sequences."""
    speculation: Literal["auto", "frame", "ngram", "none"] = "auto"
    """Draft tokens that the model verifies several at a time: `frame` drafts the JSON around coordinates and names,
    `ngram` what followed the same tokens earlier, `none` nothing. `auto` means `frame` where
    answers list objects, except on CPUs with `max_num_seqs` above 8 or `engine.async_scheduling`; else `none`."""
    infer_batch_size: Annotated[int, Field(le=2**31 - 1)] | None = None
    """Requests per call of a colocated engine; null, 0 or less means all at once. Small values lower the peak memory of
    image encoding."""
    max_num_batched_tokens: Positive | None = _older("max_num_batched_tokens")
    enable_chunked_prefill: bool | None = _older("enable_chunked_prefill")
    disable_chunked_mm_input: bool | None = _older("disable_chunked_mm_input")
    skip_mm_profiling: bool | None = _older("skip_mm_profiling")
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"] | None = _older("kv_cache_dtype")
    cpu_offload_gb: Weight | None = _older("cpu_offload_gb")
    swap_space: Weight | None = _older("swap_space")
    limit_mm_per_prompt: dict[str, Count] | None = _older("limit_mm_per_prompt", max_length=16)
    mm_encoder_tp_mode: Literal["weights", "data"] | None = _older("mm_encoder_tp_mode")
    engine: Annotated[dict[str, Any] | None, Field(json_schema_extra={"x-stage2-schema": free_mapping(64)})] = Field(
        None, max_length=64
    )
    """Mapping of other engine arguments of vLLM for speed and memory, by vLLM's names, such as `{quantization: fp8,
    limit_mm_per_prompt: {image: 1, video: 0}}`. `stage2 serve` and `stage2 doctor` check them with the installed
    vLLM."""
    server: VllmServer = VllmServer()
    """Rollout servers and their time limits (server mode only)."""
    sync: VllmSync = VllmSync()
    """Weight sync to the rollout engine."""

    def speculative_config(self, *, on_cpu: bool, objects: bool, copies: int = 1) -> dict[str, Any] | None:
        """Return vLLM's option of this name.

        objects: whether answers list objects. copies: of the model in one server.
        """
        method = self.speculation
        if method == "auto":
            pays = not on_cpu or (self.max_num_seqs <= MOST_AT_ONCE_ON_CPUS and not self.schedules_asynchronously)
            method = "frame" if objects and pays else "none"
        if method == "none":
            return None
        lookup = FRAME_LOOKUP if method == "frame" else {"prompt_lookup_min": 2, "prompt_lookup_max": 8}
        if not on_cpu:  # there `ngram` would end asynchronous scheduling
            return {"method": "ngram_gpu", **lookup, **self._tokens_by_batch(copies)}
        # The logits of all drafts lie in memory at once, so there are fewer where many requests run together.
        tokens = {"num_speculative_tokens": max(1, min(LONGEST_DRAFT, MOST_VERIFIED // self.max_num_seqs - 1))}
        if method == "ngram":
            return {"method": "ngram", **lookup, **tokens}
        return {"method": "custom_class", "model": FRAME_PROPOSER, **tokens}

    def _tokens_by_batch(self, copies: int) -> dict[str, Any]:
        """Return the options with the drafted tokens; one number if copies work in step, which vLLM then needs."""
        if copies == 1:
            table = [list(one) for one in TOKENS_BY_BATCH]
            return {"num_speculative_tokens": TOKENS_BY_BATCH[0][2], "num_speculative_tokens_per_batch_size": table}
        fitting = (tokens for _, last, tokens in TOKENS_BY_BATCH if self.max_num_seqs <= last)
        return {"num_speculative_tokens": next(fitting, TOKENS_BY_BATCH[-1][2])}

    @property
    def schedules_asynchronously(self) -> bool:
        """Whether `engine` demands that vLLM schedules a step while another one runs. Its own default is to do so."""
        name = "async_scheduling"
        return any(
            key.replace("-", "_") == name and str(value).lower() in ("true", "1")
            for key, value in (self.engine or {}).items()
        )

    @property
    def resolved_load_format(self) -> LoadFormat:
        """`load_format`, or its default."""
        return self.load_format or ("auto" if self.enable_lora else "dummy")

    def resolved_tensor_parallel_size(self, world_size: int) -> int:
        """Return `tensor_parallel_size`, or its default with `world_size` learner processes."""
        return self.tensor_parallel_size or (4 if self.mode == "colocate" and world_size == 4 else 1)

    def passed_through(self) -> dict[str, Any]:
        """Return the engine arguments in the configuration that vLLM has under the same names."""
        named = {name: value for name in OLDER_OPTIONS if (value := getattr(self, name)) is not None}
        return named | {name.replace("-", "_"): value for name, value in (self.engine or {}).items()}

    @property
    def proof_tolerance(self) -> float | None:
        """`sync.verify_tolerance`, or its default for 8 bits; None: the learner's number format decides."""
        return self.sync.verify_tolerance or (EIGHT_BIT_TOLERANCE if self.rounds_to_8_bits else None)

    @property
    def rounds_to_8_bits(self) -> bool:
        """Whether vLLM rounds weights or its cache to 8 bits, and so answers farther from the learner."""
        options = self.passed_through()
        return bool(options.get("quantization")) or str(options.get("kv_cache_dtype")).startswith("fp8")


ENGINE_OPTIONS = frozenset(
    {
        "all2all_backend", "async_scheduling", "attention_backend", "block_size", "cpu_offload_gb",
        "cudagraph_capture_sizes", "disable_cascade_attn", "disable_chunked_mm_input",
        "disable_hybrid_kv_cache_manager", "disable_log_stats", "disable_sliding_window",
        "enable_batch_sharded_sampling", "enable_chunked_prefill", "enable_dbo", "enable_eplb",
        "enable_expert_parallel", "enable_flashinfer_autotune", "enable_log_requests", "enable_prefix_caching",
        "enforce_eager", "eplb_config", "gpu_memory_utilization", "kv_cache_dtype", "kv_cache_dtype_skip_layers",
        "kv_cache_memory_bytes", "limit_mm_per_prompt", "linear_backend", "long_prefill_token_threshold",
        "max_cudagraph_capture_size", "max_logprobs", "max_num_batched_tokens", "max_num_scheduled_tokens",
        "max_num_seqs", "max_parallel_loading_workers", "mm_encoder_attn_backend", "mm_encoder_tp_mode",
        "mm_processor_cache_gb", "mm_processor_cache_type", "moe_backend", "num_gpu_blocks_override", "numa_bind",
        "optimization_level", "performance_mode", "quantization", "safetensors_load_strategy", "scheduling_policy",
        "seed", "skip_mm_profiling", "stream_interval", "swap_space", "ubatch_size",
    }
)  # fmt: skip


ONLINE_QUANTIZATION = ("fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp8")
"""Quantization that vLLM computes from the weights that a push brings; all others need a checkpoint made for them."""


def foreign_options(options: dict[str, object] | None) -> list[str]:
    """Return the names of `options` that stage2 does not allow, in any spelling."""
    return sorted(name for name in options or {} if name.replace("-", "_") not in ENGINE_OPTIONS)


def options_with_keys(vllm: Vllm) -> list[str]:
    """Return the names in `vllm.engine` that have a key of their own in `vllm`, or whose older key is set too."""
    own = (Vllm.model_fields.keys() - {*OLDER_OPTIONS}) | vllm.model_fields_set
    return sorted(name for name in vllm.engine or {} if name.replace("-", "_") in own)


def is_quantized_by_checkpoint(options: dict[str, object] | None) -> bool:
    """Whether `options` ask for a quantization that no push can bring."""
    return (options or {}).get("quantization") not in (None, *ONLINE_QUANTIZATION)
