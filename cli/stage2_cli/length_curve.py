"""The figures of `stage2 evaluate --longer A,B,...`: a row for each bias, a picture, and the best one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from stage2_api.errors import refused
from stage2_report.length_curve import write_curve
from stage2_report.terminal import Terminal
from stage2_trainer.data.files import check_new_file
from stage2_trainer.matching.closing import LARGEST_BIAS, LONGER
from stage2_trainer.scores.length_curve import CHOSEN_BY, best_bias, objects_per_image

SHOWN = ("precision@0.5", "recall@0.5", "f1@0.5", "precision_class@0.5", "recall_class@0.5", "f1_class@0.5")
HEADS = (
    LONGER, "objects per image", "per truth", "precision", "recall", "F1",
    "precision, class", "recall, class", "F1, class",
)  # fmt: skip


@dataclass(frozen=True)
class Lengths:
    """Biases against closing the list, in nats, and how to choose one of them.

    wanted: objects per image of the best one; None: it has the highest F1. picture: where the curve is drawn.
    """

    nats: tuple[float, ...] = (0.0,)
    wanted: float | None = None
    picture: Path | None = None

    @classmethod
    def from_options(cls, text: str | None, wanted: float | None, picture: Path | None) -> Lengths:
        """Read `A,B,...`. Raises ConfigError for what is no bias, and for a choice among fewer than two."""
        try:
            nats = tuple(map(float, text.split(","))) if text else (0.0,)
        except ValueError as error:
            rule = "must be numbers with commas between them"
            raise refused(LONGER, text, rule, f"write for example {LONGER} 0,0.5,1,1.5,2") from error
        if not all(0 <= one <= LARGEST_BIAS for one in nats) or len(set(nats)) < len(nats):
            rule = f"must be different numbers from 0 to {LARGEST_BIAS:g}"
            raise refused(LONGER, text, rule, f"write for example {LONGER} 0,0.5,1,1.5,2")
        for name, value in (("--objects-per-image", wanted), ("--picture", picture)):
            if value is not None and len(nats) < 2:
                rule = f"needs several values of {LONGER}"
                raise refused(name, str(value), rule, f"write for example {LONGER} 0,0.5,1,1.5,2")
        if picture is not None:
            check_new_file("--picture", picture)
        return cls(nats, wanted, picture)

    def labels(self, checkpoints: Sequence[Path]) -> list[str]:
        """Return a name for the answers of each checkpoint under each bias, in the order in which they are made."""
        return [f"{one} {LONGER} {nats:g}" if nats else str(one) for one in checkpoints for nats in self.nats]

    def require_one(self, checkpoints: Sequence[Path]) -> None:
        """Raise ConfigError for several biases of several checkpoints."""
        if len(self.nats) > 1 and len(checkpoints) > 1:
            rule = f"several values of {LONGER} are for one checkpoint"
            raise refused("--checkpoint", ", ".join(map(str, checkpoints)), rule, "call the command for each")

    def document(self, documents: Sequence[Mapping[str, Any]], found: dict[str, Any]) -> dict[str, Any]:
        """Return a document of the sets with the bias of each, and the place of the best one."""
        files = [
            {"longer": nats, "objects_per_image": objects_per_image(one), **one}
            for nats, one in zip(self.nats, documents, strict=True)
        ]
        best = best_bias(documents, self.wanted)
        return {**found, "files": files, "best": None if best is None else self.nats[best]}

    def draw(self, documents: Sequence[Mapping[str, Any]]) -> None:
        """Draw the curve, if it was asked for."""
        if self.picture is not None:
            write_curve(self.nats, documents, best_bias(documents, self.wanted), self.picture)

    def show(
        self,
        console: Terminal,
        documents: Sequence[Mapping[str, Any]],
        compared: Mapping[int, Mapping[str, Any]],
        checkpoint: str,
    ) -> None:
        """Print a row for each bias, the best one, and the command that exports with it.

        compared: the differences of the sets from one of them, by place. checkpoint: what is exported.
        """
        table = Table(header_style="bold", box=None, pad_edge=False)
        for head in HEADS:
            table.add_column(head, justify="right", no_wrap=head == "F1")
        for nats, one in zip(self.nats, documents, strict=True):
            cells = [_figure(one[name], one, name) for name in SHOWN]
            table.add_row(f"{nats:g}", _figure(objects_per_image(one)), _figure(one["objects_per_truth"]), *cells)
        console.print(table)
        best = best_bias(documents, self.wanted)
        if best is None:
            console.print("no best value: there is neither a true object nor an answered one")
            return
        why = "the highest F1" if self.wanted is None else f"the nearest to {self.wanted:g} objects per image"
        f1 = _figure(documents[best][CHOSEN_BY], documents[best], CHOSEN_BY)
        console.print(f"best: {LONGER} {self.nats[best]:g}, {why}; F1 {f1}")
        if change := compared.get(best, {}).get(CHOSEN_BY):
            (other,) = set(range(len(documents))) - set(compared)
            low, high = change["interval"]
            gain = f"{change['difference']:+.3f} [{low:+.3f}, {high:+.3f}]"
            console.print(f"  {gain} against {LONGER} {self.nats[other]:g}")
        if self.nats[best] == max(self.nats):
            console.print("  it is the largest value: try larger ones, too")
        console.print(f"stage2 export {checkpoint} --output DIR {LONGER} {self.nats[best]:g}", soft_wrap=True)


ONE_LENGTH = Lengths()


def _figure(value: float, document: Mapping[str, Any] | None = None, name: str = "") -> str:
    if math.isnan(value):
        return "-"
    ends = (document or {}).get("intervals", {}).get(name) if name == CHOSEN_BY else None
    return f"{value:.3f}" if ends is None else f"{value:.3f} [{ends[0]:.3f}, {ends[1]:.3f}]"
