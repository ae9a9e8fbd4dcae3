"""One picture of several studies: how far each arm is ahead of continued stage 1, with its interval."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt

PANELS = {"f1_class@0.5": "F1 with class", "f1@0.5": "F1, whatever the class"}
AGAINST = "against_a"


def draw(files: Sequence[Path], arm: str, output: Path) -> None:
    """Draw the difference of an arm from (a) in each file that `table --write` has written."""
    found = {path.stem.removeprefix("pays-"): json.loads(path.read_text())["steps"][arm] for path in files}
    figure, panels = plt.subplots(1, len(PANELS), figsize=(9, 0.6 + 0.5 * len(found)), sharey=True)
    for panel, (name, title) in zip(panels, PANELS.items(), strict=True):
        for row, one in enumerate(found.values()):
            middle, (low, high) = one[AGAINST]["figures"][name], one[AGAINST]["intervals"][name]
            panel.plot([low, high], [row, row], color="#0969da", linewidth=2)
            panel.plot([middle], [row], "o", color="#0969da")
        panel.axvline(0, color="#57606a", linewidth=1)
        panel.set_title(title, fontsize=10)
        panel.set_xlim(-0.13, 0.13)
        panel.tick_params(labelsize=9)
    panels[0].set_yticks(
        range(len(found)), [f"{name} ({len(one[AGAINST]['seeds'])} seeds)" for name, one in found.items()]
    )
    panels[0].invert_yaxis()
    figure.suptitle("recipe: recommended minus continued stage 1, equal steps, 95 % t intervals", fontsize=10)
    figure.tight_layout()
    figure.savefig(output, dpi=110)
