"""Drafts of `frame` for vLLM's model runner V1, which asks a class of ours for them (method `custom_class`)."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config

from stage2_trainer.serve.frame import Frame, Tokens


class FrameProposer:
    """A proposer of vLLM's method `custom_class`. It needs no weights."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        assert vllm_config.speculative_config is not None
        self._most = vllm_config.speculative_config.num_speculative_tokens
        self._longest_request = vllm_config.model_config.max_model_len
        model = vllm_config.model_config
        self._frame = Frame(cached_tokenizer_from_config(model), model.get_vocab_size())

    def load_model(self, *_: object) -> None:
        """Do nothing; vLLM calls it when it loads weights."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Tokens,
        token_ids_cpu: Tokens,
        **_: object,
    ) -> list[list[int]]:
        """Return the draft of each request.

        sampled_token_ids: the tokens that each request gained in this step; none while its prompt is read.
        num_tokens_no_spec: (requests,) its length, including these. token_ids_cpu: (requests, length) its tokens.
        """
        drafts: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[row])
            most = min(self._most, self._longest_request - length) if sampled else 0
            drafts.append(self._frame.draft(token_ids_cpu[row, :length], most) if most > 0 else [])
        return drafts
