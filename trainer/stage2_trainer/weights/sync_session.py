"""One server's part in a sync: the calls that open, carry and close an update, in order, and what it holds after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from stage2_trainer.weights.folder_proof import FolderProof
from stage2_trainer.weights.held_versions import HeldVersions
from stage2_trainer.weights.transfer.protocol import WeightTransfer
from stage2_trainer.wire.background import in_background
from stage2_trainer.wire.chat import CHAT_ROUTE, chat_body
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.rollout import RolloutRequest, Sampling

logger = logging.getLogger(__name__)

FRESH = "default"  # the version of a server that was never given weights
UPDATE_ROUTE = "/update_weights"
RESET_PREFIX_CACHE = "/reset_prefix_cache"
RESET_INTERVAL_S = 0.02
RESET_AFTER_VISION = ("/reset_mm_cache", "/reset_encoder_cache")


class SyncSession:
    """A server, its transfer group, and whether both are fit for an update.

    held: the tensors of full syncs that it holds.
    holds_base: whether its served weights are those of the model directory.
    folder: what its model directory has of the learner's base weights; None = nobody has asked.
    """

    def __init__(self, client: ServerClient, transfer: WeightTransfer) -> None:
        self.client = client
        self.transfer = transfer
        self.held = HeldVersions()
        self.holds_base = False
        self.folder: FolderProof | None = None
        self._connected = False
        self._version: int | None = None
        self._may_have_adapters = True  # of an earlier learner

    def connect(self) -> None:
        """Form the group if there is none, or the server has lost it."""
        if self._connected and self.client.weight_version() != str(self._version):
            logger.warning("server %s lost version %s: it was restarted", self.client.base_url, self._version)
            self.lose()
        if not self._connected:
            self.transfer.connect(self.client)
            self._connected = True
            self.holds_base = self.client.weight_version() == FRESH

    def begin(self) -> None:
        """Stop generation, and open an update."""
        self.client.post("/pause", "pause", query={"mode": "abort", "clear_cache": "false"})
        try:
            self.client.post("/start_weight_update", "start")
        except ServerError as error:
            # A learner that died between start and finish leaves its update open; close it, and open ours.
            logger.warning("%s; closing the update that an earlier learner left open", error)
            self._close_what_is_open()
            self.client.post("/start_weight_update", "start")
            self.holds_base = False

    def receive(self, update_info: dict[str, Any], timeout_s: float) -> Future[Any]:
        """Let the server receive the announced tensors, while they are sent; what is sent ends when it fails."""
        body = self._in_this_group(update_info)
        return in_background(self._let_receive, body, timeout_s, self.transfer.aborter())

    def tell(self, update_info: dict[str, Any], phase: str) -> None:
        """Tell an open update something that no tensors follow. Raises ServerError."""
        self.client.post(UPDATE_ROUTE, phase, body=self._in_this_group(update_info))

    def finish(self, version: int, *, vision_moved: bool) -> None:
        """Close the update under its version, drop what was cached from older weights, and let generation go on."""
        self.client.post("/finish_weight_update", "finish", body={"weight_version": str(version)})
        self._reset_prefix_cache()
        for route in RESET_AFTER_VISION if vision_moved else ():
            self.client.post(route, "reset caches")
        self.client.post("/resume", "resume")
        found = self.client.weight_version()
        if found != str(version):
            raise ServerError(self.client.base_url, "confirm", f"reports weight version {found!r} instead of {version}")
        self._version = version

    def _close_what_is_open(self) -> None:
        """Close an update, unless what had opened it has done so meanwhile."""
        try:
            self.client.post("/finish_weight_update", "start")
        except ServerError as error:
            if error.status is None:
                raise

    def _reset_prefix_cache(self) -> None:
        """Drop the attention cache of older weights; vLLM keeps it while a request that was aborted still holds it."""
        deadline = time.monotonic() + self.client.timeout_s
        while self.client.post(RESET_PREFIX_CACHE, "reset caches").get("success") is not True:
            if time.monotonic() > deadline:
                detail = (
                    f"POST {RESET_PREFIX_CACHE} did not succeed within {self.client.timeout_s:g} s: requests of another"
                    " client hold the cache, and answers would come from older weights; let nobody else ask this server"
                )
                raise ServerError(self.client.base_url, "reset caches", detail)
            time.sleep(RESET_INTERVAL_S)

    def use_adapter(self, name: str) -> None:
        """Let the server load the adapter that it was sent, by asking it for one token, and drop all others."""
        self._may_have_adapters = True
        request = RolloutRequest(messages=[{"role": "user", "content": "."}], adapter=name)
        self.client.post(CHAT_ROUTE, "load adapter", body=chat_body(request, Sampling(max_new_tokens=1), seed=0))
        self.drop_adapters(keep=name)

    def drop_adapters(self, *, keep: str | None = None) -> None:
        """Let the server forget every adapter but one; an earlier learner may have left some."""
        if not self._may_have_adapters:
            return
        for name in self.client.adapters():
            if name != keep:
                self.client.unload_adapter(name)
        self._may_have_adapters = keep is not None

    def _in_this_group(self, update_info: dict[str, Any]) -> dict[str, Any]:
        return {"update_info": {**update_info, "group": self.transfer.group}}

    def _let_receive(self, body: dict[str, Any], timeout_s: float, abort: Callable[[], None]) -> None:
        try:
            self.client.post(UPDATE_ROUTE, "push", body=body, timeout_s=timeout_s)
        except BaseException:
            abort()  # the group of this update: by now there may be another one
            raise

    def lose(self) -> None:
        """Give the group up: the next update forms a new one, and trusts nothing that the server has."""
        self.transfer.disconnect()
        self.held.forget()
        self.holds_base = False
        self.folder = None
        self._connected = False
        self._version = None
        self._may_have_adapters = True

    def close(self) -> None:
        """Leave the group and close the connections."""
        self.transfer.close()
        self.client.close()
