"""How often one step's weights are pushed, and how long that takes at most: every retry of a push, in one place.

Retries nest, so their product counts. From the outside in:

    requests    answers were lost: servers are waited for, get the weights again, and are asked again
      attempts  a push failed: servers are waited for, and it is repeated
        changes a push failed, and another way is left: it is repeated at once, that way, for the rest of the run
          opens a server was restarted since its last push: a new group is formed, and its update is opened again
      proofs    a proof is in doubt: it is repeated

Each change is made once in a run, so changes add to the product and do not multiply it: from adapters to full weights,
from merges at the servers to merges at the learner, or (where no adapter trains) from one group of all servers to one
for each. The code reads `requests`, `attempts` and `proofs` here; `changes` and `opens` follow from what a repeat has
changed, and tests hold them to the code.
"""

from __future__ import annotations

from dataclasses import dataclass

from stage2_trainer.wire.client import HEALTH_TIMEOUT_S, POLL_INTERVAL_S

BEGIN_CALLS, CLOSING_CALLS, FINISH_CALLS = 3, 3, 7
"""Of one server: calls that open an update, that first close one which was left open, and that close an update."""
GREETING_CALLS = 6
"""To one server that is back, before it takes part again."""
RESETS = 2
"""What a cache that is not free adds: the time for which its reset is repeated, and the last of these calls."""
ADAPTER_CALLS = 2
"""The list of a server's adapters, and one that it forgets. Each more that an earlier learner left costs another."""
JOIN_WAITS = 2
"""For a server's workers to dial, and for its call to end. NCCL adds two: the group's id, and the group."""
ANSWER_GRACE_S = 5.0
"""For a server to report itself why its link broke."""


@dataclass(frozen=True)
class Retries:
    """The numbers of tries, the first one included; `changes` counts repeats."""

    requests: int = 3
    """Tries of a request for rollouts before lost servers end the run. Each but the first begins with a push."""
    attempts: int = 3
    """Tries of a push before lost servers end the run. A wait in vain for servers is one, too."""
    changes: int = 2
    """Repeats of a push, another way. No run has more: see above."""
    opens: int = 2
    """Tries to open an update of one server in one push."""
    proofs: int = 2
    """Tries of one proof before a doubt stays; the push stands, and the next one is proved."""

    @property
    def pushes(self) -> int:
        """Pushes of one step's weights, at most."""
        return self.requests * self.attempts + self.changes

    def push_s(self, timeout_s: float, *, buckets: int = 1) -> float:
        """Return the seconds of one push with its proof, at most, over TCP to servers that are all sent the same.

        It is the sum of what each wait may last if the server answers each time at the last moment: a call takes
        `timeout_s` at most, from its connection to the end of its answer. Servers are called at once, so their number
        does not count; what the learner computes, and the lookup of names, are left out.

        timeout_s: `vllm.server.timeout_s`. buckets: those of the push; a bucket has 512 MiB.
        """
        connect = 1 + JOIN_WAITS
        begin = self.opens - 1 + BEGIN_CALLS + CLOSING_CALLS  # an update that is opened again has taken one call
        folder = 1
        send = buckets + 1
        finish = FINISH_CALLS + RESETS + ADAPTER_CALLS
        waits = self.opens * connect + begin + folder + send + finish + self.proofs
        return waits * timeout_s + ANSWER_GRACE_S

    def lost_s(self, timeout_s: float) -> float:
        """Return the seconds after which a run ends whose only server stands still from a push on, at most.

        The push misses its first wait; the other attempts are waits in vain.
        """
        return timeout_s + (self.attempts - 1) * _wait_s(timeout_s)

    def at_most_s(self, timeout_s: float, *, buckets: int = 1, servers: int = 1) -> float:
        """Return the seconds of all pushes of one step and of the waits between them, at most; see `push_s`.

        Only servers that are always as slow as they may be, and fail at the end of each push, take as long.
        """
        waits = self.requests * (self.attempts - 1) + sum(range(self.requests))
        greeting = servers * GREETING_CALLS * timeout_s
        return self.pushes * self.push_s(timeout_s, buckets=buckets) + waits * (_wait_s(timeout_s) + greeting)


RETRIES = Retries()


def _wait_s(timeout_s: float) -> float:
    """Return the seconds of one wait for servers, at most: a check may begin just before its end."""
    return timeout_s + POLL_INTERVAL_S + HEALTH_TIMEOUT_S
