"""What NCCL chose is read from lines that it has really written, and nothing of a run depends on it."""

import os
import socket
from pathlib import Path

import pytest

from stage2_trainer.sync.transports.nccl_log import (
    FILE,
    LARGEST_BYTES,
    LEVEL,
    PARTS,
    NcclLog,
    logging_nccl_choices,
    ways_in,
)

# Lines of logs in issues 952, 1189 and 1814 of NVIDIA/nccl, 166 and 252 of NVIDIA/nccl-tests, of RCCL and aws-ofi-nccl.
NET_IB = """\
H20-GPU-06:4015539:4015652 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.6<0>
H20-GPU-06:4015539:4015652 [0] NCCL INFO Channel 07/0 : 0[0] -> 2[0] [receive] via NET/IB/3/GDRDMA
H20-GPU-06:4015540:4015653 [1] NCCL INFO Channel 01/0 : 3[1] -> 1[1] [send] via NET/IB/2/GDRDMA
H20-GPU-06:4015540:4015653 [1] NCCL INFO Channel 00/0 : 3[1] -> 2[0] via P2P/CUMEM
H20-GPU-06:4015540:4015653 [1] NCCL INFO Connected all rings
"""
NET_SOCKET = """\
ubuntu:9621:9692 [7] NCCL INFO Channel 14/0 : 15[7] -> 0[0] [send] via NET/Socket/0
ubuntu:39964:40050 [6] NCCL INFO Channel 09 : 6[6] -> 7[7] via SHM/direct/direct
ubuntu:9621:9688 [3] NCCL INFO Channel 05 : 11[3] -> 12[4] via SHM/direct/direct
"""
OTHERS = {
    "host:919:1150 [0] NCCL INFO Channel 01/0 : 8[0] -> 15[7] via P2P/IPC/read": ("P2P/IPC",),
    "hostname-test:981:1267 [1] NCCL INFO Channel 09/0 : 33[1] -> 41[1] [send] via NET/IBext_v8/4": ("NET/IBext_v8",),
    "Arch:6482:6500 [0] NCCL INFO Channel 00/0 : 0[1000] -> 1[9000] via P2P/direct pointer": ("P2P/direct pointer",),
    "h:7614:7694 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/AWS Libfabric/0": ("NET/AWS Libfabric",),
    "f:695135:695311 [0] NCCL INFO Channel 03/0 : 0[d6000] -> 2[de000] via P2P/IPC comm 0x9bbf3b0 nRanks 4096": (
        "P2P/IPC",
    ),
    "h:1:2 [0] NCCL INFO Channel 00/0 : 3[3] -> 11[3] [send] via NET/IB/3(2)/GDRDMA(PCI)/Shared": ("NET/IB/GDRDMA",),
}
NOTHING = [
    "",
    "h:1:1 [0] NCCL INFO NCCL version 2.31.2+cuda13.3",
    "h:1:257 [0] NCCL INFO NET/Plugin: Could not find: ofi libnccl-net-ofi.so",
    "h:1:2 [0] NCCL INFO Channel 00/02 : 0 1",
    "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] via ",
    "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] via NET/\x1b[31m",
    "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] via MAGIC/carpet",
]


def test_each_way_is_listed_once_without_the_numbers_of_devices():
    assert ways_in(NET_IB.encode()) == ("NET/IB/GDRDMA", "P2P/CUMEM")
    assert ways_in(NET_SOCKET.encode()) == ("NET/Socket", "SHM")


@pytest.mark.parametrize(("line", "expected"), OTHERS.items())
def test_lines_of_other_versions_and_networks(line, expected):
    assert ways_in(line.encode()) == expected


@pytest.mark.parametrize("text", NOTHING)
def test_lines_without_a_way_list_nothing(text):
    assert ways_in(text.encode()) == ()
    assert ways_in(text.encode() + b"\xff\xfe\n" + NET_SOCKET.encode()) == ("NET/Socket", "SHM")


def test_the_list_is_bounded_however_many_ways_there_are():
    lines = [
        f"h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/{'abcdefghij'[i] * 99}/0" for i in range(10)
    ]
    found = ways_in("\n".join(lines).encode())
    assert len(found) == 4
    assert max(map(len, found)) <= 36


def test_only_what_was_written_since_the_group_was_begun_counts(tmp_path):
    """Learner processes that train together write into the same file before."""
    path = tmp_path / "log"
    log = NcclLog(path)
    log.begin()
    assert log.ways() == ()
    path.write_text(NET_IB)
    log.begin()
    assert log.ways() == ()
    with path.open("a") as file:
        file.write(NET_SOCKET)
    assert log.ways() == ("NET/Socket", "SHM")


def test_a_log_that_cannot_be_read_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_bytes(b"x" * (LARGEST_BYTES + 1) + NET_IB.encode())
    for path in (None, tmp_path / "none", tmp_path, tmp_path / "pipe", tmp_path / "long", tmp_path / "long" / "x"):
        assert NcclLog(path).ways() == ()


def test_nccl_writes_into_a_file_of_its_own_as_long_as_it_is_asked():
    environment = {"HOME": "/"}
    with logging_nccl_choices(environment):
        assert (environment[LEVEL], environment[PARTS]) == ("INFO", "INIT")
        path = Path(environment[FILE].replace("%p", str(os.getpid())))
        assert path.parent.stat().st_mode & 0o077 == 0
        path.write_text(NET_SOCKET)
        assert NcclLog.from_environment(environment).ways() == ("NET/Socket", "SHM")
    assert environment == {"HOME": "/"}
    assert not path.parent.exists()


@pytest.mark.parametrize("own", [{LEVEL: "WARN"}, {FILE: "/dev/null"}])
def test_what_somebody_has_asked_of_nccl_stands(own):
    environment = dict(own)
    with logging_nccl_choices(environment):
        assert environment == own


def test_without_a_folder_for_it_nccl_is_asked_nothing(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent")
    environment = {}
    with logging_nccl_choices(environment):
        assert environment == {}


def test_a_file_is_read_by_the_name_that_nccl_makes_of_host_and_process(tmp_path):
    (tmp_path / f"nccl.{socket.gethostname().partition('.')[0]}.{os.getpid()}").write_text(NET_SOCKET)
    assert NcclLog.from_environment({FILE: f"{tmp_path}/nccl.%h.%p"}).ways() == ("NET/Socket", "SHM")
    assert NcclLog.from_environment({}).ways() == ()
