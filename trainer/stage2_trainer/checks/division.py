"""The division of a job's GPUs between servers and learner: how long its logged steps would take with other divisions.

Nothing is assumed of a GPU's speed, so what a step would take is an interval. At one end the servers' seconds stay as
they are, because the longest answer takes as long on any number of servers; at the other they follow the number of
requests that each server gets. The learner's passes follow the tokens of the process that has most of them: at one end
rows are as even as can be, at the other as uneven.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from stage2_api.runconfig import RunConfig
from stage2_trainer.checks.examination import Devices, Requirement, good

WHAT = "division of GPUs"
LEAST, MOST = 10, 100  # logged steps that are enough, and the last ones that count
SURE = 0.95  # of the step's time: a division must take less at its slower end to be recommended
MOST_SERVERS = MOST_LEARNERS = 16  # of a job on one node
MOST_FIGURE = 1e12  # of a step's record: seconds, or tokens

Interval = tuple[float, float]
"""Seconds, or shares: at the least and at the most."""


@dataclass(frozen=True)
class Division:
    """So many servers and so many learner processes; a learner process has one GPU."""

    servers: int
    learners: int

    def __str__(self) -> str:
        return f"{self.servers} + {self.learners}"


@dataclass(frozen=True)
class SharedRows:
    """The groups of rows that the learner processes share in a step.

    tokens: of all of them. longest: the tokens that a group has at the most.
    """

    groups: int
    tokens: float
    longest: float

    def busiest(self, learners: int) -> Interval:
        """Return the share of the tokens that the process with most of them has; each has about as many groups."""
        groups = -(-self.groups // learners)
        longest = min(1.0, max(1 / self.groups, self.longest / self.tokens))
        least = max(1 / min(learners, self.groups), 1 - (self.groups - groups) * longest)
        return least, min(1.0, groups * longest, (1 - longest) / learners + longest)


@dataclass(frozen=True)
class LoggedStep:
    """An optimizer step of a run's log, in seconds.

    servers_s: of the server that worked longest. learner_s: without what the learner waited for, of which forward_s and
    backward_s are its passes, and sync_s its push. wait_s: what it waited for except answers. row_tokens: of a row,
    where each is a group. steps_per_token: decode steps, with drafts.
    """

    division: Division
    wall_s: float
    servers_s: float
    learner_s: float
    wait_s: float
    forward_s: float
    backward_s: float
    sync_s: float
    rows: SharedRows
    row_tokens: float | None
    steps_per_token: float | None

    def seconds(self, other: Division, *, pipelined: bool) -> Interval:
        """Return what the step would have taken with another division of as many GPUs."""
        if other == self.division:
            return self.wall_s, self.wall_s
        soon_s, late_s = sorted((self.servers_s, self.servers_s * self.division.servers / other.servers))
        (least, most), own = self.rows.busiest(other.learners), self.rows.busiest(self.division.learners)
        passes_s = self.forward_s + self.backward_s
        rest_s = self.learner_s - passes_s
        fast_s, slow_s = rest_s + passes_s * least / own[1], rest_s + passes_s * most / own[0]
        if pipelined:  # what neither half accounts for may stay
            lost = max(1.0, self.wall_s / max(self.learner_s, self.servers_s + self.sync_s))
            return max(fast_s, soon_s + self.sync_s), lost * max(slow_s, late_s + self.sync_s)
        slower_s = late_s + slow_s + self.wait_s
        if other.learners == 1:  # it trains on rows while answers come
            return max(soon_s, fast_s), slower_s
        # Several wait for all answers. One process has perhaps made each backward pass twice, in order not to wait.
        twice_s = self.backward_s / 2 * least if self.division.learners == 1 else 0.0
        return soon_s + fast_s - twice_s, slower_s


def logged_steps(records: Iterable[Mapping[str, Any]], config: RunConfig) -> Sequence[LoggedStep]:
    """Return the last steps since the run's last start that tell what a step takes.

    Left out are the first of a start, steps that lack a figure, all before servers came or went, and all of a start
    that does not say how many processes it has. With a pipeline, a step counts only if its answers were made beside
    the step before it, and those of the next one beside it. Of a run that reuses rollouts as many steps of each use
    count.
    """
    steps = _Steps(config)
    for record in records:
        steps.add(record)
    reuse = config.rollout_matching.rollout_buffer
    return [*steps.kept][len(steps.kept) % (reuse.m_steps if reuse.enabled else 1) :]


class _Steps:
    """The steps that count, of the records so far. alone: whether the next step does not."""

    def __init__(self, config: RunConfig) -> None:
        self.kept: deque[LoggedStep] = deque(maxlen=MOST)
        self._config = config
        self._pipelined = config.rollout_matching.pipeline.enabled
        self._learners, self._alone = 0, True

    def add(self, record: Mapping[str, Any]) -> None:
        """Take the next record of the log."""
        event = record.get("event")
        if event == "start":
            self.kept.clear()
            self._learners, self._alone = _processes(record), True
        elif event == "evaluation":
            self._alone |= self._pipelined  # the next step's answers came before it
        elif event == "step" and self._learners:
            self._add_step(record)

    def _add_step(self, record: Mapping[str, Any]) -> None:
        alone, self._alone = self._alone, False
        if self._pipelined and not _figure(record, "rollout/staleness"):
            alone = True  # it requested its own answers, and the step before it none
            if self.kept:
                self.kept.pop()
        step = None if alone else _logged(record, self._learners, self._config)
        if step is None:
            return
        if self.kept and self.kept[-1].division != step.division:
            self.kept.clear()
        self.kept.append(step)


def _processes(start: Mapping[str, Any]) -> int:
    """Return the number of learner processes of a start; 0 where it is not known."""
    found = start.get("processes")
    return found if type(found) is int and 1 <= found <= MOST_LEARNERS else 0


def _logged(record: Mapping[str, Any], learners: int, config: RunConfig) -> LoggedStep | None:
    """Return the step of a record, if it has the figures of one."""
    names = ("wall", "generate", "wait", "forward", "backward", "sync")
    times = _figures(record, *(f"step/{name}_s" for name in names))
    busy, rows, row_tokens = _busy_shares(record), *_rows(record, config)
    if not times or not busy or rows is None:
        return None
    wall_s, generate_s, wait_s, forward_s, backward_s, sync_s = times
    learner_s = wall_s - generate_s - wait_s
    if learner_s <= 0:
        return None
    return LoggedStep(
        Division(len(busy), learners),
        wall_s,
        max(busy) * wall_s,
        learner_s,
        wait_s,
        forward_s,
        backward_s,
        sync_s,
        rows,
        row_tokens,
        _figure(record, "rollout/decode_steps_per_token"),
    )


def _busy_shares(record: Mapping[str, Any]) -> list[float]:
    """Return how much of a step each server worked; nothing where that is not known of all."""
    servers = record.get("servers")
    found = [
        _figure(one, "busy_share") if isinstance(one, dict) else None
        for one in (servers if isinstance(servers, list) else ())
    ]
    known = [min(1.0, one) for one in found if one is not None]
    return known if len(known) == len(found) else []


def _rows(record: Mapping[str, Any], config: RunConfig) -> tuple[SharedRows | None, float | None]:
    """Return the rows that processes share, None where nobody knows, and the tokens of a row where each is a group."""
    training, matching = config.training, config.rollout_matching
    names = "gen_new_tokens_total", "gen_new_tokens_mean", "encoded_len_mean"
    found = _figures(record, *(f"rollout/{name}" for name in names))
    whole_step = training.packing and matching.post_rollout_pack_scope == "step"
    row_tokens = _figure(record, "packing/post_rollout_selected_total_len") if whole_step else None
    if not all(found) or not found or (whole_step and not row_tokens):
        return None, None
    generated, each, encoded = found
    tokens = generated / each * encoded
    groups = max(1, round(tokens / row_tokens)) if row_tokens else config.gradient_accumulation_steps()
    longest = config.max_length or training.packing_length or matching.vllm.max_model_len or tokens
    of_group = 1 if training.packing else training.per_device_train_batch_size
    return SharedRows(groups, tokens, longest * of_group), row_tokens


def _figures(record: Mapping[str, Any], *keys: str) -> list[float]:
    """Return the figures of these keys; nothing where one of them has none."""
    found = [one for key in keys if (one := _figure(record, key)) is not None]
    return found if len(found) == len(keys) else []


def _figure(record: Mapping[str, Any], key: str) -> float | None:
    """Return a figure of a log, which anybody may have edited; None where it cannot be one."""
    found = record.get(key)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found <= MOST_FIGURE:
        return None
    return round(float(found), 9)


def check_division(config: RunConfig, devices: Devices, records: Iterable[Mapping[str, Any]]) -> Iterator[Requirement]:
    """Yield whether another division of a job's GPUs would be faster, by its log.

    Nothing is said of a run whose steps need no servers. records: of the job's log, which may have been written with
    another division.
    """
    if not (devices.on_gpus and devices.servers and config.rlhf is None) or config.is_supervised:
        return
    steps = logged_steps(records, config)
    own = Division(devices.servers, devices.learner)
    if len(steps) < LEAST:
        later = f"other divisions are compared once its log has {LEAST} steps that count"
        yield good(WHAT, f"{own} (servers + learner GPUs); {later}")
        return
    expected = {one: _mean(steps, one, config) for one in (own, *_others(own, devices))}
    now_s = expected.pop(own)
    status = _in_words(steps)
    if own != steps[-1].division:
        status += f"; {own}, as the job is now, would take {_seconds(now_s)}"
    if not expected:
        yield good(WHAT, status)
        return
    best = min(expected, key=lambda one: expected[one][::-1])
    status += f"; {best} would take {_seconds(expected[best])}"
    if expected[best][1] < SURE * now_s[0]:
        yield Requirement(WHAT, "doubtful", status, _way_out(config, best))
    else:
        yield good(WHAT, f"{status}, so no other division is sure to be faster")


def _others(own: Division, devices: Devices) -> Iterator[Division]:
    """Yield the other divisions of a job's GPUs, all of which are used."""
    for servers in range(1, MOST_SERVERS + 1):
        learners = devices.count - servers * devices.per_server
        if 1 <= learners <= MOST_LEARNERS and servers != own.servers:
            yield Division(servers, learners)


def _mean(steps: Sequence[LoggedStep], division: Division, config: RunConfig) -> Interval:
    pipelined = config.rollout_matching.pipeline.enabled
    least, most = zip(*(step.seconds(division, pipelined=pipelined) for step in steps), strict=True)
    return fmean(least), fmean(most)


def _in_words(steps: Sequence[LoggedStep]) -> str:
    """Return what was logged, as means."""
    drafted = [step.steps_per_token for step in steps if step.steps_per_token is not None]
    decoded = f" ({fmean(drafted):.2f} decode steps a token)" if drafted else ""
    row_tokens = [step.row_tokens for step in steps if step.row_tokens is not None]
    of = f"rows of {fmean(row_tokens):,.0f} tokens" if row_tokens else "micro-steps"
    wall_s, servers_s, learner_s, groups = (
        fmean(values)
        for values in zip(*((one.wall_s, one.servers_s, one.learner_s, one.rows.groups) for one in steps), strict=True)
    )
    return (
        f"{steps[-1].division} (servers + learner GPUs) took {wall_s:.1f} s a step (mean of {len(steps)}):"
        f" servers {servers_s:.1f} s{decoded}, the learner {learner_s:.1f} s ({groups:.1f} {of})"
    )


def _seconds(interval: Interval) -> str:
    least, most = (f"{one:.1f}" for one in interval)
    return f"{least} s" if least == most else f"{least} to {most} s"


def _way_out(config: RunConfig, best: Division) -> str:
    shared = best.learners == 1 or config.shares_rows
    sharded = "" if shared else ", and vllm.server.learners to sharded"
    return (
        f"set spec.rollout.servers to {best.servers} and spec.learner.gpus to {best.learners}{sharded}: the run goes on"
        " from its last checkpoint"
    )
