"""A server's port under floods by clients without the token: uvicorn as vLLM sets it up against the same with bounds.

Each flood runs for FLOOD_S seconds against a server of its own, over TLS, while another process asks /health, each time
over a new connection. Memory is the most that the server's process held, above what it held before. `COST` compares
what it takes to answer 256 requests at once.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvicorn
from bench.tables import Row, Table

from stage2_controller.job import credentials
from stage2_trainer.serve.bounded_http import BoundedConfig
from stage2_trainer.serve.guard import TokenGuard
from stage2_trainer.sync.vllm.routes import read_body, send_json

FLOOD_S = 8.0
PROBE_S = 0.2
PATIENCE_S = 5.0  # of one attempt at /health
RECOVERY_S = 30.0
MOST_MB = 1000.0  # more memory ends a flood: without bounds it took all that the machine had
MOST_OPEN = 3000
HOST, TOKEN = "127.0.0.1", "a-token-of-some-length"
HEAD = b"POST /v1/models HTTP/1.1\r\nHost: h\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
PLAIN_HEALTH = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
AT_ONCE, ROUNDS, BODY, ANSWER = 256, 4, 100_000, "x" * 10_000
SETTINGS: dict[str, Callable[..., uvicorn.Config]] = {
    "bounds": BoundedConfig,
    "uvicorn": uvicorn.Config,
    "h11": lambda app, **options: uvicorn.Config(app, http="h11", **options),
}
Connect = Callable[[], socket.socket]


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Read a request's body, and answer."""
    await read_body(receive)
    await send_json(send, 200, ANSWER if scope["path"] != "/health" else "")


def serve(settings: str, folder: str) -> None:
    """Serve until terminated, over TLS."""
    tls = {"ssl_certfile": f"{folder}/rollout.crt", "ssl_keyfile": f"{folder}/rollout.key"}
    os.environ["STAGE2_TOKEN_FILE"] = f"{folder}/token"
    config = SETTINGS[settings](TokenGuard(app), host=HOST, port=0, log_level="error", lifespan="off", **tls)
    config.load()
    listening = config.bind_socket()
    Path(f"{folder}/port.new").write_text(str(listening.getsockname()[1]))
    os.replace(f"{folder}/port.new", f"{folder}/port")
    uvicorn.Server(config).run(sockets=[listening])


@contextlib.contextmanager
def served(settings: str) -> Iterator[tuple[int, int]]:
    """A server's process, as its id and its port."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in credentials.new({"rollout": ("localhost",)}, datetime.now(UTC)).items():
            (folder / file).write_text(text)
        (folder / "token").write_text(TOKEN)
        process = multiprocessing.get_context("fork").Process(target=serve, args=(settings, name), daemon=True)
        process.start()
        try:
            while not (folder / "port").exists():
                time.sleep(0.05)
            port = int((folder / "port").read_text())
            healthy_after(port)
            yield int(process.pid or 0), port
        finally:
            process.kill()
            process.join()


def client_of(port: int, *, tls: bool = True) -> Connect:
    """Return what connects to a port."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    def connect() -> socket.socket:
        plain = socket.create_connection((HOST, port), timeout=PATIENCE_S)
        return context.wrap_socket(plain) if tls else plain

    return connect


def endless(start: bytes, again: bytes) -> Callable[[int], None]:
    """Return a flood of a few clients that send without end."""

    def flood(port: int) -> None:
        connect, part = client_of(port), again * (60_000 // len(again))

        def send_on() -> None:
            while True:
                with contextlib.suppress(OSError), contextlib.closing(connect()) as connection:
                    connection.sendall(start)
                    while True:
                        connection.sendall(part)

        with ThreadPoolExecutor(4) as pool:
            for _ in range(4):
                pool.submit(send_on)

    return flood


def many(start: bytes, again: bytes, *, tls: bool = True) -> Callable[[int], None]:
    """Return a flood of many clients, each of which begins, and sends a little more now and then."""

    def flood(port: int) -> None:
        connect = client_of(port, tls=tls)
        waiting: list[socket.socket] = []
        for turn in itertools.count():
            with contextlib.suppress(OSError):
                connection = connect()
                connection.sendall(start)
                waiting.append(connection)
            if again and waiting:
                with contextlib.suppress(OSError):
                    waiting[turn % len(waiting)].sendall(again)
            if len(waiting) > MOST_OPEN:
                waiting.pop(0).close()

    return flood


FLOODS: dict[str, Callable[[int], None]] = {
    "headers without end": endless(HEAD, b"x: y\r\n"),
    "a request line without end": endless(b"GET /", b"a"),
    "TLS handshakes that never end": many(b"\x16", b"", tls=False),
    "idle connections": many(b"", b""),
    "headers, slowly": many(HEAD, b"x: y\r\n"),
    "a body, slowly": many(HEAD + b"Content-Length: 1000000\r\n\r\n", b"x"),
    "requests without the token, pipelined": endless(HEAD + b"Content-Length: 0\r\n\r\n", PLAIN_HEALTH),
}


def healthy_after(port: int) -> tuple[float, int]:
    """Return the seconds until /health answers over a new connection, and how many attempts failed; RECOVERY_S = never.

    An attempt fails if its connection is cut off, or after PATIENCE_S.
    """
    began, failed = time.perf_counter(), 0
    while (seconds := time.perf_counter() - began) < RECOVERY_S:
        with contextlib.suppress(OSError), contextlib.closing(client_of(port)()) as connection:
            connection.sendall(HEALTH)
            if connection.recv(65536).startswith(b"HTTP/1.1 200"):
                return time.perf_counter() - began, failed
        failed += 1
    return seconds, failed


def flooded(settings: str, flood: str) -> str:
    """Return three cells: memory in MB, the slowest /health in seconds, and how many attempts of all failed."""
    with served(settings) as (pid, port):
        before = memory_mb(pid, "VmRSS")
        stranger = multiprocessing.get_context("fork").Process(target=FLOODS[flood], args=(port,), daemon=True)
        stranger.start()
        end = time.monotonic() + FLOOD_S

        def watch() -> bool:
            while time.monotonic() < end and (is_small := memory_mb(pid, "VmRSS") - before < MOST_MB):
                time.sleep(0.02)
            stranger.kill()
            return is_small

        with ThreadPoolExecutor(1) as pool:
            is_small = pool.submit(watch)
            slowest, asked, failed = 0.0, 0, 0
            while not is_small.done():
                seconds, times = healthy_after(port)
                slowest, asked, failed = max(slowest, seconds), asked + 1, failed + times
                time.sleep(PROBE_S)
        most = memory_mb(pid, "VmHWM") - before
        stranger.join()
        memory = f"{most:.0f}" if is_small.result() else f"more than {MOST_MB:.0f}"
        return f"{memory} | {slowest:.2f} | {failed} of {asked + failed}"


def memory_mb(pid: int, key: str) -> float:
    """Return a figure of a process's memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) / 1000


class Floods:
    """The table of floods."""

    def lines(self) -> Iterator[str]:
        """Yield the table's lines."""
        yield "\n## Floods by clients without the token, over TLS\n\n"
        yield "| flood | memory MB | slowest /health s | attempts failed | uvicorn: memory MB | slowest s | failed |\n"
        yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        for name in FLOODS:
            yield f"| {name} | {flooded('bounds', name)} | {flooded('uvicorn', name)} |\n"


def answers(port: int) -> None:
    """Ask for AT_ONCE answers at once, ROUNDS times, over connections that stay open."""
    import asyncio

    import aiohttp

    async def ask() -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        connector = aiohttp.TCPConnector(ssl=False, limit=0)
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

            async def one() -> None:
                async with session.post(f"https://{HOST}:{port}/v1/models", data=b"x" * BODY) as answer:
                    assert answer.status == 200
                    await answer.read()

            for _ in range(ROUNDS):
                await asyncio.gather(*(one() for _ in range(AT_ONCE)))

    asyncio.run(ask())


def cost(settings: str) -> float:
    """Return the least processor time of a server for AT_ONCE answers."""
    times = []
    for _ in range(2):
        with served(settings) as (pid, port):
            before = processor_s(pid)
            client = multiprocessing.get_context("spawn").Process(target=answers, args=(port,))
            client.start()
            client.join()
            if client.exitcode:
                sys.exit(f"the client of {settings} failed")
            times.append((processor_s(pid) - before) / ROUNDS)
    return min(times)


def processor_s(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rows() -> Iterator[Row]:
    """Compare the processor time of answers."""
    ours = cost("bounds")
    what = f"{AT_ONCE} answers at once, {BODY // 1000} kB each to the server, over TLS"
    for name, peer in (("uvicorn", "uvicorn with httptools"), ("h11", "uvicorn with h11")):
        yield Row(what, peer, ours, cost(name))


FLOODED = Floods()
COST = Table("Processor time of a server", "ms", 1000, rows)
