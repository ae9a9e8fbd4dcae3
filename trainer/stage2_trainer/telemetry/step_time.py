"""The wall time of an optimizer step, split into its parts, and how busy the servers were during it.

The parts add up to the step: each instant of the training thread belongs to one of them. Where that thread waits for
rollouts, the instant is `generate` while a server has a request of ours, else `encode` or `match` while another thread
does that, else `wait`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Interval = tuple[float, float]
"""Begin and end, in seconds of one clock."""

Named = tuple[str, float, float]
"""A name, and the interval that has it."""

PARTS = (
    "generate", "wait", "encode", "match", "pack", "forward", "backward", "optimizer", "sync", "log", "other",
)  # fmt: skip
TRAINING = ("forward", "backward", "optimizer")

# The part that each stopwatch name belongs to; any other name is `other`.
PART_OF = {
    "rollout_generate": "generate",
    "rollout_teacher_encode": "encode",
    "rollout_parse_match": "match",
    "post_rollout_pack": "pack",
    "mask_build": "pack",
    **{part: part for part in ("wait", *TRAINING, "sync", "log")},
}


@dataclass(frozen=True)
class ServerTime:
    """One server during a step: the share of the time with a request of ours, and the mean number of requests."""

    server: str
    busy_share: float
    in_flight: float


@dataclass(frozen=True)
class StepTime:
    """The wall seconds of a step, in total and by part, its servers, and the CPU seconds of all threads."""

    wall: float = 0.0
    parts: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    servers: Sequence[ServerTime] = ()
    cpu: float = 0.0

    def figures(self) -> dict[str, float]:
        """Return the record's `step/*`."""
        training = sum(self.parts[part] for part in TRAINING)
        count = max(len(self.servers), 1)
        return {
            "step/wall_s": self.wall,
            "step/cpu_s": self.cpu,
            **{f"step/{part}_s": self.parts[part] for part in PARTS},
            "step/learner_idle_share": 1 - training / self.wall if self.wall else 0.0,
            "step/server_busy_share": sum(server.busy_share for server in self.servers) / count,
            "step/server_in_flight": sum(server.in_flight for server in self.servers) / count,
        }

    @classmethod
    def joined(cls, times: Sequence[StepTime]) -> StepTime:
        """Return the mean over learner processes, whose parts still add up; servers work for all of them."""
        count = len(times)
        names = dict.fromkeys(server.server for time in times for server in time.servers)
        return cls(
            sum(time.wall for time in times) / count,
            {part: sum(time.parts[part] for time in times) / count for part in PARTS},
            [_together(name, [one for time in times for one in time.servers if one.server == name]) for name in names],
            sum(time.cpu for time in times) / count,
        )


def step_time(
    window: Interval,
    training: Sequence[Named],
    beside: Sequence[Named],
    requests: Mapping[str, Sequence[Interval]],
) -> StepTime:
    """Return the split of a step's window.

    training: spans of the thread that trains, nested or apart; beside: of other threads. requests: of each server,
    perhaps none.
    """
    ends = [at for _, *times in (*training, *beside) for at in times]
    ends += [at for times in requests.values() for interval in times for at in interval]
    edges = np.unique(np.clip([*window, *ends], *window))
    lengths = np.diff(edges)  # of the pieces between neighbouring edges; each piece belongs to one part

    names = np.full(len(lengths), "other", dtype=object)
    for name, start, end in sorted(training, key=lambda span: (span[1], -span[2])):  # inner spans paint over outer ones
        names[slice(*np.searchsorted(edges, (start, end)))] = PART_OF.get(name, "other")
    in_flight = {server: _overlaps(edges, times) for server, times in requests.items()}
    if requests:
        names[names == "generate"] = "wait"
    causes = {"generate": sum(in_flight.values(), np.zeros(len(lengths), dtype=int))}
    for part in ("encode", "match"):
        causes[part] = _overlaps(edges, [times for name, *times in beside if PART_OF.get(name) == part])
    for part, count in causes.items():
        names[(names == "wait") & (count > 0)] = part

    wall = window[1] - window[0]
    parts = {part: float(lengths[names == part].sum()) for part in PARTS}
    servers = [
        ServerTime(server, float(lengths[count > 0].sum()) / wall, float(lengths @ count) / wall)
        for server, count in in_flight.items()
    ]
    return StepTime(wall, parts, servers)


def _overlaps(edges: np.ndarray, intervals: Iterable[Sequence[float]]) -> np.ndarray:
    """Return how many of the intervals cover each piece between neighbouring edges."""
    changes = np.zeros(len(edges) + 1, dtype=int)
    for start, end in intervals:
        first, last = np.searchsorted(edges, (start, end))
        changes[first] += 1
        changes[last] -= 1
    return np.cumsum(changes)[: len(edges) - 1]


def _together(name: str, times: Sequence[ServerTime]) -> ServerTime:
    """Return one server as several processes saw it: at least as busy as the process that used it most saw it."""
    return ServerTime(name, max(one.busy_share for one in times), sum(one.in_flight for one in times))
