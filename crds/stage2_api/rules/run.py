"""Rules between keys of the training YAML, in CEL, and in Python where a rule is beyond `cel.holds`.

Source: semantics sections 3, 7, 9, 10, 11, 12 and 17.
"""

from __future__ import annotations

from stage2_api.rules.grpo import GRPO_RULES, SPEED_AND_MEMORY, UNPUSHABLE
from stage2_api.rules.variants import VARIANT_RULES
from stage2_api.runconfig import RunConfig
from stage2_api.validation.validate import Rule
from stage2_api.vllm import (
    ENGINE_OPTIONS,
    OLDER_OPTIONS,
    ONLINE_QUANTIZATION,
    Vllm,
    VllmServer,
    foreign_options,
    is_quantized_by_checkpoint,
    options_with_keys,
)

_MATCHING = "custom.extra.rollout_matching"
_VLLM = f"{_MATCHING}.vllm"


_KEEPS_BEST = "$(training.save_strategy) == 'best'"
_SILENT = "$(custom.trainer_variant) == 'sft' && $(training.eval_strategy) == 'no'"
"""CEL: the run generates nothing."""
_NOT_VLLM = f"({_SILENT} || $({_MATCHING}.rollout_backend) != 'vllm')"
_NOT_COLOCATE = f"($?(rlhf) || {_NOT_VLLM} || $({_VLLM}.mode) != 'colocate')"


NARROW_WEIGHTS = (
    "16-bit weights round away nearly every update at a small learning rate, and nothing keeps a float32 copy"
)
WIDEN_WEIGHTS = (
    "set it to float32 (training.bf16 still computes in bfloat16; servers then hold float32 too), use deepspeed with"
    " bf16, which keeps float32 copies, or train only adapters (train_type lora without modules_to_save)"
)


def _trains_narrow_weights(config: RunConfig) -> bool:
    """Return whether the file trains 16-bit weights in full; with `auto` the checkpoint's dtype decides."""
    in_full = config.tuner.train_type == "full" or bool(config.tuner.modules_to_save)
    return in_full and config.model.torch_dtype in ("bfloat16", "float16") and not config.uses_deepspeed


def _drafts_asynchronously(config: RunConfig) -> bool:
    vllm = config.rollout_matching.vllm
    return vllm.schedules_asynchronously and vllm.speculation in ("frame", "ngram")


def _offloads(config: RunConfig) -> bool:
    return config.rollout_matching.colocates and config.rollout_matching.offload.enabled


RUN_RULES: tuple[Rule[RunConfig], ...] = (
    Rule(
        path=f"{_MATCHING}.decode_mode",
        cel=f"{_NOT_VLLM} || $({_MATCHING}.decode_mode) == 'greedy'",
        rule="vLLM samples or decodes greedily; it has no beam search",
        way_out="set decode_mode to greedy, or rollout_backend to hf",
    ),
    Rule(
        path=f"{_MATCHING}.num_return_sequences",
        cel=f"$({_MATCHING}.num_return_sequences, 1) <= $({_MATCHING}.num_beams)",
        rule="beam search cannot return more sequences than it has beams",
        way_out="lower num_return_sequences or raise num_beams",
    ),
    Rule(
        path=f"{_VLLM}.max_model_len",
        cel=f"{_NOT_COLOCATE} || $?({_VLLM}.max_model_len)",
        rule="colocate mode needs the longest prompt plus answer",
        way_out="set vllm.max_model_len to prompt length + max_new_tokens, or rollout_backend to hf",
    ),
    Rule(
        path=f"{_VLLM}.max_model_len",
        cel=f"{_NOT_VLLM} || !$?({_VLLM}.max_model_len) || $({_MATCHING}.max_new_tokens) < $({_VLLM}.max_model_len, 1)",
        rule="must exceed max_new_tokens, to leave room for a prompt",
        way_out="raise vllm.max_model_len or lower max_new_tokens",
    ),
    Rule(
        path=f"{_VLLM}.enable_lora",
        cel=f"$({_VLLM}.sync.mode) != 'adapter' || $({_VLLM}.enable_lora)",
        rule="sync.mode adapter needs a vLLM that can load adapters",
        way_out="set vllm.enable_lora to true, or vllm.sync.mode to full",
    ),
    Rule(
        path=f"{_VLLM}.sync.mode",
        cel=f"$({_VLLM}.sync.mode) != 'adapter' || !$(tuner.use_dora)",
        rule="vLLM cannot load DoRA adapters",
        way_out="set vllm.sync.mode to full (or to auto, which uses full with DoRA), or tuner.use_dora to false",
    ),
    Rule(
        path=f"{_VLLM}.sync.mode",
        cel=f"$({_VLLM}.sync.mode) != 'adapter' || $(tuner.train_type) == 'lora'",
        rule="there is no adapter to send when tuner.train_type is full",
        way_out="set vllm.sync.mode to full, or tuner.train_type to lora",
    ),
    Rule(
        path=f"{_VLLM}.sync.merge",
        cel=f"$({_VLLM}.sync.merge) != 'server' || $({_VLLM}.server.protocol) != 'swift'",
        rule="servers of `swift rollout` cannot merge adapters",
        way_out="set vllm.sync.merge to auto or learner",
    ),
    Rule(
        path=f"{_VLLM}.sync.merge",
        cel=f"$({_VLLM}.sync.merge) != 'server' || $(tuner.train_type) == 'lora'",
        rule="there is no adapter to merge when tuner.train_type is full",
        way_out="set vllm.sync.merge to auto or learner, or tuner.train_type to lora",
    ),
    Rule(
        path=f"{_VLLM}.sync.merge",
        cel=f"{_NOT_COLOCATE} || $({_VLLM}.sync.merge) != 'server'",
        rule="a colocated engine runs inside the learner; there is no server to merge adapters",
        way_out="set vllm.sync.merge to auto or learner, or vllm.mode to server",
    ),
    Rule(
        path=f"{_VLLM}.sync.rounding",
        cel=f"$({_VLLM}.sync.rounding) != 'stochastic' || $(model.torch_dtype) != 'float16'",
        rule="stochastic rounding supports only bfloat16",
        way_out="set model.torch_dtype to bfloat16, or vllm.sync.rounding to nearest",
    ),
    Rule(
        path=f"{_VLLM}.load_format",
        cel=f"$({_VLLM}.sync.mode) != 'adapter' || $({_VLLM}.load_format, '') != 'dummy'",
        rule="adapters need the checkpoint's weights, which dummy does not load",
        way_out="set vllm.load_format to auto, or vllm.sync.mode to full",
    ),
    Rule(
        path=f"{_VLLM}.load_format",
        cel=f"$({_VLLM}.load_format, '') != 'pt' || $(model.allow_pickled_weights)",
        rule="pt reads pickled weights, and a pickle may contain any command",
        way_out="set vllm.load_format to auto, or model.allow_pickled_weights to true",
    ),
    Rule(
        path=f"{_VLLM}.engine",
        breaks=lambda c: bool(options_with_keys(c.custom.extra.rollout_matching.vllm)),
        # Not in CEL, which cannot read the keys of a free mapping; nor the next two.
        rule="holds an argument that has a key of its own, or is set at its older place too",
        way_out=f"write it once: as a key of {_VLLM}, or here if that key is an older place",
    ),
    Rule(
        path=f"{_VLLM}.engine",
        breaks=lambda c: any(
            name not in Vllm.model_fields for name in foreign_options(c.custom.extra.rollout_matching.vllm.engine)
        ),
        rule=SPEED_AND_MEMORY,
        way_out=f"keep to {', '.join(sorted(ENGINE_OPTIONS - (Vllm.model_fields.keys() - {*OLDER_OPTIONS})))}",
    ),
    Rule(
        path=f"{_VLLM}.engine",
        breaks=lambda c: is_quantized_by_checkpoint(c.custom.extra.rollout_matching.vllm.engine),
        rule=UNPUSHABLE,
        way_out=f"set quantization to one of {', '.join(ONLINE_QUANTIZATION)}",
    ),
    Rule(
        path=f"{_VLLM}.engine",
        breaks=_drafts_asynchronously,
        reads=(f"{_VLLM}.speculation",),
        # Not in CEL, which cannot read the keys of a free mapping.
        rule="vLLM on CPUs cannot schedule asynchronously beside drafts",
        way_out="remove async_scheduling (on GPUs it is vLLM's default), or set vllm.speculation to none",
    ),
    Rule(
        path="model.torch_dtype",
        breaks=_trains_narrow_weights,
        reads=("deepspeed", "tuner.train_type", "tuner.modules_to_save"),
        # Not in CEL, which cannot read an untyped key such as deepspeed.
        rule=f"weights that train in full need float32: {NARROW_WEIGHTS}",
        way_out=WIDEN_WEIGHTS,
    ),
    Rule(
        path="tuner.use_dora",
        cel="!$(tuner.use_dora) || $(tuner.train_type) == 'lora'",
        rule="DoRA is a form of LoRA",
        way_out="set tuner.train_type to lora, or tuner.use_dora to false",
    ),
    Rule(
        path="tuner",
        cel="!($(tuner.freeze_llm) && $(tuner.freeze_vit) && $(tuner.freeze_aligner))",
        rule="something must be trained, but freeze_llm, freeze_vit and freeze_aligner are all true",
        way_out="set one of them to false",
    ),
    Rule(
        path=f"{_MATCHING}.pipeline.enabled",
        cel=f"!$({_MATCHING}.pipeline.enabled) || !{_NOT_VLLM} && $({_VLLM}.mode) == 'server'",
        rule="only servers can make rollouts while the learner trains",
        way_out="set vllm.mode to server (with rollout_backend vllm), or pipeline.enabled to false",
    ),
    Rule(
        path=f"{_MATCHING}.pipeline.enabled",
        cel=(
            f"!$({_MATCHING}.pipeline.enabled) || !$({_MATCHING}.rollout_buffer.enabled) ||"
            f" $({_MATCHING}.rollout_buffer.m_steps) == 1"
        ),
        rule="reused rollouts cannot also be made one window ahead",
        way_out="set pipeline.enabled or rollout_buffer.enabled to false",
    ),
    Rule(
        path=f"{_MATCHING}.offload.enabled",
        breaks=lambda c: _offloads(c) and c.uses_deepspeed,
        reads=("deepspeed", f"{_VLLM}.mode", f"{_MATCHING}.rollout_backend", "custom.trainer_variant"),
        # Not in CEL, which cannot read an untyped key such as deepspeed.
        rule="DeepSpeed holds the training state itself, so it cannot be offloaded",
        way_out="set offload.enabled to false, or rollout_backend to hf, or remove deepspeed",
    ),
    Rule(
        path="global_max_length",
        cel="!$(training.packing) || $?(global_max_length) || $?(template.max_length) || $?(training.packing_length)",
        rule="training.packing needs the length of a packed row",
        way_out="set global_max_length (or template.max_length), or training.packing to false",
    ),
    Rule(
        path="training.gradient_accumulation_steps",
        cel="!$?(training.gradient_accumulation_steps) || !$?(training.effective_batch_size)",
        rule="gradient accumulation follows from training.effective_batch_size, so both cannot be set",
        way_out="remove one of the two",
    ),
    Rule(
        path="training.fp16",
        cel="!($(training.fp16) && $(training.bf16))",
        rule="a forward pass has one dtype, but bf16 and fp16 are both true",
        way_out="set one of the two to false",
    ),
    Rule(
        path="custom.val_jsonl",
        cel="$(training.eval_strategy) == 'no' || $?(custom.val_jsonl)",
        rule="evaluation needs records",
        way_out='set custom.val_jsonl, or training.eval_strategy to "no"',
    ),
    Rule(
        path="training.metric_for_best_model",
        cel=f"!({_KEEPS_BEST}) || !$?(rlhf) || $?(training.metric_for_best_model)",
        rule="keeping the best checkpoint of a GRPO run needs a metric",
        way_out="set metric_for_best_model to eval_reward, or save_strategy to steps",
    ),
    Rule(
        path="training.eval_strategy",
        cel=f"!({_KEEPS_BEST}) || $(training.eval_strategy) != 'no'",
        rule="keeping the best checkpoint needs evaluation",
        way_out="set eval_strategy to steps, or save_strategy to steps",
    ),
    Rule(
        path="template.min_pixels",
        cel="!$?(template.max_pixels) || $(template.min_pixels, 1) <= $(template.max_pixels, 1)",
        rule="min_pixels must not exceed max_pixels",
        way_out="lower min_pixels or raise max_pixels",
    ),
    Rule(
        path="training.dataloader_prefetch_factor",
        cel="!$?(training.dataloader_prefetch_factor) || $(training.dataloader_num_workers) > 0",
        rule="prefetching needs worker processes",
        way_out="set dataloader_num_workers above 0, or remove dataloader_prefetch_factor",
    ),
    Rule(
        path="training.optim",
        breaks=lambda c: c.training.optim == "schedule_free_adamw",
        # Not in CEL, nor the next: a job that has the value could not even be suspended.
        rule="stage2 evaluates, pushes and saves the weights that are trained, and not this optimizer's averages",
        way_out="set it to adamw_torch",
    ),
    Rule(
        path="training.lr_scheduler_type",
        breaks=lambda c: c.training.lr_scheduler_type == "reduce_lr_on_plateau",
        rule="it takes a figure for better if it is smaller, and an F1 is not",
        way_out="set it to cosine, or to constant",
    ),
    Rule(
        path="training.dataloader_persistent_workers",
        cel="!$(training.dataloader_persistent_workers) || $(training.dataloader_num_workers) > 0",
        rule="there are no worker processes that could persist",
        way_out="set dataloader_num_workers above 0, or dataloader_persistent_workers to false",
    ),
    *VARIANT_RULES,
    *GRPO_RULES,
)
"""Rules of every training YAML, alone or inside a job."""


_SERVER = f"{_VLLM}.server"


def _server(config: RunConfig) -> VllmServer:
    return config.rollout_matching.vllm.server


def _has_legacy(server: VllmServer) -> bool:
    return server.base_url is not None or server.group_port is not None


def _pairs_badly(config: RunConfig) -> bool:
    """Return whether the older form does not pair: a URL needs a port, a list a port or an equally long list."""
    urls, ports = _server(config).base_url, _server(config).group_port
    if urls is None or ports is None:
        return (urls is None) != (ports is None)
    if isinstance(urls, str):
        return not isinstance(ports, int)
    return not urls or (isinstance(ports, list) and len(ports) != len(urls))


def _shares_an_address(config: RunConfig) -> bool:
    servers = () if _pairs_badly(config) else _server(config).resolved_servers()
    return len({s.base_url for s in servers}) < len(servers) or len({s.group_port for s in servers}) < len(servers)


STANDALONE_RULES: tuple[Rule[RunConfig], ...] = (
    Rule(
        path=_SERVER,
        breaks=lambda c: c.rollout_matching.uses_servers and _server(c).servers is None and not _has_legacy(_server(c)),
        rule="server mode needs the addresses of its servers",
        way_out="set vllm.server.servers to a list of {base_url, group_port}, or vllm.mode to colocate",
    ),
    Rule(
        path=_SERVER,
        breaks=lambda c: _server(c).servers is not None and _has_legacy(_server(c)),
        rule="the addresses are given in two forms: servers, and base_url with group_port",
        way_out="keep servers and remove base_url and group_port",
    ),
    Rule(
        path=f"{_SERVER}.group_port",
        breaks=_pairs_badly,
        rule="base_url and group_port must pair: one URL with one port, a list with one port or an equally long list",
        way_out="write servers, a list of {base_url, group_port}, instead",
    ),
    Rule(
        path=_SERVER,
        breaks=_shares_an_address,
        rule="every server needs a unique base_url and group_port",
        way_out="change the duplicate",
    ),
)
"""Rules of a training YAML that runs without a job, and so must name its servers."""
