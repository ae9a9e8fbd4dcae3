"""The size budget of the house: small files, small functions, and a docstring that says what each module is."""

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
TRACKED = subprocess.run(
    ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.splitlines()
FILES = [name for name in TRACKED if (ROOT / name).exists()]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60


def over_budget(name: str) -> list[str]:
    """Return what a file does that the budget does not allow."""
    text = (ROOT / name).read_text(encoding="utf-8")
    tree = ast.parse(text)
    found = []
    if text.strip() and not ast.get_docstring(tree):
        found.append(f"{name}: a module opens by saying what it is")
    if (lines := text.count("\n")) > MAX_FILE_LINES:
        found.append(f"{name}: {lines} lines; {MAX_FILE_LINES} at most")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                found.append(f"{name}:{node.lineno}: {node.name} has {lines} lines; {MAX_FUNCTION_LINES} at most")
    return found


def test_files_and_functions_stay_within_the_budget() -> None:
    assert len(FILES) > 300
    assert [fault for name in FILES for fault in over_budget(name)] == []


def test_no_committed_text_names_a_registry_or_a_path_of_one_machine() -> None:
    hosts = ["pypi" + ".org", "python" + "hosted.org", "proxy." + "golang.org", "registry." + "npmjs"]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".png", ".safetensors"} or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        assert not [host for host in hosts if host in text], name
