"""The site builds without a warning, and each shell block is run by a test or says why not."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from hack.build_site import CONFIG, HOME, address, build, files
from typer.main import get_command

from stage2_cli.jobs import jobs
from stage2_cli.main import app
from stage2_controller.state import reasons

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^([^\n]*)\n( *)```(?:sh|bash|console)\n(.*?)^\2```", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (?:not run: .{10,}|run by (tests/[\w/]+\.py)) -->")
UsageError = typer.BadParameter.__base__  # of click, or of typer itself where it no longer needs click
IMAGE = re.compile(r"!\[[^\]]*\]\(([^):]+)\)")
UNLISTED = re.compile(r"bench/|examples/|docs/decisions/0|docs/(testing|dependencies)\.md|CODE_OF_CONDUCT")
"""Pages that a reader finds by a link alone."""
PEERS = re.findall(r"^\| .*tests/.*$", (ROOT / "docs/peers.md").read_text(encoding="utf-8"), re.MULTILINE)
"""Rows of the table of what other tools do, and of our commands for it."""
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
    texts += [command for row in PEERS for command in re.findall(r"`(stage2 [^`]+)`", row)]
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


def test_each_row_about_other_tools_has_a_command_and_a_test_of_it() -> None:
    assert len(PEERS) > 12
    for row in PEERS:
        commands, test = re.findall(r"`stage2 (\w+)", row), re.findall(r"`(tests/[\w/]+\.py)` \|$", row)
        assert commands, row
        text = (ROOT / test[0]).read_text(encoding="utf-8")
        assert any(re.search(rf"\b{command}", text) for command in commands), row


def test_conditions_page_lists_every_status_reason() -> None:
    words = re.findall(r"\w+", (ROOT / "docs/conditions.md").read_text(encoding="utf-8"))
    assert {word for name, word in vars(reasons).items() if name.isupper()} - set(words) == set()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built as in a clone of a repository whose remote has credentials in its address."""
    out = tmp_path_factory.mktemp("out")
    environment = {**os.environ, HOME: "https://me:secret@forge.example/team/stage2.git"}
    command = [sys.executable, str(ROOT / "hack/build_site.py"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "site"


def test_site_builds_without_warning_and_links_pages_to_repository(site: Path) -> None:
    page = (site / "docs/concepts/index.html").read_text(encoding="utf-8")
    assert "0.75" in page
    assert 'href="https://forge.example/team/stage2/edit/main/docs/concepts.md"' in page
    assert "secret" not in page


def test_table_on_site_shows_alternatives_without_backslash(site: Path) -> None:
    page = (site / "docs/cli/index.html").read_text(encoding="utf-8")
    assert "bins|pixels" in page
    assert "bins\\|pixels" not in page


def test_site_refuses_broken_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "zensical.toml"
    broken.write_text('[project]\nsite_name = "broken"\ndocs_dir = "pages"\n')
    text = "[to nothing](SECURITY.md#no-such-heading)"
    monkeypatch.setattr("hack.build_site.CONFIG", broken)
    monkeypatch.setattr("hack.build_site.without_backslashes", lambda page: f"{page}\n\n{text}\n")
    assert build(tmp_path / "out") != 0


def test_navigation_lists_each_page_but_those_that_others_lead_to() -> None:
    nav = tomllib.loads(CONFIG.read_text(encoding="utf-8"))["project"]["nav"]
    listed = [page for group in nav for pages in group.values() for page in pages]
    assert len(listed) == len(set(listed))
    unlisted = {name for name in files() if name.endswith(".md") and not UNLISTED.match(name)} - set(listed)
    assert (unlisted, [page for page in listed if UNLISTED.match(page)]) == (set(), [])


def test_pictures_of_pages_are_in_repository() -> None:
    pages = [name for name in files() if name.endswith(".md")]
    named = [(page, link) for page in pages for link in IMAGE.findall((ROOT / page).read_text(encoding="utf-8"))]
    assert len(named) > 8
    assert [(page, link) for page, link in named if not (ROOT / page).parent.joinpath(link).is_file()] == []


@pytest.mark.parametrize(
    ("remote", "home"),
    [
        ("https://forge.example/team/stage2", "https://forge.example/team/stage2"),
        ("https://token@forge.example/team/stage2.git", "https://forge.example/team/stage2"),
        ("git@forge.example:team/stage2.git", "https://forge.example/team/stage2"),
        ("ssh://git@forge.example/team/stage2.git", "https://forge.example/team/stage2"),
        ("/srv/stage2", ""),
        ("", ""),
    ],
)
def test_web_address_of_repository_follows_from_git_remote(remote: str, home: str) -> None:
    assert address(remote) == home
