"""Somebody on the network between learner and server, who passes everything on and keeps what was sent."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Recorder:
    """A port of this machine that stands for another one; `heard` is all bytes, of both sides."""

    def __init__(self, port: int) -> None:
        self.heard = bytearray()
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
            self._pass_on(asking, asked)
            back.join()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                self.heard += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def recording(port: int) -> Iterator[Recorder]:
    """Stand between a port and who asks it, until the end of the block."""
    recorder = Recorder(port)
    try:
        yield recorder
    finally:
        recorder.close()
