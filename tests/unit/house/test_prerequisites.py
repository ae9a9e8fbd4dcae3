"""Prerequisites of the tests on a cluster are reported before anything runs."""

import os
import subprocess
import sys

from tests.support import prerequisites


def test_missing_prerequisites_are_reported(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    message = " ".join(prerequisites.missing())
    assert [word for word in ("root", "Debian", "Go 1.24") if word not in message] == []
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.prerequisites"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "Go 1.24" in done.stderr) == (1, True)


def test_given_cluster_needs_neither_root_nor_go(monkeypatch):
    monkeypatch.setenv("KUBECONFIG", "/some/where")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert prerequisites.missing() == []
