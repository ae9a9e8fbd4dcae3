"""Adapter mode: the LoRA tensors alone, over the wire of the full push, for servers that add them to their own base."""

from __future__ import annotations

import logging
import secrets
from typing import Any

from peft import PeftModel, get_peft_model_state_dict
from torch import nn

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.sync.fleet.delivery import Shipment
from stage2_trainer.sync.fleet.push import EffectiveMode, SyncMode, reach, send
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.sync.fleet.server import Fleet, ServerSession
from stage2_trainer.sync.tensors.merge import HERE, WeightAccess, WeightEntry, WeightSource, merged_weights
from stage2_trainer.wire.requests import MAX_LORA_RANK, POLICY_MODEL

logger = logging.getLogger(__name__)

MODE_PATH = "custom.extra.rollout_matching.vllm.sync.mode"
NO_LORA = "vllm.enable_lora is false"
ADAPTED_BY_VLLM = "base_model.model.model.language_model."
LORA_MATRICES = (".lora_A.", ".lora_B.")


def resolve_mode(requested: SyncMode, *, enable_lora: bool, obstacle: str | None) -> EffectiveMode:
    """Return the mode that a run starts with, and log why `auto` does not become `adapter`.

    obstacle: why vLLM cannot serve what trains as an adapter; None if it can.

    Raises:
        ConfigError: adapter sync is requested and cannot work.
    """
    reason = obstacle if enable_lora else NO_LORA
    if requested == "full":
        return "full"
    if reason is None:
        return "adapter"
    if requested == "auto":
        logger.info("%s: auto resolves to full: %s", MODE_PATH, reason)
        return "full"
    way_out = "set it to full, which sends adapters merged and needs no LoRA support on the server"
    raise ConfigError((Problem(MODE_PATH, requested, f"adapter-only sync cannot work: {reason}", way_out),))


def adapter_obstacle(model: nn.Module) -> str | None:
    """Return why vLLM cannot serve what trains of this model as an adapter; None if it can."""
    if not isinstance(model, PeftModel):
        return "there are no adapters: tuner.train_type is full"
    if len(model.active_adapters) != 1:
        return f"one adapter can be served, and {len(model.active_adapters)} are active"
    config: Any = model.peft_config[model.active_adapters[0]]
    if config.use_dora:
        return "vLLM cannot load DoRA adapters (tuner.use_dora)"
    ranks = [config.r, *config.rank_pattern.values()]
    if max(ranks) > MAX_LORA_RANK:
        return f"vLLM takes adapters up to rank {MAX_LORA_RANK}, and one has rank {max(ranks)} (tuner.lora_rank)"
    for name, parameter in model.named_parameters():
        is_adapter = any(matrix in name for matrix in LORA_MATRICES)
        if is_adapter and not name.startswith(ADAPTED_BY_VLLM):
            return f"vLLM's adapters reach the language model only, and {name} is outside of it"
        if parameter.requires_grad and not is_adapter:
            return f"{name} trains and is no LoRA matrix"
    return None


def adapter_weights(model: PeftModel, access: WeightAccess = HERE) -> WeightSource:
    """Return the LoRA matrices under the names of PEFT's own checkpoints. access: how they are read."""
    state = get_peft_model_state_dict(
        model,
        model.state_dict(keep_vars=True),  # the parameters themselves, which may be gathered later
        adapter_name=model.active_adapters[0],
        save_embedding_layers=False,
    )
    entries = tuple(WeightEntry(name, tensor, None, trains=True) for name, tensor in state.items())
    return WeightSource(entries, access=access)


def adapter_config(model: PeftModel) -> dict[str, Any]:
    """Return the fields of PEFT's adapter_config.json that say how the matrices count."""
    config: Any = model.peft_config[model.active_adapters[0]]
    return {
        "peft_type": "LORA",
        "bias": "none",
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "use_rslora": config.use_rslora,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
        "target_modules": sorted(config.target_modules),
    }


def push_adapter(fleet: Fleet, model: nn.Module, *, version: int, access: WeightAccess = HERE) -> SyncReport:
    """Give every server the model's adapter, under `version`, and a new name that requests must ask for.

    A name is never used twice, so nothing that was computed or loaded under an older one can be taken for the new. It
    is in the report. A server whose base an earlier learner may have changed is sent the base first. access: how
    weights are read.

    Raises:
        ServerError: one or more servers do not serve the adapter.
    """
    assert isinstance(model, PeftModel)  # `adapter_obstacle` has checked it
    name = f"{POLICY_MODEL}-{version}-{secrets.token_hex(4)}"
    header = {"adapter": {"name": name, "config": adapter_config(model)}}
    adapter = Shipment(adapter_weights(model, access), header)
    sent = [adapter]
    with fleet.update() as update:
        reach(update)
        rebased = [session for session in update.fit if not session.holds_base]
        if rebased:
            base = Shipment(merged_weights(model, access=access).unmerged())
            sent.append(base)
            send(fleet, base, rebased, update)
        send(fleet, adapter, update.fit, update)
        with update.measure("finish"):
            update.each(ServerSession.finish_adapter, version, name)
    return fleet.report(
        update,
        version,
        bytes=sum(shipment.nbytes for shipment in sent),
        tensors=sum(len(shipment.metas) for shipment in sent),
        everything=bool(rebased),
        adapter=name,
    )
