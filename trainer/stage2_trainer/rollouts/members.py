"""The servers that take part in a run: those of its list that answer. They may come and go between two pushes.

A server that was lost, or is on the list for the first time, is asked in the background. Once it answers, it takes part
from the next push on, which gives it all weights before its first request. So nobody waits for a server as long as
another one answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

from stage2_api.vllm import ServerAddress
from stage2_trainer.process.background import in_background
from stage2_trainer.telemetry.run_context import Listed
from stage2_trainer.wire.errors import ServerError, join_errors

logger = logging.getLogger(__name__)


class Members:
    """Which servers take part.

    present: those that take part at first. listed: see `Listed`. greet: checks that a server answers, and reads prompts
    as the learner does. wait: returns those servers that answer once there are any, and raises ServerError after a
    time-out. on_change: receives the servers whenever they have changed.
    """

    def __init__(
        self,
        present: Sequence[ServerAddress],
        *,
        listed: Listed,
        greet: Callable[[ServerAddress], None],
        wait: Callable[[Sequence[ServerAddress]], Sequence[ServerAddress]],
        on_change: Callable[[Sequence[ServerAddress]], None],
    ) -> None:
        self._present = list(present)
        self._listed = listed
        self._greet = greet
        self._wait = wait
        self._on_change = on_change
        self._greeted: dict[ServerAddress, Future[None]] = {}

    def follow(self, lost: Collection[str] = ()) -> bool:
        """Leave out the servers `lost` (base URLs) and those that are listed no more, and take in those that answer.

        If none is left, wait for one. Returns whether any was taken in.

        Raises:
            ConfigError: a new server reads prompts in another way.
            ServerError: no server answers.
        """
        listed = self._listed()
        staying = [one for one in self._present if one in listed and one.base_url not in lost]
        joining = [one for one in listed if one not in staying and self._answers(one)]
        if not staying and not joining:
            joining = self._greet_all(self._wait(listed))
        present = [one for one in listed if one in staying or one in joining]
        if present != self._present or lost:
            self._log(present, joining)
            self._present = present
            self._on_change(present)
        return bool(joining)

    def _greet_all(self, servers: Sequence[ServerAddress]) -> list[ServerAddress]:
        """Return those of the servers that still answer. Raises ServerError if none does."""
        answering, failures = [], []
        for one in servers:
            self._greeted.pop(one, None)
            try:
                self._greet(one)
                answering.append(one)
            except ServerError as error:
                failures.append(error)
        if not answering:
            raise join_errors(failures)
        return answering

    def _answers(self, server: ServerAddress) -> bool:
        """Return whether a server that takes no part has answered by now."""
        asked = self._greeted.get(server)
        if asked is None or not asked.done():
            self._greeted[server] = asked or in_background(self._greet, server)
            return False
        del self._greeted[server]
        try:
            asked.result()
        except ServerError:
            return False  # the next call asks again
        return True

    def _log(self, present: Sequence[ServerAddress], joining: Sequence[ServerAddress]) -> None:
        for words, servers in (("leaves", set(self._present) - set(present)), ("joins, and gets all weights", joining)):
            for one in servers:
                logger.warning("server %s %s; %d servers take part", one.base_url, words, len(present))
