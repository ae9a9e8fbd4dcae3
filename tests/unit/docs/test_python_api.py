"""The page on the Python API is one program, and prints what the page shows."""

import re
import subprocess
import sys
from pathlib import Path

from tests.support import forked

TEXT = (Path(__file__).parents[3] / "docs" / "python-api.md").read_text(encoding="utf-8")
SHOWN = "".join(re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL))
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
HEAVY = {"torch", "transformers", "peft", "vllm", "httpx", "yaml", "rich"}


def printed(code: str) -> str:
    """Return what a program prints in an interpreter of its own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_code_blocks_print_what_page_shows() -> None:
    done = forked.run([sys.executable, "-c", "\n".join(BLOCKS)], imports=forked.LEARNER)
    assert done.returncode == 0, done.stderr
    assert done.stdout == SHOWN


def test_matching_and_packing_examples_need_no_torch() -> None:
    light = "\n".join(block for block in BLOCKS if "import torch" not in block and "peft" not in block)
    loaded = printed(f"{light}\nimport sys\nprint(*sys.modules)").splitlines()[-1].split()
    assert {name.partition(".")[0] for name in loaded} & HEAVY == set()
