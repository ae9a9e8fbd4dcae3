"""What a day in the life of a shared cluster has come to, as a row of bench/results/day.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parents[4] / "bench" / "results" / "day.md"
HEAD = """\
# A day in the life of a shared cluster

`STAGE2_DAY_SEED=1 STAGE2_DAY_WRITE=1 pytest -s tests/cluster/controller/kueue/test_day.py`, a row for each seed: jobs
of 2 to 8 GPUs in two queues of Kueue and in none, on four to nine nodes of 8 GPUs, beside pods of others that come and
go. The real API server, controller-manager, scheduler and Kueue, the controller and this test on two cores; kubelets
are played. Booked twice: times at which pods held, or jobs were promised, more GPUs than a node has. Half placed: the
longest time for which one pod of a job had a node that answered and the other had none. From sent to ended: the slowest
job. Written: the requests that wrote children of one job, at most. Memory of the controller in MB, all jobs kept: at a
quarter of the day, as the last job was sent, and at the end.

| seed | jobs | pods of others | nodes that came, were drained, died | booked twice | half placed s | sent to ended s \
| written | memory MB | date |
| ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | --- | --- |
"""


@dataclass(frozen=True)
class DaySeen:
    """What a day has come to."""

    seed: int
    jobs: int
    happened: Counter[str]
    over_booked: Sequence[str]
    half_placed_s: float
    slowest_s: float
    written: Counter[str]
    memory: Sequence[int]
    sent: int  # how many of `memory` are from before the last job was sent

    def row(self) -> str:
        """The line of the table."""
        nodes = ", ".join(str(self.happened[f"node {what}"]) for what in ("appears", "drained", "dies"))
        memory = ", ".join(str(self.memory[index]) for index in (len(self.memory) // 4, self.sent - 1, -1))
        counted = f"{self.seed} | {self.jobs} | {self.happened['foreign pod']} | {nodes} | {len(self.over_booked)}"
        times = f"{self.half_placed_s:.0f} | {self.slowest_s:.0f}"
        return f"| {counted} | {times} | {max(self.written.values())} | {memory} | {datetime.now(UTC).date()} |\n"


def keep(row: str) -> None:
    """Write the row in the place of the one that its seed has."""
    before = RESULTS.read_text("utf-8").splitlines(keepends=True) if RESULTS.exists() else []
    rows = {line.split("|")[1]: line for line in before if re.match(r"\| \d", line)} | {row.split("|")[1]: row}
    RESULTS.write_text(HEAD + "".join(rows[seed] for seed in sorted(rows, key=int)), encoding="utf-8")
