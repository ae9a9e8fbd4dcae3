"""The interface of a rollout backend: requests in, token ids out, in the same order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from itertools import accumulate, zip_longest
from typing import Any, Literal, Protocol

from stage2_api.rollout_matching import RepeatTerminate, RolloutMatching

POLICY_MODEL = "policy"  # the name under which every server serves it
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's --max-lora-rank takes
MAX_LORA_RANK = LORA_RANKS[-1]


@dataclass(frozen=True)
class RepetitionDetection:
    """The fields of a request's `repetition_detection`, by vLLM's names; lengths in tokens, both ends included."""

    max_pattern_size: int
    min_pattern_size: int
    min_count: int

    @classmethod
    def from_rules(cls, rules: RepeatTerminate) -> RepetitionDetection | None:
        """Return the check that the rules make on a server; None where they are off.

        Every loop of at most `ngram_size` tokens is also one of some length above half of that, so shorter sequences
        need no look: a loop ends at the latest after `ngram_size * ngram_repeats` tokens, a run of one token earlier.
        """
        if not rules.enabled:
            return None
        return cls(rules.ngram_size, rules.ngram_size // 2 + 1, rules.ngram_repeats)

    def ends_in_loop(self, answer: Sequence[int]) -> bool:
        """Whether an answer's tokens end in a sequence that stands `min_count` times in a row."""
        longest = min(self.max_pattern_size, len(answer) // self.min_count)
        return any(self._repeats(answer, size) for size in range(max(self.min_pattern_size, 1), longest + 1))

    def _repeats(self, answer: Sequence[int], size: int) -> bool:
        tail = answer[len(answer) - size * self.min_count :]
        return tail[size:] == tail[:-size]


STEP_STRIDE = (
    1_000_003  # prime; the seeds of two optimizer steps stay apart while a step makes fewer requests than this
)
MICRO_STEP_STRIDE = 8191  # prime; the same for the micro-steps of one accumulation window
SEED_MASK = 0x7FFF_FFFF  # seeds are non-negative 32-bit integers on every backend


def request_seed(training_seed: int, global_step: int, micro_step: int, index: int) -> int:
    """Return the seed of request `index` (0-based, over all servers) of one micro-step.

    It does not depend on how many servers there are or which one answers.
    """
    return (training_seed + global_step * STEP_STRIDE + micro_step * MICRO_STEP_STRIDE + index) & SEED_MASK


@dataclass(frozen=True)
class SeedPlan:
    """The seeds of requests that are made together: those of one micro-step, or of several in a row.

    micro_step: the first one. sizes: how many of the requests each micro-step has; empty where all are of the first.
    before: how many requests of other processes come before these in each micro-step; empty where there are none.
    """

    training_seed: int
    global_step: int
    micro_step: int
    sizes: tuple[int, ...] = ()
    before: tuple[int, ...] = ()

    @property
    def base(self) -> int:
        """The seed of the first micro-step's first request."""
        return request_seed(self.training_seed + self._others(0), self.global_step, self.micro_step, 0)

    def position(self, index: int) -> tuple[int, int]:
        """Return the micro-step of request `index`, and the request's index in it.

        >>> [SeedPlan(17, 0, 4, sizes=(2, 0, 1)).position(i) for i in range(3)]
        [(4, 0), (4, 1), (6, 0)]
        """
        starts = self._starts
        offset = min(bisect_right(starts, index, lo=1), max(len(self.sizes), 1)) - 1
        return self.micro_step + offset, index - starts[offset]

    def seed(self, index: int) -> int:
        """Return the seed of request `index`; it does not depend on the requests around it."""
        micro_step, own = self.position(index)
        others = self._others(micro_step - self.micro_step)
        return request_seed(self.training_seed + others, self.global_step, micro_step, own)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """The first request of each micro-step, and the number of all."""
        return tuple(accumulate(self.sizes, initial=0))

    def _others(self, offset: int) -> int:
        return self.before[offset] if self.before else 0


UNSYNCED = -1
"""The version of weights that no push of this run has sent."""

FinishReason = Literal["stop", "length", "repetition"]


@dataclass(frozen=True)
class RolloutRequest:
    """One prompt in OpenAI's chat format.

    Image parts are `{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}`. Images travel as they
    are: the server expands them once, and returns the ids.
    adapter: the LoRA adapter that must answer; None = the served weights. images: the names under which this process
    may cache them; None = it does not. bias: what is added to the logits of tokens, by their ids.
    """

    messages: Sequence[Mapping[str, Any]]
    adapter: str | None = None
    images: tuple[str, ...] | None = None
    bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Rollout:
    """One answer.

    prompt_token_ids: the prompt as the server saw it, image placeholders expanded.
    token_ids: the answer as the server returned it, stop token included where it was generated.
    version: the policy version (optimizer step of the last sync) whose weights generated it, or `UNSYNCED`.
    finish_reason: "stop", "length" if it reached the token limit, "repetition" if it was cut for repeating itself.
    decode_mode: "greedy" (sampled answers too), or "beam" for the best of several beams.
    seed, seconds: the seed of its request, and how long it took; None where a backend answers many at once.
    drafted, accepted: tokens that were drafted for it, and those of them that the model accepted.
    verified: how many steps verified a draft, by the number of its tokens that were accepted, from none on.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    server: str
    version: int
    finish_reason: FinishReason
    decode_mode: Literal["greedy", "beam"] = "greedy"
    seed: int | None = None
    seconds: float | None = None
    drafted: int = 0
    accepted: int = 0
    verified: tuple[int, ...] = ()


def share(part: float, whole: float) -> float | None:
    """Return part / whole; None where the whole is 0."""
    return float(part / whole) if whole else None


def draft_figures(*, generated: int, drafted: int, accepted: int) -> dict[str, float | None]:
    """Return what drafts did, from the tokens of answers; an accepted token takes no decode step of its own.

    Both are None where nothing was drafted.
    """
    return {
        "decode_steps_per_token": share(generated - accepted, generated) if drafted else None,
        "draft_acceptance_rate": share(accepted, drafted),
    }


def accepted_by_position(verified: Iterable[Sequence[int]]) -> list[float] | None:
    """Return the share of drafts of which a position and all before it were accepted, from the first position on.

    verified: of each answer, as `Rollout.verified`. None where nothing was drafted. A draft that ends before a position
    counts as not accepted there, as it does to vLLM.

    >>> accepted_by_position([(1, 0, 2), (1, 1)])
    [0.6, 0.4]
    """
    steps = [sum(column) for column in zip_longest(*verified, fillvalue=0)]
    return [sum(steps[position:]) / sum(steps) for position in range(1, len(steps))] if sum(steps) else None


@dataclass(frozen=True)
class DraftCounts:
    """Drafts for answers of one server: the answers' tokens, and `drafted`, `accepted`, `verified` of a `Rollout`."""

    server: str
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    verified: tuple[int, ...] = ()

    @classmethod
    def from_rollout(cls, rollout: Rollout) -> DraftCounts:
        """Return the counts of one answer."""
        tokens = len(rollout.token_ids)
        return cls(rollout.server, tokens, rollout.drafted, rollout.accepted, rollout.verified)

    @classmethod
    def joined(cls, counts: Iterable[DraftCounts]) -> list[DraftCounts]:
        """Return the sums for each server, by its name."""
        servers: dict[str, DraftCounts] = {}
        for one in counts:
            servers[one.server] = one + servers.get(one.server, cls(one.server))
        return [servers[name] for name in sorted(servers)]

    def __add__(self, other: DraftCounts) -> DraftCounts:
        """Return the sums of two counts of the same server."""
        verified = tuple(map(sum, zip_longest(self.verified, other.verified, fillvalue=0)))
        return DraftCounts(
            self.server,
            self.tokens + other.tokens,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            verified,
        )

    def figures(self) -> dict[str, Any]:
        """Return the counts and what they say, as a step's `drafts` has them."""
        return {
            "server": self.server,
            "tokens": self.tokens,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "verified": list(self.verified),
            **draft_figures(generated=self.tokens, drafted=self.drafted, accepted=self.accepted),
            "accepted_by_position": accepted_by_position([self.verified]),
        }


ONE_REQUEST = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY})
"""The statuses by which a server reports that one request is at fault: a prompt too long, an unreadable image."""


@dataclass(frozen=True)
class Refused:
    """The outcome of a request without an answer: it could not be built, or the server refused it.

    Another try would end the same way; other requests are not affected. error: why.
    """

    error: Exception


Outcome = Rollout | Refused

OnRollout = Callable[[int, Outcome], None]
"""Receives a request's index and its outcome as soon as it is known, in any order; a retry repeats it."""


def answers(outcomes: Sequence[Outcome]) -> list[Rollout]:
    """Return the answers to requests. Raises the error of the first one that was refused."""
    found = []
    for one in outcomes:
        if isinstance(one, Refused):
            raise one.error
        found.append(one)
    return found


class ServedBackend(Protocol):
    """A generator over servers, which reports the outcome of each request as soon as it is known."""

    @property
    def base_urls(self) -> tuple[str, ...]:
        """The servers' base URLs, in order."""
        ...

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        seed_plan: SeedPlan,
        version: int | None = None,
        on_rollout: OnRollout | None = None,
        expected: Sequence[int] = (),
    ) -> list[Outcome]:
        """Return the outcome of each request, in order. Raises ServerError.

        expected: the length that each answer is expected to have, in any unit; empty = unknown.
        """
        ...


@dataclass(frozen=True)
class Sampling:
    """The sampling of answers. Temperature 0 is greedy; top_p and top_k are always off (semantics, section 3).

    repetition: the check that cuts answers which repeat themselves; None = no check.
    """

    max_new_tokens: int
    temperature: float = 0.0
    repetition_penalty: float = 1.0
    repetition: RepetitionDetection | None = None

    @classmethod
    def from_config(cls, matching: RolloutMatching) -> Sampling:
        """Take everything from `custom.extra.rollout_matching`."""
        return cls(
            max_new_tokens=matching.max_new_tokens,
            temperature=matching.temperature,
            repetition_penalty=matching.repetition_penalty,
            repetition=RepetitionDetection.from_rules(matching.repeat_terminate),
        )

    def parameters(self) -> dict[str, float | int]:
        """Return the sampling fields that all servers know; generation_config.json must not set one."""
        return {
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "repetition_penalty": self.repetition_penalty,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "n": 1,
        }
