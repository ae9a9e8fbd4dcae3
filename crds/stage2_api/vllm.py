"""`custom.extra.rollout_matching.vllm`: how vLLM makes rollouts, and how the learner's weights reach it.

Source: semantics section 3 (keys, defaults, rules), 11 (server mode), 12 (weight sync).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StringConstraints

from stage2_api.section import Count, Port, Positive, Scale, Section, Url, Weight

VllmMode = Literal["colocate", "server"]
ServerProtocol = Literal["vllm", "swift"]
SyncMode = Literal["full", "adapter", "auto"]
SyncTransport = Literal["auto", "tcp", "nccl"]
Transport = Literal["tcp", "nccl"]
TRANSPORT_PATH: Final = "custom.extra.rollout_matching.vllm.sync.transport"
SyncMerge = Literal["auto", "server", "learner"]
SyncRounding = Literal["nearest", "stochastic"]
LoadFormat = Literal["auto", "dummy", "safetensors", "pt", "runai_streamer", "sharded_state"]
KvCacheDtype = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"]


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
    """Address of the server with scheme, host and port, such as `http://127.0.0.1:8000`; a trailing `/` is dropped. One
    of `https://` is asked over TLS, and believed if `STAGE2_TLS_CA_FILE` names the authority of its certificate."""
    group_port: Port
    """TCP port of the weight-transfer group, not the HTTP port: the learner listens there, the server dials it."""


class VllmServer(Section):
    """The rollout servers of server mode: exactly one of the two forms, `servers` or `base_url` with `group_port`."""

    servers: list[VllmServerEntry] | None = Field(None, min_length=1, max_length=64)
    """List of the rollout servers, in the order in which chunks of requests go to them. A job leaves it out: the
    controller and `stage2 run` fill it in."""
    base_url: Annotated[
        Url | list[Url] | None, Field(json_schema_extra={"x-stage2-schema": {"type": "string", "maxLength": 2048}})
    ] = None
    """Address of the rollout server, or a list of addresses: the older form of `servers`."""
    group_port: Annotated[
        Port | list[Port] | None,
        Field(json_schema_extra={"x-stage2-schema": {"type": "integer", "minimum": 1, "maximum": 65535}}),
    ] = None
    """Weight-transfer port of the older form: one for one address; a list pairs with the addresses by position; one
    port with a list of addresses means port, port + 1, and so on."""
    protocol: ServerProtocol = "vllm"
    """What the servers speak: `vllm`, those that `stage2 serve` starts, or `swift`, those of ms-swift's
    `swift rollout`, which take full syncs only and do not say which weights they hold."""
    timeout_s: Scale = 240.0
    """Seconds to wait for a server to answer and to join the weight-transfer group. Loading a large model takes
    minutes."""
    infer_timeout_s: float | None = None
    """Seconds that one request for rollouts may take; null or a value of at most 0 means no limit, for long answers
    take as long as they take. A server that stands still is noticed all the same: while it generates it must say its
    weight version within `timeout_s`, and after `timeout_s` a warning counts the requests under way."""

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
    """Return what carries weights; `on_cuda` says whether learner and servers have GPUs."""
    if requested == "auto":
        return "nccl" if on_cuda else "tcp"
    return requested


class VllmSync(Section):
    """How the learner's weights reach the rollout engine before fresh rollouts."""

    mode: SyncMode = "full"
    """What is sent: `full` sends weights with adapters merged in, which works for every model and for DoRA; `adapter`
    sends only LoRA weights and needs `enable_lora`; `auto` takes `adapter` if it can work, else `full`."""
    transport: SyncTransport = "auto"
    """What carries weights to servers: `nccl` from GPU to GPU, `tcp` from and to main memory, over one port for each
    server; `auto` takes `nccl` on GPUs and `tcp` elsewhere. Servers of `swift rollout` have transports of their own."""
    fallback_to_full: bool = True
    """Whether a failed adapter sync turns into full syncs for the rest of the run (with a warning) or ends it."""
    merge: SyncMerge = "auto"
    """Where a full sync merges adapters: `server` sends the adapter, about a hundredth of the layers that it touches,
    and every server merges it into the weights of its own model folder; `learner` sends merged layers; `auto` takes
    `server` if the servers can and their folders have the learner's base weights, else `learner`."""
    rounding: SyncRounding = "nearest"
    """How merged weights are cast to bfloat16: `nearest` lets an update through once it reaches half a step of a
    weight, `stochastic` lets each update through in the mean, with noise. `sync/rounding_kept` in the log says how much
    of it the servers have."""
    changed_only: bool = True
    """Whether a full sync sends a server that has everything only the layers that can have changed since."""
    one_group_from: Positive = 4
    """Servers from which on all share one NCCL group in full training, so that the learner sends each byte once and the
    servers hand it on. A server that breaks ends that group for the rest of the run: each then has one of its own. With
    adapters, and over `tcp`, each server always has its own."""
    verify_every: Count = 20
    """Syncs from one proof to the next: the log-probabilities that every server gives a sample prompt are compared with
    the learner's own, and other weights end the run. The first sync is always proved; 0 means only that one."""
    verify_tolerance: Scale | None = None
    """Largest mean difference of log-probabilities that rounding explains; the 99th percentile may be eight times that,
    and above 2.5 times either the run ends. Unset means 0.0001 in float32, and 0.06 in bfloat16 and float16."""


class Vllm(Section):
    """The vLLM engine that makes the rollouts."""

    mode: VllmMode = "colocate"
    """Where vLLM runs: `colocate` inside the learner's processes on the learner's GPUs, `server` in processes of
    its own on other GPUs."""
    tensor_parallel_size: Positive | None = None
    """GPUs that share one copy of the model. Unset means 4 with four colocated learner processes, else 1."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.45
    """Share of each GPU's memory that vLLM takes. The default leaves room for training on the same GPU; a server has
    the GPU to itself and can take 0.9."""
    max_model_len: Positive | None = None
    """Longest prompt plus answer in tokens. Needed in colocate mode; must leave room for `max_new_tokens`. Unset, a
    server takes it from the model."""
    enable_lora: bool = False
    """Whether vLLM is started so that it can load LoRA adapters, which `sync.mode: adapter` needs."""
    load_format: LoadFormat | None = None
    """Where vLLM's first weights come from. Unset means `dummy` (random, no reading) without `enable_lora`, else `auto`
    (the checkpoint): the learner pushes its weights before the first rollout anyway."""
    enable_prefix_caching: bool = True
    """Whether vLLM reuses the attention cache of equal prompt beginnings. The cache is reset after each sync."""
    sleep_level: Annotated[int, Field(ge=0, le=2)] = 0
    """Sleep level in which a colocated engine is put once after its start: 0 none, 1 weights to the CPU, 2 weights
    dropped. For emergencies of memory."""
    enforce_eager: bool = False
    """Whether vLLM runs without CUDA graphs: slower, starts sooner, needs less memory."""
    disable_custom_all_reduce: bool = True
    """Whether vLLM leaves all-reduce to NCCL: slower by a little, works on every machine."""
    max_num_seqs: Positive = 256
    """Most sequences that vLLM runs at once."""
    infer_batch_size: Annotated[int, Field(le=2**31 - 1)] | None = None
    """Requests that one call of a colocated engine gets; null or a value of at most 0 means all at once. Small values
    lower the memory peak of image encoding."""
    max_num_batched_tokens: Positive | None = None
    """Most tokens of one scheduling step of vLLM. Unset leaves vLLM's own default."""
    enable_chunked_prefill: bool | None = None
    """Whether vLLM splits long prompts over scheduling steps. Unset leaves vLLM's own default."""
    disable_chunked_mm_input: bool | None = None
    """Whether vLLM keeps the tokens of one image in one scheduling step. Unset leaves vLLM's own default."""
    skip_mm_profiling: bool | None = None
    """Whether vLLM starts without a trial run over the largest images. Unset leaves vLLM's own default."""
    kv_cache_dtype: KvCacheDtype | None = None
    """Number format of vLLM's attention cache. Unset leaves vLLM's own default."""
    cpu_offload_gb: Weight | None = None
    """GiB of weights for each GPU that vLLM keeps in main memory. Unset leaves vLLM's own default."""
    swap_space: Weight | None = None
    """GiB of main memory for each GPU to which vLLM swaps attention caches. Unset leaves vLLM's own default."""
    limit_mm_per_prompt: dict[str, Count] | None = Field(None, max_length=16)
    """Mapping from a kind of input to how many one prompt may hold, such as `{image: 1, video: 0}`. Unset leaves vLLM's
    own default."""
    mm_encoder_tp_mode: Literal["weights", "data"] | None = None
    """How the image encoder uses several GPUs: `weights` splits its layers, `data` its images. Unset leaves vLLM's own
    default."""
    server: VllmServer = VllmServer()
    """Rollout servers and the patience with them; used in server mode only."""
    sync: VllmSync = VllmSync()
    """Weight sync: what is sent to the rollout engine, and what happens when that fails."""

    @property
    def resolved_load_format(self) -> LoadFormat:
        """`load_format`, or what it means when unset."""
        return self.load_format or ("auto" if self.enable_lora else "dummy")

    def resolved_tensor_parallel_size(self, world_size: int) -> int:
        """Return `tensor_parallel_size`, or what it means when unset in `world_size` learner processes."""
        return self.tensor_parallel_size or (4 if self.mode == "colocate" and world_size == 4 else 1)

    def passed_through(self) -> dict[str, Any]:
        """Return the engine arguments that a person set and that vLLM takes under the same names."""
        names = (
            "max_num_batched_tokens", "enable_chunked_prefill", "disable_chunked_mm_input", "skip_mm_profiling",
            "kv_cache_dtype", "cpu_offload_gb", "swap_space", "limit_mm_per_prompt", "mm_encoder_tp_mode",
        )  # fmt: skip
        return {name: value for name in names if (value := getattr(self, name)) is not None}


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


def foreign_options(options: dict[str, object] | None) -> list[str]:
    """Return the names of `options` that a person may not set, however they are spelled."""
    return sorted(name for name in options or {} if name.replace("-", "_") not in ENGINE_OPTIONS)
