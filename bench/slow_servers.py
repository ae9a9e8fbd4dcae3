"""Rollout servers that take as long as an 8B on an H100: `python -m bench.slow_servers COUNT`; prints their ports.

They speak the chat route as vLLM does, over TLS where the environment names a certificate, and generate nothing.
Answers share each server as a continuous batch does: the prompts that come are read first, then all running answers
grow by a token together, at most `MAX_RUNNING` at once. All time is divided by `SCALE`, which the environment may set.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import os
import random
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import log
from time import perf_counter
from typing import Any

from stage2_trainer.wire.credentials import own_certificate

SCALE_VARIABLE = "BENCH_SCALE"
SCALE = float(os.environ.get(SCALE_VARIABLE, "8"))
PROMPT_TOKENS = 1_100
PREFILL_TOKENS_PER_S = 25_000.0
STEP_S, STEP_S_PER_ANSWER = 7e-3, 6e-5  # a decode step: reading the weights, and each answer's cache
MEAN_TOKENS, SIGMA = 1_200.0, 0.6
LOOPS = 0.02
MAX_RUNNING = 256
MOST_TOKENS = 8_192


def answer_tokens(seed: int, most: int, *, cut_at: int | None) -> tuple[int, str]:
    """Return how long the answer to a seed is, and why it ends; `cut_at`: tokens after which a loop is found."""
    draws = random.Random(seed)
    length = max(1, int(draws.lognormvariate(log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA)))
    if draws.random() < LOOPS:
        return (most, "length") if cut_at is None else (min(length + cut_at, most), "repetition")
    return (length, "stop") if length < most else (most, "length")


@dataclass
class Batch:
    """The answers that one server works on, advanced in time: seconds of the model, not of the clock."""

    at_once: int = MAX_RUNNING
    reading_s: float = 0.0
    grown: float = 0.0  # tokens by which each running answer has grown since the start
    running: list[tuple[float, int]] = field(default_factory=list)  # by `grown` at its end, and its number
    queue: list[tuple[int, int]] = field(default_factory=list)

    def add(self, number: int, tokens: int) -> None:
        """Take an answer of so many tokens."""
        self.queue.append((number, tokens))
        self._admit()

    def until_next(self) -> float | None:
        """Return the seconds to the next end of an answer; None where nothing runs."""
        if not self.running:
            return None
        return self.reading_s + (self.running[0][0] - self.grown) * self._token_s()

    def advance(self, seconds: float) -> list[int]:
        """Let so many seconds pass, no more than to the next end; return the answers that are done."""
        read = min(seconds, self.reading_s)
        self.reading_s -= read
        if self.running:
            self.grown += (seconds - read) / self._token_s()
        done = []
        while self.running and self.running[0][0] <= self.grown + 1e-6:
            done.append(heapq.heappop(self.running)[1])
        self._admit()
        return done

    def _token_s(self) -> float:
        return STEP_S + STEP_S_PER_ANSWER * len(self.running)

    def _admit(self) -> None:
        while self.queue and len(self.running) < self.at_once:
            number, tokens = self.queue.pop(0)
            self.reading_s += PROMPT_TOKENS / PREFILL_TOKENS_PER_S
            heapq.heappush(self.running, (self.grown + tokens, number))


def arrivals(lengths: Sequence[int], at_once: int = MAX_RUNNING) -> list[float]:
    """Return when a server has each of these answers, all requested at once and begun in order, in seconds."""
    batch, now = Batch(at_once), 0.0
    found = [0.0] * len(lengths)
    for number, tokens in enumerate(lengths):
        batch.add(number, tokens)
    while (seconds := batch.until_next()) is not None:
        now += seconds
        for number in batch.advance(seconds):
            found[number] = now
    return found


@dataclass
class Shared:
    """What all servers of this process share: the version of their weights, and the requests that they have received.

    A push that takes its time tells one server the version. chats: the requests for answers among them.
    """

    version: int = 0
    requests: int = 0
    chats: int = 0


class SlowServer:
    """One server: a batch, and the requests that wait for its answers."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._batch = Batch()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._new: list[tuple[int, int]] = []
        self._came = asyncio.Event()
        self._numbers = itertools.count()

    async def work(self) -> None:
        """Advance the batch with the clock, forever."""
        last = perf_counter()
        while True:
            seconds = self._batch.until_next()
            timeout = None if seconds is None else seconds / SCALE
            with suppress(TimeoutError):
                await asyncio.wait_for(self._came.wait(), timeout)
            self._came.clear()
            now = perf_counter()
            self._pass((now - last) * SCALE)
            last = now
            for number, tokens in self._new:
                self._batch.add(number, tokens)
            self._new.clear()

    def _pass(self, seconds: float) -> None:
        while seconds > 0:
            step = min(seconds, self._batch.until_next() or seconds)
            for number in self._batch.advance(step):
                self._waiting.pop(number).set_result(None)
            seconds -= step

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                fields = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                if head.startswith(b"PUT"):
                    self._shared.version = int(body)
                self._shared.requests += 1
                self._shared.chats += head.startswith(b"POST")
                answer = await self._chat(json.loads(body)) if head.startswith(b"POST") else self._weights()
                content = json.dumps(answer).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _weights(self) -> dict[str, Any]:
        return {"weight_version": str(self._shared.version), **asdict(self._shared)}

    async def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        loops = body.get("repetition_detection")
        cut_at = loops["max_pattern_size"] * loops["min_count"] if loops else None
        tokens, reason = answer_tokens(body["seed"], body["max_tokens"], cut_at=cut_at)
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._new.append((number, tokens))
        self._came.set()
        await self._waiting[number]
        choice = {"message": {"content": ""}, "token_ids": [0] * tokens, "finish_reason": reason}
        return {"object": "chat.completion", "prompt_token_ids": [0] * PROMPT_TOKENS, "choices": [choice]}


async def main(count: int) -> None:
    """Serve forever, each server on its own port; the first line of output lists the ports."""
    certificate, shared = own_certificate(os.environ), Shared()
    context = certificate and certificate.context()
    servers = [SlowServer(shared) for _ in range(count)]
    listening = [await asyncio.start_server(one.serve, "127.0.0.1", 0, backlog=1024, ssl=context) for one in servers]
    sys.stdout.write(" ".join(str(one.sockets[0].getsockname()[1]) for one in listening) + "\n")
    sys.stdout.flush()
    await asyncio.gather(*(server.work() for server in servers))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
