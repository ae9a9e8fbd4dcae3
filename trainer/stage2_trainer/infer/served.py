"""Answers from a server with OpenAI's chat API, such as a rollout server or `vllm serve`."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from stage2_api.errors import refused
from stage2_api.pod.layout import TOKEN_FILE_VARIABLE
from stage2_trainer.data.question import Question
from stage2_trainer.matching.closing import LONGER, closing_bias
from stage2_trainer.wire.chat import bias_fields
from stage2_trainer.wire.credentials import explain_tls_error, read_token, trust

ANSWER_S, OTHERS_S = 600, 30
"""Seconds in which a server must answer a chat, and anything else."""
LONGEST = 64 << 20  # bytes of an answer's document
CHAT, MODELS, TOKENIZE = "/v1/chat/completions", "/v1/models", "/tokenize"


class Server:
    """A server by its URL. environment: STAGE2_TOKEN_FILE names the file of its token, if it asks for one.

    longer: the bias against closing the list, in nats; None = none. It travels with each request, as `logit_bias`.

    Raises ConfigError if it does not answer.
    """

    def __init__(self, url: str, environment: Mapping[str, str], *, longer: float | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._environment = environment
        self._context = trust(self._url, environment)
        token = read_token(environment) if environment.get(TOKEN_FILE_VARIABLE) else ""
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._model = str(self._entries(self._ask(MODELS, None, OTHERS_S), "data")[0]["id"])
        self._bias = closing_bias(self._encode, longer) if longer is not None else {}

    def answer(self, question: Question, image: str) -> tuple[str, str]:
        """Return the text of an answer, and why it ended."""
        (answer,) = self._chat(question, image, {"temperature": 0.0})
        return answer

    def samples(self, question: Question, image: str, count: int) -> list[tuple[str, str]]:
        """Return as many answers, sampled at temperature 1; the same ones each time, where the server keeps seeds."""
        return self._chat(question, image, {"temperature": 1.0, "n": count, "seed": 0})

    def _chat(self, question: Question, image: str, sampling: Mapping[str, float]) -> list[tuple[str, str]]:
        body = {
            "model": self._model,
            "messages": question.messages(image),
            "max_tokens": question.max_new_tokens,
            **sampling,
            **bias_fields(self._bias),
        }
        if limits := question.pixel_limits():
            body["mm_processor_kwargs"] = limits
        choices = self._entries(self._ask(CHAT, body, ANSWER_S), "choices")
        return [(str(one["message"]["content"] or ""), str(one["finish_reason"])) for one in choices]

    def _encode(self, text: str) -> list[int]:
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        tokens = self._ask(TOKENIZE, body, OTHERS_S).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(one, int) for one in tokens):
            raise self._refused(f"{TOKENIZE} returned no tokens, which {LONGER} needs")
        return tokens

    def _entries(self, reply: Any, key: str) -> list[dict[str, Any]]:
        """Return the entries of a list in a reply. Raises ConfigError where there is none."""
        entries = reply.get(key) if isinstance(reply, dict) else None
        if not isinstance(entries, list) or not entries or not all(isinstance(one, dict) for one in entries):
            raise self._refused(f"its reply has no {key}")
        return entries

    def _ask(self, route: str, body: object, timeout_s: float) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": "application/json"}
        request = urllib.request.Request(self._url + route, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s, context=self._context) as reply:
                found: dict[str, Any] = json.loads(reply.read(LONGEST))
                return found
        except urllib.error.HTTPError as error:
            raise self._refused(f"{error.code} {error.reason}: {error.read(300).decode(errors='replace')}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._refused(explain_tls_error(error, self._url, self._environment) or str(error)) from error

    def _refused(self, why: str) -> Exception:
        way_out = f"start one with `vllm serve MODEL`, or name the file of its token in {TOKEN_FILE_VARIABLE}"
        return refused("MODEL", self._url, f"must be the URL of a server that answers {CHAT} ({why})", way_out)
