"""What a stranger gets from the port on which a learner's servers take their weights: nothing, and it delays nobody.

The stranger is a process of its own, without the token. It reaches the port, as one on the same network without a
NetworkPolicy would. With NCCL the port is the same, and its id crosses there; NCCL's own ports are in test_nccl_ports.
Who claims a worker's place is in test_link.
"""

import contextlib
import resource
import sys
import time
from dataclasses import replace

import pytest

from stage2_trainer.sync.transports.transfer import LinkListener
from stage2_trainer.wire.client import ServerClient
from tests import forked
from tests.integration.conftest import patience
from tests.integration.strikes import TRANSPORTS
from tests.ports import free_port

pytestmark = pytest.mark.timeout(300)

TIMEOUT_S = 20.0
SILENT = 300  # connections of a stranger that says nothing: more than the learner lets wait at once
DRIPPING = 8

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
READS = """
import socket, sys
read = b""
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=1) as connection:
    try:
        while arrived := connection.recv(65536):
            read += arrived
    except TimeoutError:
        pass
print(read.hex())
"""
IS_SILENT = """
import socket, sys, time
connections = [socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5) for _ in range(int(sys.argv[2]))]
print("there", flush=True)
time.sleep(1000)
"""
DRIPS = """
import contextlib, socket, sys, threading, time
def drip():
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
            while True:
                connection.sendall(bytes(1))
                time.sleep(0.05)
for _ in range(int(sys.argv[2])):
    threading.Thread(target=drip, daemon=True).start()
print("there", flush=True)
time.sleep(1000)
"""
IMPORTS = ["torch", "stage2_trainer.sync.transports.link"]


@pytest.fixture(params=TRANSPORTS)
def served(servers, request):
    return servers("stub", transport=request.param)


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def sync(served, make_sync, port):
    return make_sync(replace(served, group_port=port), timeout_s=patience(TIMEOUT_S))


def stranger(script, *arguments):
    return forked.run([sys.executable, "-c", script, *map(str, arguments)], imports=IMPORTS)


@contextlib.contextmanager
def staying(tmp_path, script, *arguments):
    """Let a stranger be there while the block runs."""
    said = tmp_path / "said"
    with said.open("wb") as output:
        process = forked.start([sys.executable, "-c", script, *map(str, arguments)], imports=IMPORTS, stdout=output)
    try:
        while "there" not in said.read_text():
            assert process.poll() is None, said.read_text()
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def version_of(served, token):
    client = ServerClient(served.base_url, token, timeout_s=30)
    return client.weight_version()


def test_a_stranger_cannot_fill_the_learners_memory(sync, base, port, served, token):
    sync.sync(base, version=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    poured = stranger(POURS, port)
    assert int(poured.stdout) < 2**25, "the kernel's buffers, and no more"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**14  # KiB
    sync.sync(base, version=2)
    assert version_of(served, token) == "2"


def test_what_a_stranger_sends_is_not_executed(sync, base, port, tmp_path):
    sync.sync(base, version=1)
    stranger(SENDS_A_PICKLE, port, tmp_path / "executed")
    sync.sync(base, version=2)
    assert not (tmp_path / "executed").exists()


def test_a_stranger_reads_nothing(sync, base, port, monkeypatch):
    """Also in the moment in which NCCL's id goes to the workers."""
    read = []
    expect = LinkListener.expect

    def expect_and_be_read(listener, members):
        expect(listener, members)
        if members:
            monkeypatch.undo()
            read.append(stranger(READS, port).stdout.strip())

    monkeypatch.setattr(LinkListener, "expect", expect_and_be_read)
    sync.sync(base, version=1)
    assert read == [""]


@pytest.mark.parametrize(("script", "count"), [(IS_SILENT, SILENT), (DRIPS, DRIPPING)], ids=["silent", "dripping"])
def test_strangers_that_stay_delay_nobody(sync, base, port, served, token, tmp_path, script, count):
    """They are there before and while the server dials."""
    sync.sync(base, version=1)
    with staying(tmp_path, script, port, count):
        sync.fleet.sessions[0].lose()
        sync.sync(base, version=2)
    assert version_of(served, token) == "2"
