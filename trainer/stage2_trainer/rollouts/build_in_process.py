"""The construction of rollouts in the learner's own processes: from the configuration to a source of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stage2_api.runconfig import RunConfig
from stage2_trainer.data.prompt_cache import PromptCache
from stage2_trainer.process.deepspeed_compat import GatheredWeights
from stage2_trainer.process.offload import DeviceMover, StateOffloader
from stage2_trainer.process.policy import Policy
from stage2_trainer.process.ranks import world_size
from stage2_trainer.process.supported import shards_weights
from stage2_trainer.rollouts.colocate import ColocateEngine
from stage2_trainer.rollouts.colocate_options import engine_environment, engine_options
from stage2_trainer.rollouts.colocate_proofs import EngineProver
from stage2_trainer.rollouts.hf import Decoding, HfBackend
from stage2_trainer.rollouts.in_process import ColocateRollouts, HfRollouts
from stage2_trainer.telemetry.run_context import RunContext
from stage2_trainer.wire.rollout import Sampling


@dataclass(frozen=True)
class TrainingState:
    """The training state as rollouts need it: out of an engine's memory, and with its weights gathered."""

    offload: StateOffloader
    whole: GatheredWeights

    def attach(self, trainer: Any) -> None:
        """Learn where the optimizer and DeepSpeed's engine will be once training has begun."""
        self.offload.find_optimizer = lambda: trainer.optimizer
        self.whole.find_engine = lambda: trainer.model_wrapped


def local_rollouts(
    config: RunConfig,
    policy: Policy,
    cache: PromptCache,
    context: RunContext,
    state: TrainingState,
) -> HfRollouts | ColocateRollouts:
    """Return the rollouts of `rollout_backend: hf`, or of `vllm.mode: colocate`."""
    matching, seed = config.rollout_matching, config.training.seed
    reporter, interrupt = context.reporter, context.interrupt
    whole = state.whole if shards_weights(config) else None
    if matching.rollout_backend == "hf":
        decoding, stops = Decoding.from_config(matching), lambda: interrupt.asked
        backend = HfBackend(policy.model, policy.encoder, decoding, cache=cache, whole=whole, stops=stops)
        return HfRollouts(backend, seed=seed, reporter=reporter, interrupt=interrupt)
    vllm = matching.vllm
    on_cpu = policy.device.type == "cpu"
    engine = ColocateEngine(
        engine_options(config, world_size=world_size(), on_cpu=on_cpu),
        engine_environment(on_cpu=on_cpu, eager=vllm.enforce_eager),
        sampling=Sampling.from_config(matching),
        prover=EngineProver(
            policy.probe,
            every=vllm.sync.verify_every,
            tolerance=vllm.sync.verify_tolerance,
            proved=context.proved,
        ),
        sleep_level=vllm.sleep_level,
        infer_batch_size=vllm.infer_batch_size,
        rounding=vllm.sync.rounding,
    )
    engine.stops = lambda: interrupt.asked
    return ColocateRollouts(
        engine,
        state.offload,
        sync_mode=vllm.sync.mode,
        seed=seed,
        reporter=reporter,
        interrupt=interrupt,
        whole=whole,
    )


def make_training_state(config: RunConfig, device: torch.device) -> TrainingState:
    """Return the training state as rollouts need it: offloaded, and with its weights gathered."""
    chosen = config.rollout_matching.offload
    offload = StateOffloader(
        DeviceMover(device),
        model=chosen.enabled and chosen.offload_model,
        optimizer=chosen.enabled and chosen.offload_optimizer,
    )
    return TrainingState(offload, GatheredWeights())
