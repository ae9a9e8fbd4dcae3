"""What a stranger gets from the port on which a learner's servers take their weights: nothing, and it delays nobody.

The stranger is a process of its own, without the token. It reaches the port, as one on the same network without a
NetworkPolicy would.
"""

import contextlib
import resource
import socket
import sys
import threading
from dataclasses import replace

import pytest

from stage2_trainer.wire.client import ServerClient
from tests import forked
from tests.integration.conftest import free_port, patience

pytestmark = pytest.mark.timeout(300)

LOOPBACK = "127.0.0.1"
TIMEOUT_S = patience(20.0)
SILENT = 300  # connections of a stranger that says nothing

LISTS_A_STORE = """
import sys
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=3), wait_for_workers=False)
print("keys:", store.num_keys())
"""
FILLS_A_STORE = """
import sys
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=3), wait_for_workers=False)
for number in range(64):
    store.set(f"junk/{number}", "x" * 2**20)
print("filled")
"""
SENDS_A_PICKLE = """
import pickle, socket, sys
class Command:
    def __reduce__(self):
        return open, (sys.argv[2], "w")
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5) as connection:
    connection.sendall(pickle.dumps(Command()) * 100)
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(65536):
        pass
"""
POURS = """
import socket, sys
sent = 0
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5) as connection:
    try:
        while sent < 2**28:
            sent += connection.send(bytes(2**16))
    except OSError:
        pass
print(sent)
"""
IMPORTS = ["torch"]


@pytest.fixture
def served(servers):
    return servers("stub")


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def sync(served, make_sync, port):
    return make_sync(replace(served, group_port=port), timeout_s=TIMEOUT_S)


def stranger(script, *arguments):
    return forked.run([sys.executable, "-c", script, *map(str, arguments)], imports=IMPORTS)


def version_of(served, token):
    with contextlib.closing(ServerClient(served.base_url, token, timeout_s=30)) as client:
        return client.weight_version()


def test_there_is_no_store_whose_names_a_stranger_could_list(sync, base, port, served, token):
    sync.sync(base, version=1)
    listed = stranger(LISTS_A_STORE, port)
    assert listed.returncode != 0
    assert "keys:" not in listed.stdout
    sync.sync(base, version=2)
    assert version_of(served, token) == "2"


def test_a_stranger_cannot_fill_the_learners_memory(sync, base, port, served, token):
    sync.sync(base, version=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    filled = stranger(FILLS_A_STORE, port)
    poured = stranger(POURS, port)
    assert "filled" not in filled.stdout
    assert int(poured.stdout) < 2**25, "the kernel's buffers, and no more"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**14  # KiB
    sync.sync(base, version=2)
    assert version_of(served, token) == "2"


def test_what_a_stranger_sends_is_not_executed(sync, base, port, tmp_path):
    sync.sync(base, version=1)
    stranger(SENDS_A_PICKLE, port, tmp_path / "executed")
    sync.sync(base, version=2)
    assert not (tmp_path / "executed").exists()


def test_silent_strangers_delay_nobody(sync, base, port, served, token):
    """More of them than the learner lets wait at once, before and while the server dials."""
    sync.sync(base, version=1)
    with contextlib.ExitStack() as stack:
        for _ in range(SILENT):
            stack.enter_context(socket.create_connection((LOOPBACK, port), timeout=5))
        sync.fleet.sessions[0].lose()
        sync.sync(base, version=2)
    assert version_of(served, token) == "2"


def test_strangers_that_drip_delay_nobody(sync, base, port, served, token):
    sync.sync(base, version=1)
    done = threading.Event()

    def drip():
        while not done.is_set():
            with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=5) as connection:
                while not done.wait(0.05):
                    connection.sendall(b"\0")

    dripping = [threading.Thread(target=drip) for _ in range(8)]
    for thread in dripping:
        thread.start()
    sync.fleet.sessions[0].lose()
    sync.sync(base, version=2)
    done.set()
    for thread in dripping:
        thread.join()
    assert version_of(served, token) == "2"
