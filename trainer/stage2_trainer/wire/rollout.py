"""The interface of a rollout backend: requests in, token ids out, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal, Protocol

from stage2_api.rollout_matching import RolloutMatching
from stage2_trainer.wire.repetition import RepetitionDetection
from stage2_trainer.wire.seeds import SeedPlan

FinishReason = Literal["stop", "length", "repetition"]


@dataclass(frozen=True)
class FurtherAnswers:
    """Answers to a prompt beside the one that counts: how many, sampled at which temperature (above 0)."""

    count: int
    temperature: float

    @classmethod
    def from_config(cls, matching: RolloutMatching) -> FurtherAnswers | None:
        """Take them from `recovery`; None where it makes none."""
        recovery = matching.recovery
        return cls(recovery.rollouts - 1, recovery.temperature) if recovery.rollouts > 1 else None


@dataclass(frozen=True)
class RolloutRequest:
    """One prompt in OpenAI's chat format.

    Image parts are `{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}`. Images travel as they
    are: the server expands them once, and says to which ids. `adapter` names the LoRA adapter that must answer; None
    means the served weights as they are. images: their names, by which this process may hold them; None = it does not.
    further: answers that are wanted beside the one that counts; None = none.
    """

    messages: Sequence[Mapping[str, Any]]
    adapter: str | None = None
    images: tuple[str, ...] | None = None
    further: FurtherAnswers | None = None


@dataclass(frozen=True)
class Rollout:
    """One answer.

    prompt_token_ids: the prompt as the server saw it, image placeholders expanded.
    token_ids: the answer as the server returned it, stop token included where it was generated.
    version: the policy version (optimizer step of the last sync) whose weights generated it.
    finish_reason: "stop", "length" where it was cut at the most tokens, "repetition" where it repeated itself and was
    ended for it.
    decode_mode: "greedy" (sampled answers too), or "beam" for the best of several beams.
    seed, seconds: what its request was drawn with, and how long it took; None where a backend answers many at once.
    further: the ids of the further answers to the prompt that were asked for, in the order of their seeds.
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
    further: tuple[tuple[int, ...], ...] = ()


ONE_REQUEST = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY})
"""What a server answers where one request is at fault: a prompt too long for it, an image that it does not take."""


@dataclass(frozen=True)
class Refused:
    """What came of one request in the place of an answer: it could not be made, or the server did not take it.

    Another try would end so again, and it says nothing of other requests. error: says why.
    """

    error: Exception


Outcome = Rollout | Refused

OnRollout = Callable[[int, Outcome], None]
"""Takes a request's index and what came of it as soon as that is there, in any order; a repeated try repeats it."""


def answers(outcomes: Sequence[Outcome]) -> list[Rollout]:
    """Return the answers to requests none of which was refused. Raises the error of the first that was."""
    found = []
    for one in outcomes:
        if isinstance(one, Refused):
            raise one.error
        found.append(one)
    return found


class Backend(Protocol):
    """A generator of one rollout for each request that it takes, in request order."""

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        seed_plan: SeedPlan,
        version: int | None = None,
    ) -> Sequence[Outcome]:
        """Return what came of each request, in order.

        With `version`, a rollout that another policy version made is refused with an error.
        """
        ...


class ServedBackend(Protocol):
    """A generator over servers, which says of each request what came of it as soon as that is known."""

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
    ) -> list[Outcome]:
        """Return what came of each request, in order. Raises ServerError."""
        ...


@dataclass(frozen=True)
class Sampling:
    """The sampling of answers. Temperature 0 is greedy; top_p and top_k are always off (semantics, section 3).

    repetition: the check that ends answers which repeat themselves; None = no such end.
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
        """Return the sampling fields that all servers know: no default of generation_config.json shall get in."""
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
