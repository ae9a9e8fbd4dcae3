"""The learner's ports where several runs may share a machine: the first run has the pod's own, the next ones others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from stage2_controller import names
from stage2_controller.containers import LearnerPorts

_APART = 20  # more than a run uses from any one of its ports on
_RUNS = 50


@contextmanager
def learner_ports(servers: int) -> Iterator[LearnerPorts]:
    """Ports for the learner of a run with so many servers; no other run is given them while the block lasts.

    Raises OSError where fifty sets are taken.
    """
    with ExitStack() as claims:
        for run in range(_RUNS):
            claim = claims.enter_context(socket.socket(socket.AF_UNIX))
            # The learner binds its ports long after they are chosen. Until then this name, which ends with the process,
            # keeps other runs away.
            with suppress(OSError):
                claim.bind(f"\0stage2-run-{run}")
                if (ports := _shifted(run * _APART)) and all(map(_is_free, _all(ports, servers))):
                    yield ports
                    return
        raise OSError(f"no free ports for a learner: {_RUNS} sets from {names.PROGRESS_PORT} on are taken")


def _shifted(by: int) -> LearnerPorts:
    own = LearnerPorts()
    return LearnerPorts(progress=own.progress + by, metrics=own.metrics + by, group=own.group + by)


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
