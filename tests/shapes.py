"""Images of coloured shapes with their records, which runs of the tests train on."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def make_shapes(folder: Path, *, train: int, held_out: int = 0, max_shapes: int = 2) -> Path:
    """Write images of up to `max_shapes` shapes and both JSONL files into a folder; return the folder."""
    counts = [f"--train={train}", f"--held-out={held_out}", f"--max-shapes={max_shapes}"]
    command = [sys.executable, ROOT / "examples/make_shapes.py", folder, *counts]
    subprocess.run(command, check=True, capture_output=True)
    return folder
