"""So many rollout servers in one process, for benchmarks of the learner's side: they answer at once and keep nothing.

    python -m bench.many_sinks MODEL PORT...

Each port is a server with the routes of an update, over TLS where the environment names a certificate. Its worker
proves itself as any does. What it is sent is decrypted and dropped (without TLS it ends in the kernel: MSG_TRUNC):
neither merged, nor checked, as that is the work of other machines. Digests of the model folder are computed once for
all. GET /spent, of any of them, says what all have cost so far.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import sys
import time
from collections.abc import Mapping
from typing import Any

from stage2_trainer.sync.tensors.announcement import FOLDER_ROUTE, bucket_bytes, from_wire, plan_buckets
from stage2_trainer.sync.tensors.model_folder import folder_digests
from stage2_trainer.sync.transports.link import GroupInfo, dial
from stage2_trainer.wire.credentials import own_certificate, read_token
from stage2_trainer.wire.requests import POLICY_MODEL

HOST = "127.0.0.1"
SPENT_ROUTE = "/spent"
AT_ONCE = 4 * 2**20
CONNECTIONS = 1024


class Folder:
    """The model folder that all servers have, and how many requests they have answered."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._digests: dict[str, str] = {}
        self.requests = 0

    def digests(self, tensors: list[tuple[str, str]]) -> dict[str, str]:
        """Return the digests of tensors."""
        if any(name not in self._digests for name, _ in tensors):
            self._digests |= folder_digests(self._path, tensors)
        return {name: self._digests[name] for name, _ in tensors}


class ManySinks:
    """One server of many. Its routes answer what vLLM's do, as far as a learner reads the answer."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._version = "default"
        self._link = socket.socket()
        self._flags = 0
        self._bucket_bytes = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one call, and close."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        _, path, _ = head.split(" ", 2)
        length = next((int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length")), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        answer = json.dumps(await self._answer(path.partition("?")[0], body)).encode()
        self._folder.requests += path != SPENT_ROUTE
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
        await writer.drain()
        writer.close()

    async def _answer(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        match path:
            case "/get_world_size":
                return {"world_size": 1}
            case "/weight_info":
                return {"weight_version": self._version}
            case "/v1/models":
                return {"data": [{"id": POLICY_MODEL}]}
            case "/init_weight_transfer_engine":
                await asyncio.to_thread(self._join, GroupInfo(**body["init_info"]))
            case "/update_weights":
                if body["update_info"]["names"]:
                    await self._drain(body["update_info"])
            case "/finish_weight_update":
                self._version = body["weight_version"]
            case _ if path == FOLDER_ROUTE:
                return {"digests": await asyncio.to_thread(self._folder.digests, body["tensors"])}
            case _ if path == SPENT_ROUTE:
                return {"cpu_s": time.process_time(), "requests": self._folder.requests}
        return {"success": True}

    def _join(self, info: GroupInfo) -> None:
        self._link.close()
        certificate = own_certificate(os.environ) if info.certificate else None
        self._link = dial(info, info.rank_offset, token=read_token(os.environ), certificate=certificate)._socket
        self._link.setblocking(False)
        self._flags = 0 if info.certificate else int(socket.MSG_TRUNC)
        self._bucket_bytes = info.packed_buffer_size_bytes

    async def _drain(self, info: Mapping[str, Any]) -> None:
        metas = from_wire(info["names"], info["dtype_names"], info["shapes"])
        left = sum(bucket_bytes(bucket) for bucket in plan_buckets(metas, self._bucket_bytes))
        while left:
            try:
                left -= self._link.recv_into(NOTHING, min(left, AT_ONCE), self._flags)
            except (BlockingIOError, ssl.SSLWantReadError):
                await self._readable()

    async def _readable(self) -> None:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._link, ready.set)
        await ready.wait()
        loop.remove_reader(self._link)


NOTHING = bytearray(AT_ONCE)


async def main(model: str, *ports: str) -> None:
    """Serve until terminated."""
    folder, certificate = Folder(model), own_certificate(os.environ)
    options: dict[str, Any] = {"backlog": CONNECTIONS, "ssl": certificate and certificate.context()}
    started = [await asyncio.start_server(ManySinks(folder).serve, HOST, int(port), **options) for port in ports]
    await asyncio.gather(*(one.serve_forever() for one in started))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
