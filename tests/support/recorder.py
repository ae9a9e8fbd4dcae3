"""Somebody on the network between two ends, who passes everything on, keeps what was sent, and may change it."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator


class Recorder:
    """A port of this machine that stands for another one; `heard` is all bytes, of both sides.

    asked: what was sent to that port, by connection.

    change_from: behind so many bytes one of each message is changed.
    """

    def __init__(self, port: int, change_from: int = sys.maxsize) -> None:
        self.heard = bytearray()
        self.asked: list[bytearray] = []
        self._change_from = change_from
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                asking, _ = self._listener.accept()
                threading.Thread(target=self._between, args=(asking,), daemon=True).start()

    def _between(self, asking: socket.socket) -> None:
        with contextlib.suppress(OSError), asking, socket.create_connection(("127.0.0.1", self._target)) as asked:
            back = threading.Thread(target=self._pass_on, args=(asked, asking), daemon=True)
            back.start()
            self.asked.append(bytearray())
            self._pass_on(asking, asked, self.asked[-1])
            back.join()

    def _pass_on(self, source: socket.socket, target: socket.socket, kept: bytearray | None = None) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(2**16)):
                self.heard += data
                if kept is not None:
                    kept += data
                data[len(data) // 2] ^= len(self.heard) > self._change_from
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def recording(port: int, **options: int) -> Iterator[Recorder]:
    """Stand between a port and who asks it, until the end of the block."""
    recorder = Recorder(port, **options)
    try:
        yield recorder
    finally:
        recorder.close()
