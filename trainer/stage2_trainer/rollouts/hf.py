"""Rollouts by the learner's own model through transformers (`rollout_backend: hf`): slow, without a weight sync.

Prompts are padded on the left to the longest of their batch, so that every answer begins at the same column. Answers
that repeat themselves are ended, each row on its own (`repeat_terminate`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from stage2_api.rollout_matching import RepeatTerminate, RolloutMatching
from stage2_trainer.data.encode import Encoder, Prompt, PromptCache
from stage2_trainer.matching.closing import generation_fields
from stage2_trainer.model.gathered_weights import GatherWeights
from stage2_trainer.process.activity import ACTIVITY
from stage2_trainer.sync.fleet.proof import inference
from stage2_trainer.wire.requests import Rollout, RolloutRequest, SeedPlan

OBJECT_KEY = '"object_'
SERVER = "learner"  # the source of these rollouts, in logs
SMALLEST_TEMPERATURE = 1e-4
UNUSED_TOP_K = 50  # where nothing is sampled, transformers warns of any other number
_TEXT = 0  # the processor's mm_token_type_ids: text 0, image 1, video 2


@dataclass(frozen=True)
class Decoding:
    """The decoding of answers: greedily, sampled (temperature above 0), or by beam search (num_beams above 1).

    batch_size: prompts that are answered at once. num_return_sequences: beams that are returned; the best one counts.
    repeat: rules that end answers which repeat themselves; None = none.
    """

    max_new_tokens: int
    temperature: float = 0.0
    repetition_penalty: float = 1.0
    num_beams: int = 1
    num_return_sequences: int = 1
    batch_size: int = 1
    repeat: RepeatTerminate | None = None

    @classmethod
    def from_config(cls, matching: RolloutMatching) -> Decoding:
        """Take everything from `custom.extra.rollout_matching`."""
        beams = matching.num_beams if matching.decode_mode == "beam" else 1
        return cls(
            max_new_tokens=matching.max_new_tokens,
            temperature=matching.temperature,
            repetition_penalty=matching.repetition_penalty,
            num_beams=beams,
            num_return_sequences=min(matching.num_return_sequences or beams, beams),
            batch_size=matching.rollout_generate_batch_size,
            repeat=matching.repeat_terminate if matching.repeat_terminate.enabled else None,
        )

    def options(self) -> dict[str, Any]:
        """Return the fields of a GenerationConfig, all set, so that no default of the checkpoint applies."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": self.temperature > 0,
            "temperature": max(self.temperature, SMALLEST_TEMPERATURE) if self.temperature > 0 else 1.0,
            "top_p": 1.0,
            "top_k": 0 if self.temperature > 0 else UNUSED_TOP_K,
            "repetition_penalty": self.repetition_penalty,
            "num_beams": self.num_beams,
            "num_return_sequences": self.num_return_sequences,
            "use_cache": True,
        }


class HfBackend:
    """A Backend over a model in this process.

    model: the policy itself, not wrapped for training. cache: prompts by the names of their images. whole: gathers
    weights that are spread over processes (ZeRO-3) for a `with` block. stops: whether to stop generating; called before
    each token.
    """

    def __init__(
        self,
        model: Any,
        encoder: Encoder,
        decoding: Decoding,
        *,
        cache: PromptCache,
        whole: GatherWeights | None = None,
        stops: Callable[[], bool] = lambda: False,
    ) -> None:
        self._model = model
        self._stops = stops
        self._encoder = encoder
        self._cache = cache
        self._decoding = decoding
        self._whole: GatherWeights = whole or (lambda model: nullcontext())
        tokenizer = encoder.tokenizer
        self._end = encoder.end_of_turn_ids[0]
        self._pad = self._end if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
        self._pieces: dict[int, str] = {}

    def generate(
        self, requests: Sequence[RolloutRequest], *, seed_plan: SeedPlan, version: int | None = None
    ) -> list[Rollout]:
        """Return one rollout for each request, in order, marked with `version`. All requests have one bias.

        Once `stops` is true it returns the answers so far, cut off where they are.
        """
        assert all(one.bias == requests[0].bias for one in requests), "they are answered together"
        rollouts: list[Rollout] = []
        generating = ACTIVITY.doing("generating", len(requests), "answers")
        with generating as doing, inference(self._model), self._whole(self._model):
            for batch in self._batches(len(requests), seed_plan):
                if self._stops():
                    break
                part = requests[batch.start : batch.stop]
                rollouts += self._batch(part, seed_plan.seed(batch.start), version or 0)
                doing.advance(len(part))
        return rollouts

    def _batches(self, count: int, seed_plan: SeedPlan) -> list[range]:
        """Return the batches of requests. Sampled requests share a seed only within a micro-step."""
        sizes = seed_plan.sizes if self._decoding.temperature > 0 and seed_plan.sizes else (count,)
        ends = list(accumulate(sizes))
        return [
            range(start, min(start + self._decoding.batch_size, end))
            for size, end in zip(sizes, ends, strict=True)
            for start in range(end - size, end, self._decoding.batch_size)
        ]

    def _batch(self, requests: Sequence[RolloutRequest], seed: int, version: int) -> list[Rollout]:
        prompts = [self._prompt(request) for request in requests]
        answers, forced = self._answers(prompts, requests[0].bias, seed)
        return [
            self._rollout(prompt, answer, version, repeated=row in forced)
            for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]

    def _answers(
        self, prompts: Sequence[Prompt], bias: Mapping[int, float], seed: int
    ) -> tuple[list[list[int]], set[int]]:
        """Return an answer to each prompt, padded, and the rows that were ended because they repeated themselves."""
        device = next(self._model.parameters()).device
        inputs = {name: tensor.to(device) for name, tensor in left_padded(prompts, self._pad).items()}
        with torch.random.fork_rng():  # leaves the RNG of training (dropout) unchanged
            torch.manual_seed(seed)
            options = self._decoding.options() | generation_fields(bias)
            settings = GenerationConfig(**options, eos_token_id=self._end, pad_token_id=self._pad)
            ends = self._ends(inputs["input_ids"].shape[1])
            output = self._model.generate(
                **inputs,
                generation_config=settings,
                logits_processor=LogitsProcessorList(ends),
                stopping_criteria=StoppingCriteriaList([_StopRequested(self._stops)]),
                synced_gpus=False,  # weights are whole: no process waits for the others' tokens
            )
        answers = output[:: self._decoding.num_return_sequences, inputs["input_ids"].shape[1] :].tolist()
        # With beams, a row does not identify the beam that was ended.
        return answers, {row for one in ends for row in one.ended} if self._decoding.num_beams == 1 else set()

    def _prompt(self, request: RolloutRequest) -> Prompt:
        chat = [dict(message) for message in request.messages]
        return self._encoder.prompt(chat) if request.images is None else self._cache.whole(request.images, lambda: chat)

    def _ends(self, prompt_len: int) -> list[RepeatTermination]:
        rules = self._decoding.repeat
        return [] if rules is None else [RepeatTermination(rules, prompt_len, self._end, self._piece)]

    def _rollout(self, prompt: Prompt, answer: list[int], version: int, *, repeated: bool) -> Rollout:
        ended = self._end in answer
        ids = answer[: answer.index(self._end) + 1] if ended else answer  # what follows is padding
        return Rollout(
            prompt_token_ids=prompt.input_ids.tolist(),
            token_ids=ids,
            text=self._encoder.tokenizer.decode(ids, skip_special_tokens=True),
            server=SERVER,
            version=version,
            finish_reason="repetition" if repeated else "stop" if ended else "length",
            decode_mode="beam" if self._decoding.num_beams > 1 else "greedy",
        )

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self._encoder.tokenizer.decode([token])
        return self._pieces[token]


class _StopRequested(StoppingCriteria):
    """A criterion that ends all answers once the run was asked to stop."""

    def __init__(self, stops: Callable[[], bool]) -> None:
        self._stops = stops

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.Tensor:
        """Return which rows end, (rows,)."""
        return torch.full((len(input_ids),), self._stops(), device=input_ids.device)


def left_padded(prompts: Sequence[Prompt], pad: int) -> dict[str, torch.Tensor]:
    """Return the inputs of a batch: ids, attention mask and token types (rows, longest prompt), images one by one."""
    longest = max(len(prompt.input_ids) for prompt in prompts)

    def padded(rows: Sequence[torch.Tensor], value: int) -> torch.Tensor:
        return torch.stack([torch.cat([row.new_full((longest - len(row),), value), row]) for row in rows])

    images = {
        "pixel_values": [prompt.pixel_values for prompt in prompts if prompt.pixel_values is not None],
        "image_grid_thw": [prompt.image_grid_thw for prompt in prompts if prompt.image_grid_thw is not None],
    }
    return {
        "input_ids": padded([prompt.input_ids for prompt in prompts], pad),
        "attention_mask": padded([torch.ones_like(prompt.input_ids) for prompt in prompts], 0),
        "mm_token_type_ids": padded([prompt.mm_token_type_ids for prompt in prompts], _TEXT),
        **{name: torch.cat(parts) for name, parts in images.items() if parts},
    }


@dataclass
class RepeatTermination(LogitsProcessor):
    """A processor of logits that forces the end of turn in a row that breaks the rules.

    prompt_len: tokens before the answers, padding included. end: id of the end of turn. piece: the text of one id.
    `ended` has the rows whose end was forced.
    """

    rules: RepeatTerminate
    prompt_len: int
    end: int
    piece: Callable[[int], str]
    ended: set[int] = field(default_factory=set, init=False)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the scores (rows, vocabulary), -inf but for the end where a row must end."""
        if input_ids.shape[1] - self.prompt_len < self.rules.min_new_tokens:
            return scores
        rows = [i for i, ids in enumerate(input_ids[:, self.prompt_len :].tolist()) if self._must_end(ids)]
        if rows:
            self.ended.update(rows)
            scores = scores.clone()  # type: ignore[assignment]
            scores[rows] = -torch.inf
            scores[rows, self.end] = 0.0
        return scores

    def _must_end(self, answer: Sequence[int]) -> bool:
        if self.end in answer:  # over already; what follows is padding
            return False
        most = self.rules.max_object_keys
        return repeats(answer, self.rules) or (most is not None and holds_objects(answer, most, self.piece))


def repeats(answer: Sequence[int], rules: RepeatTerminate) -> bool:
    """Whether an answer's tokens end in a repetition that the rules forbid, of one token or of a sequence."""
    run, size, times = rules.max_consecutive_token_repeats, rules.ngram_size, rules.ngram_repeats
    if run and len(answer) >= run and len(set(answer[-run:])) == 1:
        return True
    last = list(answer[-size:])
    return len(answer) >= size * times and list(answer[-size * times :]) == last * times


def holds_objects(answer: Sequence[int], most: int, piece: Callable[[int], str]) -> bool:
    """Whether an answer's text holds `most` object keys; it is decoded only where a key has just ended."""
    just_written = "".join(map(piece, answer[-len(OBJECT_KEY) :]))
    return OBJECT_KEY in just_written and "".join(map(piece, answer)).count(OBJECT_KEY) >= most
