"""Drafts of `frame` for vLLM's model runner V2, which gets them in the place of its n-gram speculator.

`vllm_compat.draft_frames_on_gpus` puts it there. Not run on a GPU yet (docs/gpu.md).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from stage2_trainer.serve.frame import Frame
from stage2_trainer.serve.frame_kernels import FrameKernels
from stage2_trainer.sync.vllm.vllm_compat import PROPOSED


class FrameSpeculator(BaseSpeculator):
    """A speculator without weights, CUDA graphs or waits of the host."""

    supports_mm_inputs = False
    draft_logits = None  # a draft is certain; vLLM then verifies it by the target's probabilities alone

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any) -> None:
        assert vllm_config.speculative_config is not None
        self._states, model = req_states, vllm_config.model_config
        self._kernels = FrameKernels(
            Frame(cached_tokenizer_from_config(model), model.get_vocab_size()),
            vllm_config.speculative_config.num_speculative_tokens,
            slots=vllm_config.scheduler_config.max_num_seqs,
            longest=model.max_model_len,
            device=device,
        )

    def init_cudagraph_manager(self, *_: Any, **__: Any) -> None:
        """Do nothing: the kernels are launched after the model's graph."""

    def capture(self) -> None:
        """Do nothing, for the same reason."""

    @torch.inference_mode()
    def propose(self, input_batch: Any, *arguments: Any, dummy_run: bool = False, **named: Any) -> torch.Tensor:
        """Return the drafts, (requests, most). `vllm_compat.PROPOSED` has the names of the arguments, in order."""
        if dummy_run:
            return self._kernels.drafts[: input_batch.num_reqs]
        passed = dict(zip(PROPOSED[1:], arguments, strict=False)) | named
        return self._kernels.draft(
            self._states.all_token_ids.gpu,
            input_batch.idx_mapping,
            self._states.total_len.gpu,
            passed["num_sampled"],
            passed["last_sampled"].view(-1),
        )
