"""The deliveries of a push: each server has a thread that sends it every bucket, and all share a few slots.

A slot is filled again once every server has been sent what it holds. So memory is that of the slots, however many
servers there are, and a server that takes nothing holds the others up for no longer than its own deadline: then it is
given up, and what it held is free.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

from stage2_trainer.sync.fleet.sync_session import SyncSession
from stage2_trainer.sync.tensors.packing import Slot
from stage2_trainer.sync.transports.buckets import TensorMeta
from stage2_trainer.sync.transports.protocol import Packed
from stage2_trainer.wire.background import in_background
from stage2_trainer.wire.errors import LinkError, ServerError

ANSWER_GRACE_S = 5.0  # for a server to say itself why its link broke


class SlotPool:
    """The slots of a push: so many buckets are held at a time."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in slots:
            self._free.put(slot)

    def take(self) -> Slot:
        """Return a slot that nobody is sent; waits for one."""
        return self._free.get()

    def give_back(self, slot: Slot) -> None:
        """Take a slot that nobody is sent any more."""
        self._free.put(slot)


class Parcel:
    """A packed bucket on its way to several servers.

    slot: the one of `pool` that it lies in. readers: how many servers it is sent to.
    """

    def __init__(self, bucket: Sequence[TensorMeta], packed: Packed, pool: SlotPool, slot: Slot, readers: int) -> None:
        self.packed: Packed | None = packed
        self.what = f"tensors {bucket[0].name} to {bucket[-1].name}"
        self._pool = pool
        self._slot = slot
        self._readers = readers
        self._lock = threading.Lock()

    def release(self) -> None:
        """Note that one server is done with it; after the last one the slot is free."""
        with self._lock:
            self._readers -= 1
            if self._readers:
                return
        self.packed = None
        self._pool.give_back(self._slot)


class Delivery:
    """One server's part in a push: it is announced at once, then sent parcel by parcel.

    announcement: JSON text. timeout_s: seconds that the server may take for all of it.
    """

    def __init__(self, session: SyncSession, announcement: str, timeout_s: float) -> None:
        self.session = session
        self.failure: LinkError | None = None
        self.sent_at = 0.0
        self._call = session.receive(announcement, timeout_s)
        self._parcels: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._sending = in_background(self._send_all)

    def put(self, parcel: Parcel) -> None:
        """Send a parcel after those before it."""
        self._parcels.put(parcel)

    def close(self) -> None:
        """Note that there are no more parcels."""
        self._parcels.put(None)

    def wait(self) -> None:
        """Wait until everything is sent, or given up."""
        self._sending.result()

    def confirm(self, timeout_s: float) -> None:
        """Wait until the server says that it has taken everything, `timeout_s` after it was sent the last of it.

        Raises:
            ServerError: it has not. What the server says itself comes first: it tells more than a broken link.
        """
        self.wait()
        patience = ANSWER_GRACE_S if self.failure else max(0.0, self.sent_at + timeout_s - time.monotonic())
        try:
            self._call.result(timeout=patience)
        except TimeoutError as error:
            late = f"all tensors sent, but not confirmed within {timeout_s:g} s"
            raise ServerError(self.session.client.base_url, "push", str(self.failure or late)) from error
        if self.failure is not None:
            raise ServerError(self.session.client.base_url, "push", str(self.failure)) from self.failure

    def _send_all(self) -> None:
        while parcel := self._parcels.get():
            try:
                if self.failure is None and parcel.packed is not None:
                    self.session.transfer.send(parcel.packed)
            except Exception as error:  # noqa: BLE001  # raised by `confirm`; slots must go back in any case
                self.failure = LinkError(f"{parcel.what}: {error}")
            finally:
                parcel.release()
        self.sent_at = time.monotonic()
