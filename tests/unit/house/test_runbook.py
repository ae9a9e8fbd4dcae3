"""Every message that docs/runbook.md explains is one that the code can say."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
SOURCES = [path for room in ("crds", "trainer", "cli") for path in (ROOT / room).rglob("*.py")]
ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
MESSAGES = ROW.findall(RUNBOOK.partition("## Messages")[2])
PLACEHOLDER = re.compile(r"%[sdg.0-9f]*|…")


def spoken() -> str:
    """All texts in the code, one a line; what is filled in stands as …."""
    texts = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                )
    return PLACEHOLDER.sub("…", "\n".join(texts))


SPOKEN = spoken()


def test_there_are_messages():
    assert len(MESSAGES) > 20


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_is_in_the_code(message):
    assert message in SPOKEN


@pytest.mark.parametrize("line", re.findall(r"^- `([^`]+ …[^`]*)`", RUNBOOK, re.MULTILINE))
def test_the_log_line_is_in_the_code(line):
    assert line in SPOKEN


@pytest.mark.parametrize("variable", sorted(set(re.findall(r"STAGE2_[A-Z_]+", RUNBOOK))))
def test_the_variable_is_in_the_code(variable):
    assert variable in SPOKEN
