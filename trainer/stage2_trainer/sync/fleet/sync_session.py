"""One server's part in a sync: the calls that open, carry and close an update, in order, and what it holds after it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from stage2_trainer.sync.fleet.held_versions import HeldVersions
from stage2_trainer.sync.tensors.folder_proof import FolderProof
from stage2_trainer.sync.transports.protocol import WeightTransfer
from stage2_trainer.wire.background import in_background
from stage2_trainer.wire.calls import Call
from stage2_trainer.wire.chat import CHAT_ROUTE, chat_body
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import RolloutRequest, Sampling

logger = logging.getLogger(__name__)

FRESH = "default"  # the version of a server that was never given weights
UPDATE_ROUTE = "/update_weights"
START_ROUTE, FINISH_ROUTE, VERSION_ROUTE = "/start_weight_update", "/finish_weight_update", "/weight_info"
START, DIGEST_PHASE, RESET, CONFIRM = "start", "compare digests", "reset caches", "confirm"
RESET_PREFIX_CACHE = "/reset_prefix_cache"
RESET_INTERVAL_S = 0.02
RESET_AFTER_VISION = ("/reset_mm_cache", "/reset_encoder_cache")


class SyncSession:
    """A server, its transfer group, and whether both are fit for an update.

    held: the tensors of full syncs that it holds.
    holds_base: whether its served weights are those of the model directory.
    folder: what its model directory has of the learner's base weights; None = nobody has asked.
    connected: whether a group was formed, and not given up since.
    """

    def __init__(self, client: ServerClient, transfer: WeightTransfer) -> None:
        self.client = client
        self.transfer = transfer
        self.held = HeldVersions()
        self.holds_base = False
        self.folder: FolderProof | None = None
        self.connected = False
        self._version: int | None = None
        self._adapters: set[str] | None = None  # that it serves; None = those of an earlier learner, if there are any

    def connect(self) -> None:
        """Form the group."""
        self.transfer.connect(self.client)
        self.connected = True

    def begin(self) -> None:
        """Stop generation, and open an update; where the server has lost its weights, form the group anew before."""
        if not self._open():
            logger.warning("server %s lost version %s: it was restarted", self.client.base_url, self._version)
            self.lose()
            self.connect()
            self._open()

    def _open(self) -> bool:
        """Open an update, unless the server reports another version than it should have; returns whether it is open."""
        known = {} if self._version is None else {"weight_version": str(self._version)}
        calls = [
            Call("version", VERSION_ROUTE, method="GET", demand=known),
            Call("pause", "/pause?mode=abort&clear_cache=false"),
            Call(START, START_ROUTE),
        ]
        try:
            answers = self.client.in_order("begin", calls)
        except ServerError as error:
            if error.phase != START:
                raise
            # A learner that died between start and finish leaves its update open; close it, and open ours.
            logger.warning("%s; closing the update that an earlier learner left open", error)
            self._close_what_is_open()
            self.client.post(START_ROUTE, START)
            self.holds_base = False
            return True
        if self._version is None:
            self.holds_base = answers[0].get("weight_version") == FRESH
        return len(answers) == len(calls)

    def receive(self, update_info: str, timeout_s: float) -> Future[Any]:
        """Let the server receive the announced tensors, while they are sent; what is sent ends when it fails.

        update_info: JSON text.
        """
        body = self._in_this_group(update_info)
        return in_background(self._let_receive, body, timeout_s, self.transfer.aborter())

    def finish(self, version: int, *, vision_moved: bool, expected: str | None = None) -> None:
        """Close the update under its version, drop what was cached from older weights, and let generation go on.

        expected: the digests that the server must have loaded, as JSON text of an announcement; None = nobody asks.
        """
        asked = [] if expected is None else [Call(DIGEST_PHASE, UPDATE_ROUTE, self._in_this_group(expected))]
        finish = Call("finish", FINISH_ROUTE, json.dumps({"weight_version": str(version)}))
        resume = [Call("resume", "/resume"), Call(CONFIRM, VERSION_ROUTE, method="GET")]
        calls = [*asked, finish, *_resets(vision_moved=vision_moved), *resume]
        found = self._until_all_are_made(calls).get("weight_version")
        if found != str(version):
            raise ServerError(self.client.base_url, CONFIRM, f"reports weight version {found!r} instead of {version}")
        self._version = version

    def _until_all_are_made(self, calls: Sequence[Call]) -> dict[str, Any]:
        """Make calls, the prefix cache's reset until it succeeds; returns the last one's answer.

        vLLM keeps the attention cache of older weights while a request that was aborted still holds it.
        """
        deadline: float | None = None
        while len(answers := self.client.in_order("finish", calls)) < len(calls):
            calls = calls[len(answers) - 1 :]
            deadline = deadline or time.monotonic() + self.client.timeout_s  # from the first one that did not succeed
            if time.monotonic() > deadline:
                detail = (
                    f"POST {calls[0].path} did not succeed within {self.client.timeout_s:g} s: requests of another"
                    " client hold the cache, and answers would come from older weights; let nobody else ask this server"
                )
                raise ServerError(self.client.base_url, calls[0].phase, detail)
            time.sleep(RESET_INTERVAL_S)
        return answers[-1]

    def _close_what_is_open(self) -> None:
        """Close an update, unless what had opened it has done so meanwhile."""
        try:
            self.client.post(FINISH_ROUTE, START)
        except ServerError as error:
            if error.status is None:
                raise

    def use_adapter(self, name: str) -> None:
        """Let the server load the adapter that it was sent, by asking it for one token, and drop all others."""
        if self._adapters is not None:
            self._adapters.add(name)
        request = RolloutRequest(messages=[{"role": "user", "content": "."}], adapter=name)
        self.client.post(CHAT_ROUTE, "load adapter", body=chat_body(request, Sampling(max_new_tokens=1), seed=0))
        self.drop_adapters(keep=name)

    def drop_adapters(self, *, keep: str | None = None) -> None:
        """Let the server forget every adapter but one; an earlier learner may have left some."""
        found = self.client.adapters() if self._adapters is None else sorted(self._adapters)
        for name in found:
            if name != keep:
                self.client.unload_adapter(name)
        self._adapters = set() if keep is None else {keep}

    def _in_this_group(self, update_info: str) -> str:
        return f'{{"update_info": {{"group": {json.dumps(self.transfer.group)}, {update_info[1:]}}}'

    def _let_receive(self, body: str, timeout_s: float, abort: Callable[[], None]) -> None:
        try:
            self.client.post(UPDATE_ROUTE, "push", body=body, timeout_s=timeout_s)
        except BaseException:
            abort()  # the group of this update: by now there may be another one
            raise

    def lose(self) -> None:
        """Give the group up: the next update forms a new one, and trusts nothing that the server has."""
        self.transfer.disconnect()
        self.held = HeldVersions()
        self.holds_base = False
        self.folder = None
        self.connected = False
        self._version = None
        self._adapters = None

    def close(self) -> None:
        """Leave the group and close the connections."""
        self.transfer.close()
        self.client.close()


def _resets(*, vision_moved: bool) -> list[Call]:
    """Return the calls that drop what was computed with older weights."""
    prefix = Call(RESET, RESET_PREFIX_CACHE, demand={"success": True})
    return [prefix, *(Call(RESET, route) for route in (RESET_AFTER_VISION if vision_moved else ()))]
