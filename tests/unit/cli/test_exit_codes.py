"""Each exit code has one meaning: the table of docs/cli.md, and no other code in the programs."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

from stage2_api import errors
from stage2_api.errors import EXIT_CODES

ROOT = Path(__file__).parents[3]
PROGRAMS = ("controller", "trainer", "report", "cli")
ENDS = {"Exit", "exit", "_exit", "SystemExit"}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for folder in PROGRAMS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def codes(tree: ast.Module) -> Iterator[int]:
    """Yield the codes with which a module ends its process, and those of sysexits.h that it names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("EX_"):
            yield getattr(os, node.attr)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ENDS:
            yield from (one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, int))


def test_cli_page_lists_exit_codes_defined_in_code() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", page, re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == EXIT_CODES


def test_each_exit_code_constant_has_row_in_table() -> None:
    named = [code for name, code in vars(errors).items() if re.fullmatch("EXIT_[A-Z]+", name) and name != "EXIT_CODES"]
    assert sorted([0, *named]) == sorted(EXIT_CODES)


def test_programs_use_only_listed_exit_codes() -> None:
    found = {path: set(codes(tree)) - set(EXIT_CODES) for path, tree in sources()}
    assert {path: others for path, others in found.items() if others} == {}
