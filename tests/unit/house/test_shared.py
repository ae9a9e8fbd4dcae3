"""What tests of every tier stand on: things that processes share, and deadlines that follow the load."""

import subprocess
import sys
import time

from tests.support.patience import Patience
from tests.support.shared import shared

USER = """
import sys, time
from pathlib import Path
from tests.support.shared import shared

folder, name = Path(sys.argv[1]), sys.argv[2]

def note(what):
    with (folder / "notes").open("a") as file:
        file.write(what + "\\n")

def create():
    note("created")
    return {"by": name}

with shared(folder, "thing", create, lambda value: note("removed what came from " + value["by"])) as value:
    (folder / name).touch()
    while len(list(folder.glob("user-*"))) < 3:
        time.sleep(0.01)
    note("used what is of " + value["by"])
"""


def test_shared_resource_is_created_by_first_process_and_removed_by_last(tmp_path):
    command = [sys.executable, "-c", USER, str(tmp_path)]
    processes = [subprocess.Popen([*command, f"user-{number}"]) for number in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    first, *used, last = (tmp_path / "notes").read_text().splitlines()
    assert first == "created"
    assert len(used) == 3
    assert len({line.rpartition(" ")[2] for line in (*used, last)}) == 1
    assert last.startswith("removed what came from user-")


def test_failed_creation_is_retried_by_next_user(tmp_path):
    tries = []

    def create():
        tries.append(1)
        if len(tries) == 1:
            raise OSError("not now")
        return "there"

    for expected in (None, "there"):
        try:
            with shared(tmp_path, "thing", create, lambda _: None) as made:
                assert made == expected
        except OSError:
            assert expected is None


def test_patience_lasts_longer_on_busy_machine(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr("os.getloadavg", lambda: (8.0, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    patience = Patience(10)
    now[0] = 39.0
    assert not patience.ended()
    now[0] = 41.0
    assert patience.ended()
    assert patience.waited_s == 41.0
