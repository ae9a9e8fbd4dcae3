"""The wall time of an optimizer step, split into what it went to, and how busy the servers were meanwhile.

The parts add up to the step: each instant of the training thread belongs to one of them. Where that thread waits for
rollouts, the instant is `generate` while a server has a request of ours, else `encode` or `match` while a thread
beside it does that, else `wait`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stage2_trainer.telemetry.intervals import Interval, Named, clipped, divided, innermost, seconds, union

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
    """One server during a step: the share of it with a request of ours under way, and the mean number of them."""

    server: str
    busy_share: float
    in_flight: float


@dataclass(frozen=True)
class StepTime:
    """The wall seconds of a step, by part and all together, its servers, and the CPU seconds of all threads."""

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
        """Return the mean over learner processes, whose parts add up as theirs do; servers work for all of them."""
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
