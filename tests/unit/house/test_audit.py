"""`make audit` needs a database that is at hand, and names the way out where there is none."""

from __future__ import annotations

import subprocess

import pytest
from hack.lock_images import ROOT


@pytest.mark.parametrize("database", ["", "no-such.zip", "hack"], ids=["none", "a missing file", "a folder"])
def test_audit_without_database_prints_usage_and_fails(database: str) -> None:
    done = subprocess.run(["hack/audit", database], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.startswith(f"make audit DATABASE=PATH: '{database}' is not a file")
