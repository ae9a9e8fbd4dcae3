"""The store of a `swift rollout` server: the learner meets vLLM's own members there, and executes nothing of it."""

import pickle
import random
import sys
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from stage2_trainer.process.background import in_background
from stage2_trainer.sync.swift.swift_groups import BARRIER, UNIQUE_ID, SwiftStore
from tests.support.patience import crowding

pynccl = pytest.importorskip("vllm.distributed.device_communicators.pynccl_wrapper")
NCCLLibrary, ncclUniqueId = pynccl.NCCLLibrary, pynccl.ncclUniqueId
StatelessProcessGroup = pytest.importorskip("vllm.distributed.utils").StatelessProcessGroup
HOST = "127.0.0.1"
ID = bytes(random.Random(4).randbytes(128))
PATIENCE_S = 20.0
KEY = "broadcast_from/0/{}"


class Payload:
    """What runs where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def unique_id():
    return NCCLLibrary.unique_id_from_bytes(None, ID)


@pytest.fixture
def group(port):
    """A function that returns vLLM's group of so many workers, and the learner's place in its store."""

    def form(workers=1, timeout_s=PATIENCE_S):
        size = workers + 1
        joining = [in_background(StatelessProcessGroup.create, HOST, port, rank, size) for rank in range(workers)]
        store = SwiftStore(HOST, port, rank=workers, world_size=size, timeout_s=timeout_s)
        return [one.result(PATIENCE_S) for one in joining], store

    return form


@pytest.fixture
def stranger(port):
    return lambda: TCPStore(HOST, port, is_master=False, wait_for_workers=False, use_libuv=False)


@pytest.mark.parametrize("workers", [1, 3])
def test_learner_reads_unique_id_and_joins_every_barrier(group, workers):
    members, store = group(workers)
    got = [in_background(member.broadcast_obj, unique_id() if member.rank == 0 else None, 0) for member in members]
    assert store.unique_id() == ID
    assert all(bytes(bytearray(one.result(PATIENCE_S).internal)) == ID for one in got)
    for _ in range(3):
        meeting = [in_background(member.barrier, PATIENCE_S) for member in members]
        store.meet(PATIENCE_S)
        for one in meeting:
            one.result(PATIENCE_S)


@pytest.mark.parametrize("read", ["unique_id", "meet"])
def test_hostile_pickle_in_store_is_not_executed(group, stranger, tmp_path, read):
    _, store = group()
    hostile = pickle.dumps(Payload(tmp_path / "ran"))
    stranger().set(KEY.format(0), hostile)
    with pytest.raises(RuntimeError, match=r"broadcast_from/0/0 of the server's store is not .*: a stranger"):
        store.unique_id() if read == "unique_id" else store.meet(PATIENCE_S)
    assert not (tmp_path / "ran").exists()
    pickle.loads(hostile)
    assert (tmp_path / "ran").exists(), "as it would have been"


@pytest.mark.parametrize("seed", range(20))
def test_only_unique_id_bytes_may_differ_in_accepted_pickle(seed):
    random_ = random.Random(seed)
    good = pickle.dumps(unique_id())
    start = good.index(ID)
    assert UNIQUE_ID.fullmatch(good)["value"] == ID
    for _ in range(200):
        place, changed = random_.randrange(len(good)), bytearray(good)
        changed[place] ^= 1 << random_.randrange(8)
        inside = start <= place < start + len(ID)
        newer_protocol = place == 1 and changed[1] in (4, 5)
        assert bool(UNIQUE_ID.fullmatch(bytes(changed))) is (inside or newer_protocol), place
    for other in (b"", good[:-1], good + b".", good + good, b"\n" + good, pickle.dumps("barrier_" + "0" * 36)):
        assert UNIQUE_ID.fullmatch(other) is None


@pytest.mark.parametrize("protocol", [4, 5])
def test_accepted_pickles_equal_those_written_by_python(protocol):
    name = "barrier_01234567-89ab-cdef-0123-456789abcdef"
    assert BARRIER.fullmatch(pickle.dumps(name, protocol))["value"].decode() == name
    assert UNIQUE_ID.fullmatch(pickle.dumps(unique_id(), protocol))["value"] == ID
    assert pickle.DEFAULT_PROTOCOL in (4, 5), sys.version
    for other in (name + "x", name.replace("b", "/"), "departure", 7, None, ncclUniqueId):
        assert BARRIER.fullmatch(pickle.dumps(other, protocol)) is None


def test_waiting_for_unique_id_times_out(group):
    _, store = group(timeout_s=3.0 * crowding())
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        store.unique_id()
