"""Prerequisites of the tests on a cluster are reported before anything runs."""

import os
import subprocess
import sys
import tempfile

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


def test_full_disk_is_reported_before_tests_fill_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not" / "there"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr(prerequisites, "SPACE_BYTES", 10**18)
    full = [sentence for sentence in prerequisites.missing() if "GB free" in sentence]
    assert [sentence.split()[0] for sentence in full] == [tempfile.gettempdir(), str(tmp_path / "not" / "there")]
    monkeypatch.setattr(prerequisites, "SPACE_BYTES", 1)
    assert not [sentence for sentence in prerequisites.missing() if "GB free" in sentence]


def test_given_cluster_needs_neither_root_nor_go(monkeypatch):
    monkeypatch.setenv("KUBECONFIG", "/some/where")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert prerequisites.missing() == []
