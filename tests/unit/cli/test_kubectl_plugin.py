"""`kubectl stage2 …` asks kubectl, in the place and as the person that the command line names."""

import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = str(Path(sys.executable).with_name("kubectl-stage2"))
WHERE = ["--namespace=team-a", "--context=far", "--as=ann"]


@pytest.mark.parametrize("words", [["explain", "a"], ["logs", "a"], ["logs", "a", "--servers"], ["report", "a"]])
def test_namespace_context_and_whose_rights_are_handed_on_to_kubectl(tmp_path: Path, words: list[str]) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text('#!/bin/sh\necho "$@" > "$0.asked"\nexit 7\n')
    kubectl.chmod(0o755)
    done = subprocess.run([PLUGIN, *words, *WHERE], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=False)
    asked = (tmp_path / "kubectl.asked").read_text().split()
    assert set(WHERE) <= set(asked)
    assert done.returncode != 0
