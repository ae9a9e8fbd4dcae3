"""A machine that goes without a word: its connections end in seconds, however long a call may last.

Root gives a process a network of its own, whose cable is then cut. Tests that look at the machine's networks wait
meanwhile.
"""

import asyncio
import os
import socket
import subprocess
import sys
import time

import aiohttp
import pytest

from stage2_trainer.sync.transports.link import Link
from stage2_trainer.wire import keep_alive
from stage2_trainer.wire.client import open_session
from stage2_trainer.wire.errors import LinkError

NAME, HERE, THERE, PORT = "s2-silence", "10.254.7.1", "10.254.7.2", 8123
LONG_S = 600.0
TAKES_ALL = f"""
import socket
listening, kept = socket.create_server(({THERE!r}, {PORT})), []
print(flush=True)
while True:
    kept.append(listening.accept())
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes networks")


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def machine(monkeypatch, networks):
    """A machine that accepts connections, and says nothing."""
    monkeypatch.setattr(keep_alive, "IDLE_S", 1)
    monkeypatch.setattr(keep_alive, "EVERY_S", 1)
    monkeypatch.setattr(keep_alive, "NOTICED_S", 4)
    ip("netns", "add", NAME)
    try:
        ip("link", "add", NAME, "type", "veth", "peer", "name", "eth0", "netns", NAME)
        ip("address", "add", f"{HERE}/30", "dev", NAME)
        ip("link", "set", NAME, "up")
        ip("-n", NAME, "address", "add", f"{THERE}/30", "dev", "eth0")
        ip("-n", NAME, "link", "set", "eth0", "up")
        command = ["ip", "netns", "exec", NAME, sys.executable, "-c", TAKES_ALL]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
            server.stdout.readline()
            yield
            server.kill()
    finally:
        ip("link", "delete", NAME)
        ip("netns", "delete", NAME)


def cut():
    ip("-n", NAME, "link", "set", "eth0", "down")


def test_link_ends_when_other_machine_disappears(machine):
    link = Link(socket.create_connection((THERE, PORT)))
    cut()
    began = time.monotonic()
    with pytest.raises(LinkError):
        link.receive_into(memoryview(bytearray(8)), LONG_S)
    assert time.monotonic() - began < LONG_S / 10  # by the clock: a minute for four seconds
    link.close()


@pytest.mark.parametrize("sent_before", [True, False])
def test_request_ends_when_server_machine_disappears(machine, sent_before):
    async def ask():
        async with open_session(f"http://{THERE}:{PORT}", "token") as session:
            await session.post(f"http://{THERE}:{PORT}/", data=b"x", timeout=None)

    async def both():
        asked = asyncio.create_task(ask())
        await asyncio.sleep(0.5 if sent_before else 0)  # by the clock: its end is the same either way
        cut()
        await asyncio.wait_for(asked, LONG_S / 10)

    with pytest.raises(aiohttp.ClientOSError):  # no TimeoutError of ours
        asyncio.run(both())
