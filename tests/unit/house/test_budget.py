"""The size budget of the house: small files, small functions, and a docstring that says what each module is."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TRACKED = subprocess.run(
    ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.splitlines()
FILES = [name for name in TRACKED if (ROOT / name).exists()]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80


@pytest.mark.parametrize("name", FILES)
def test_module_opens_with_a_docstring_and_stays_small(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert ast.get_docstring(tree) or not text.strip(), "a module opens by saying what it is"
    assert text.count("\n") <= MAX_FILE_LINES


@pytest.mark.parametrize("name", FILES)
def test_functions_stay_below_the_budget(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    too_long = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert too_long == {}


def test_no_committed_text_names_a_registry_or_a_path_of_one_machine() -> None:
    hosts = ["pypi" + ".org", "python" + "hosted.org", "proxy." + "golang.org", "registry." + "npmjs"]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".png", ".safetensors"} or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        assert not [host for host in hosts if host in text], name
