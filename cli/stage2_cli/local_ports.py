"""The learner's ports where several runs may share a machine: each run has its own."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from stage2_api.pod.layout import PROGRESS_PORT
from stage2_controller.spec.containers import POD_PORTS, LearnerPorts

# Below the ports that Linux gives to outgoing connections, one of which could have taken the pod's own meanwhile.
_FIRST_GROUP = 21216
_APART = 20  # more than a run uses from any one of its ports on
_RUNS = 50


@contextmanager
def learner_ports(servers: int) -> Iterator[LearnerPorts]:
    """Ports for the learner of a run with so many servers; no other run is given them while the block lasts.

    Raises OSError where fifty sets are taken.
    """
    with ExitStack() as claims:
        yield next(_unclaimed(servers, claims))


def _unclaimed(servers: int, claims: ExitStack) -> Iterator[LearnerPorts]:
    for run in range(_RUNS):
        claim = claims.enter_context(socket.socket(socket.AF_UNIX))
        try:
            # The learner binds its ports long after they are chosen. Until then this name, which ends with the process,
            # keeps other runs away.
            claim.bind(f"\0stage2-run-{run}")
        except OSError:
            continue
        ports = _shifted(run * _APART)
        if all(map(_is_free, _all(ports, servers))):
            yield ports
    raise OSError(f"no free ports for a learner: {_RUNS} sets from {PROGRESS_PORT} on are taken")


def _shifted(by: int) -> LearnerPorts:
    return LearnerPorts(POD_PORTS.progress + by, POD_PORTS.metrics + by, _FIRST_GROUP + by)


def _all(ports: LearnerPorts, servers: int) -> list[int]:
    return [ports.progress, ports.metrics, *(ports.group + index for index in range(servers))]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
