"""The page of `stage2 inspect`: its example prints what the page shows."""

import re
import shlex
import subprocess
from pathlib import Path

from typer.testing import CliRunner

from stage2_cli.main import app

ROOT = Path(__file__).parents[3]
ELIDED = "│ …"


def test_the_example_prints_what_the_page_shows(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "inspect.md").read_text(encoding="utf-8")
    files, command, shown = re.search(
        r"```sh\n(cat > scene.*?)^stage2 (inspect.*?)```\n\n```\n(.*?)```", page, re.DOTALL | re.MULTILINE
    ).groups()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    subprocess.run(["bash", "-c", files], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    printed = CliRunner().invoke(app, shlex.split(command)).stdout
    lines = iter([line.rstrip() for line in printed.splitlines()])
    missing = [line for line in shown.splitlines() if line != ELIDED and line not in lines]
    assert missing == []
