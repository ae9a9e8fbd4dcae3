"""The store in which the workers of a `swift rollout` server and its learner meet, read without unpickling.

It is vLLM's StatelessProcessGroup, a TCPStore that authenticates nobody: whoever reaches its port may write a key
before the server does. Members unpickle what lies there, and a pickle can run anything. Just two things are ever sent
in it, NCCL's id and the name of a barrier; the pickle of each is the same bytes every time but for what it tells, so it
is compared with these bytes, and nothing else is read. Source: vllm/distributed/utils.py, vLLM 0.32.
"""

from __future__ import annotations

import re
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from stage2_trainer.sync.transports.nccl_group import UNIQUE_ID_BYTES

FIRST_WORKER = 0  # holds the store, and makes what is sent
_START = rb"\x80[\x04\x05]\x95%b\x00{7}"  # protocol 4 of Python to 3.13, 5 from 3.14 on; the length of the one frame
UNIQUE_ID = re.compile(
    _START % re.escape(b"\xec")
    + re.escape(b"\x8c\x07_ctypes\x94\x8c\x09_unpickle\x94\x93\x94")
    + re.escape(b"\x8c\x34vllm.distributed.device_communicators.pynccl_wrapper\x94\x8c\x0cncclUniqueId\x94\x93\x94")
    + re.escape(b"}\x94C\x80")
    + rb"(?P<told>.{%d})" % UNIQUE_ID_BYTES
    + re.escape(b"\x94\x86\x94\x86\x94R\x94."),
    re.DOTALL,
)
BARRIER = re.compile(_START % re.escape(b"\x30") + re.escape(b"\x8c\x2c") + rb"(?P<told>barrier_[0-9a-f-]{36})\x94\.")


class SwiftStore:
    """The learner's place in the store. timeout_s: seconds that joining it, and the id, may take.

    Raises:
        RuntimeError: nobody holds a store there, or not all members came.
    """

    def __init__(self, host: str, port: int, *, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._read = 0
        patience = timedelta(seconds=timeout_s)
        self._store = TCPStore(host, port, world_size, is_master=False, timeout=patience, use_libuv=False)

    def unique_id(self) -> bytes:
        """Return NCCL's id of the group. Raises RuntimeError where there is none in time, or something else."""
        return self._told(UNIQUE_ID, "NCCL's id", self._timeout_s)

    def meet(self, timeout_s: float) -> None:
        """Wait until all members are at the next barrier. Raises RuntimeError as `unique_id`."""
        barrier = self._told(BARRIER, "the name of a barrier", timeout_s).decode()
        self._store.set(f"arrival_{barrier}_{self._rank}", "1")
        arrivals = [f"arrival_{barrier}_{rank}" for rank in range(self._world_size)]
        self._store.wait(arrivals, timedelta(seconds=timeout_s))
        self._store.set(f"departure_{barrier}_{self._rank}", "1")

    def _told(self, form: re.Pattern[bytes], what: str, timeout_s: float) -> bytes:
        """Return the next thing that the first worker has sent to all."""
        key = f"broadcast_from/{FIRST_WORKER}/{self._read}"
        self._store.wait([key], timedelta(seconds=timeout_s))
        found = form.fullmatch(self._store.get(key))
        if found is None:
            raise RuntimeError(
                f"{key} of the server's store is not {what}, and was not read: a stranger has written it, or the server"
                " runs another version of vLLM"
            )
        self._read += 1
        return found["told"]
