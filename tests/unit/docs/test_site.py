"""The site builds without a warning, and each shell block is run by a test or says why not."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import typer
from typer.main import get_command

from stage2_cli.jobs import jobs
from stage2_cli.main import app
from stage2_controller.state import reasons

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^([^\n]*)\n( *)```(?:sh|bash|console)\n(.*?)^\2```", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (?:not run: .{10,}|run by (tests/[\w/]+\.py)) -->")
UsageError = typer.BadParameter.__base__  # of click, or of typer itself where it no longer needs click
PROGRAMS = {"stage2": get_command(app), "kubectl stage2": get_command(jobs)}


def blocks() -> Iterator[tuple[Path, str, str]]:
    """Yield each shell block: its page, the line above it, and its commands."""
    for page in PAGES:
        for above, _, commands in BLOCK.findall(page.read_text(encoding="utf-8")):
            yield page, above, commands


def calls() -> Iterator[tuple[str, list[str]]]:
    """Yield each call of stage2 on the pages: the program, and its arguments."""
    texts = [commands for _, _, commands in blocks()]
    texts += [line for page in PAGES for line in re.findall(r"^    (\w+ .*)$", page.read_text("utf-8"), re.MULTILINE)]
    for text in texts:
        for call in re.split(r"\n|;|&&|\||\bdo\b", text.replace("\\\n", " ").replace("$i", "0")):
            if found := re.match(r"\s*(?:[A-Z_0-9]+=\S* +)*(stage2|kubectl stage2) (.*)", call):
                yield found[1], shlex.split(re.sub(r"\s(?:\d?>|&).*", "", found[2]), comments=True)


def refusal(program: str, words: list[str]) -> str:
    """Return why a program does not take these words; empty if it does."""
    command = PROGRAMS[program]
    while words and hasattr(command, "commands") and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    try:
        command.make_context(program, list(words))
    except UsageError as error:
        return f"{program} {command.name} {words}: {error}"
    return ""


def test_shell_blocks_are_run_by_test_or_say_why_not() -> None:
    listed = [(page, MARK.fullmatch(above.strip())) for page, above, _ in blocks()]
    assert len(listed) > 30
    assert [page.name for page, mark in listed if mark is None] == []
    named = [(page, ROOT / mark[1]) for page, mark in listed if mark and mark[1]]
    assert [page.name for page, test in named if page.name not in test.read_text(encoding="utf-8")] == []


def test_documented_commands_accept_their_arguments() -> None:
    found = list(calls())
    assert len(found) > 40
    assert [why for program, words in found if (why := refusal(program, words))] == []


def test_conditions_page_lists_every_status_reason() -> None:
    words = re.findall(r"\w+", (ROOT / "docs/conditions.md").read_text(encoding="utf-8"))
    assert {word for name, word in vars(reasons).items() if name.isupper()} - set(words) == set()


def test_site_builds_without_warning(tmp_path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0.75" in (tmp_path / "site/docs/concepts/index.html").read_text(encoding="utf-8")
