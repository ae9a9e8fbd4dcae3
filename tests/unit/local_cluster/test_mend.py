"""What has died of a cluster is started again as it was, and what lives is left alone."""

import os
import signal
import time
from pathlib import Path

import pytest

from local_cluster import cluster
from local_cluster.layout import ClusterError, Layout
from local_cluster.processes import recorded, spawn, stop


def test_mend_restarts_dead_process_with_same_arguments_and_environment(tmp_path: Path) -> None:
    layout = Layout(home=tmp_path, cache=tmp_path / "cache")
    (tmp_path / "cluster.json").write_text('{"kind": "whole cluster"}')
    written = tmp_path / "written"
    killed = spawn(layout, "killed", ["sh", "-c", f'echo "$WORD" >> {written}; exec sleep 60'], env={"WORD": "here"})
    living = spawn(layout, "living", ["sleep", "60"])
    try:
        while not written.exists() or not written.read_text():
            time.sleep(0.01)
        os.kill(killed.pid, signal.SIGKILL)
        os.waitpid(killed.pid, 0)
        assert cluster.mend(layout) == ["killed"]
        assert [daemon.alive() for daemon in recorded(layout)] == [True, True]
        assert living in recorded(layout)
        while written.read_text() != "here\nhere\n":
            time.sleep(0.01)
        assert cluster.mend(layout) == []
    finally:
        stop(recorded(layout))


def test_mend_fails_without_booted_cluster(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no cluster was booted"):
        cluster.mend(Layout(home=tmp_path, cache=tmp_path))
