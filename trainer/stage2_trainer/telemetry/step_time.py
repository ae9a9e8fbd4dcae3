"""The wall time of an optimizer step, split into its parts, and how busy the servers were meanwhile.

The parts add up to the step: each instant of the training thread belongs to one of them. Where that thread waits for
rollouts, the instant is `generate` while a server has a request of ours, else `encode` or `match` while another thread
does that, else `wait`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Interval = tuple[float, float]
"""Begin and end, in seconds of one clock."""

Named = tuple[str, float, float]
"""A name, and the interval that has it."""


def seconds(intervals: Iterable[Interval]) -> float:
    """Return the total length of intervals."""
    return sum(end - start for start, end in intervals)


def clipped(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Return the intervals cut to the window, without empty ones."""
    cut = ((max(start, window[0]), min(end, window[1])) for start, end in intervals)
    return [(start, end) for start, end in cut if start < end]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals, in order, that cover the same time."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def divided(intervals: Iterable[Interval], by: Sequence[Interval]) -> tuple[list[Interval], list[Interval]]:
    """Return the time within `by` and the time outside it; the intervals of `by` are disjoint and in order."""
    inside: list[Interval] = []
    outside: list[Interval] = []
    for start, end in intervals:
        for common in clipped(by, (start, end)):
            outside.append((start, common[0]))
            inside.append(common)
            start = common[1]
        outside.append((start, end))
    return inside, [(start, end) for start, end in outside if start < end]


def innermost(spans: Iterable[Named], window: Interval, *, rest: str) -> list[Named]:
    """Cut the window into pieces, each named after the innermost span over it, or `rest`.

    The spans are of one thread, so each lies within another or beside it.
    """
    pieces: list[Named] = []
    open_ones: list[Named] = []
    at = window[0]

    def until(end: float) -> None:
        nonlocal at
        if end > at:
            pieces.append((open_ones[-1][0] if open_ones else rest, at, end))
            at = end

    def close(before: float) -> None:
        while open_ones and open_ones[-1][2] <= before:
            until(open_ones[-1][2])
            open_ones.pop()

    inside = [(name, *cut) for name, *times in spans for cut in clipped([(times[0], times[1])], window)]
    for span in sorted(inside, key=lambda one: (one[1], -one[2])):
        close(before=span[1])
        until(span[1])
        open_ones.append(span)
    close(before=window[1])
    until(window[1])
    return pieces


PARTS = (
    "generate", "wait", "encode", "match", "pack", "forward", "backward", "optimizer", "sync", "log", "other",
)  # fmt: skip
TRAINING = ("forward", "backward", "optimizer")
_WAITING = ("generate", "wait")
_BESIDE = ("encode", "match")

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

    training: spans of the thread that trains; beside: of other threads. requests: of each server, perhaps none.
    """
    under_way = {server: clipped(one, window) for server, one in requests.items()}
    parts = dict.fromkeys(PARTS, 0.0)
    waiting = []
    for name, start, end in innermost(training, window, rest="other"):
        part = PART_OF.get(name, "other")
        if part == "wait" or (part in _WAITING and requests):
            waiting.append((start, end))
        else:
            parts[part] += end - start
    causes = {"generate": union(one for server in under_way.values() for one in server)}
    causes |= {part: union((s, e) for name, s, e in beside if PART_OF.get(name) == part) for part in _BESIDE}
    for part, times in causes.items():
        found, waiting = divided(waiting, times)
        parts[part] += seconds(found)
    parts["wait"] += seconds(waiting)
    wall = window[1] - window[0]
    return StepTime(wall, parts, [_server(name, one, wall) for name, one in under_way.items()])


def _server(name: str, requests: Sequence[Interval], wall: float) -> ServerTime:
    return ServerTime(name, seconds(union(requests)) / wall, seconds(requests) / wall)


def _together(name: str, times: Sequence[ServerTime]) -> ServerTime:
    """Return one server as several processes saw it: at least as busy as the one that asked most of it."""
    return ServerTime(name, max(one.busy_share for one in times), sum(one.in_flight for one in times))
