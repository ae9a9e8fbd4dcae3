"""NCCL's own port, on which the members of a group meet, and a stranger on it: NCCL opens it without a GPU too.

What this shows of NCCL is what docs/threat-model.md says of it: who sends anything else than the group's secret is
turned away; but who sends nothing, or not all of it, holds the others up for as long as it stays.
"""

import contextlib
import importlib.util
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from stage2_trainer.sync.transports.nccl_group import UNIQUE_ID_BYTES

LEARNER = """
import ctypes, sys
unique_id = ctypes.create_string_buffer(int(sys.argv[2]))
assert ctypes.CDLL(sys.argv[1]).ncclGetUniqueId(unique_id) == 0
print(unique_id.raw.hex(), flush=True)
sys.stdin.read()
"""
SECRET_BYTES = 8
ADDRESS = struct.Struct("!H4s")  # of a sockaddr_in behind its family: port, host
PATIENCE_S = 60.0
A_WHILE_S = 1.0


def library():
    found = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nccl")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("this PyTorch comes without NCCL")
    return Path(next(iter(found.submodule_search_locations))) / "lib" / "libnccl.so.2"


@pytest.fixture(scope="module")
def unique_id():
    """The id of a group that a learner, a process of its own, has made: it waits for the group's members."""
    command = [sys.executable, "-c", LEARNER, str(library()), str(UNIQUE_ID_BYTES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as learner:
        yield bytes.fromhex(learner.stdout.readline().decode())


@pytest.fixture
def dial(unique_id):
    """A function that connects to NCCL's port and says something; the connection ends with the test."""
    port, host = ADDRESS.unpack_from(unique_id, SECRET_BYTES + 2)
    with contextlib.ExitStack() as stack:

        def dial(payload=b""):
            connection = stack.enter_context(socket.create_connection((socket.inet_ntoa(host), port), PATIENCE_S))
            connection.sendall(payload)
            return connection

        yield dial


def is_turned_away(connection, timeout_s=PATIENCE_S):
    connection.settimeout(timeout_s)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_connection_without_secret_is_closed(dial, unique_id):
    """The secret is of the id, which crosses under the keys of a link."""
    wrong = bytes([unique_id[0] ^ 1]) + unique_id[1:SECRET_BYTES]
    for payload in [wrong, bytes(64), b"GET / HTTP/1.1\r\n\r\n", bytes(2**16)] * 20:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            assert is_turned_away(dial(payload))


@pytest.mark.parametrize("known", [0, 1], ids=["silent", "dripping"])
def test_incomplete_connection_blocks_others_until_it_closes(dial, unique_id, known):
    staying = dial(unique_id[:known])
    other = dial(bytes(64))
    assert not is_turned_away(other, A_WHILE_S)
    staying.close()
    assert is_turned_away(other)
