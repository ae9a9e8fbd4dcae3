"""The library's page: its example runs with nothing but the library, and prints what the page says."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[4] / "docs" / "matching.md"
HEAVY = {"torch", "transformers", "tokenizers", "vllm", "PIL", "httpx", "yaml", "rich"}


def block(language):
    return re.search(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_documented_example_prints_documented_output():
    assert run(block("python")) == block("text")


def test_documented_example_imports_no_model_or_network_library():
    loaded = run(block("python") + "\nimport sys\nprint(*sys.modules)").splitlines()[-1].split()
    assert HEAVY & {name.partition(".")[0] for name in loaded} == set()
