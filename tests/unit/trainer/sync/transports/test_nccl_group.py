"""All of the NCCL transport but NCCL: its links, deadlines and ends, over a communicator that blocks as NCCL does."""

import inspect
import logging
import os
import threading
from pathlib import Path

import pytest
import torch

from stage2_api.errors import EXIT_RETRYABLE
from stage2_trainer.sync.transports import nccl as worker_end
from stage2_trainer.sync.transports import nccl_choice, nccl_group
from stage2_trainer.sync.transports.link import GroupInfo
from stage2_trainer.sync.transports.nccl_group import UNIQUE_ID_BYTES, NcclGroup
from stage2_trainer.sync.transports.transfer import Packed
from stage2_trainer.wire.errors import ServerError
from tests.support.socket_communicator import SocketCommunicator
from tests.unit.trainer.sync.transports.ends import CPU, Client, nccl_receiver, nccl_transfer, outcome_of, received

pynccl = pytest.importorskip("vllm.distributed.device_communicators.pynccl_wrapper")
NCCLLibrary, ncclDataTypeEnum, ncclUniqueId = pynccl.NCCLLibrary, pynccl.ncclDataTypeEnum, pynccl.ncclUniqueId


class NeverEnters(SocketCommunicator):
    """A member that is never there when the group is formed."""

    def open(self, unique_id, rank, world_size):
        threading.Event().wait()


@pytest.fixture
def make_transfer(port, token):
    made = []

    def make(communicator=SocketCommunicator, timeout_s=10.0):
        made.append(nccl_transfer(port, token, communicator, timeout_s))
        return made[-1]

    yield make
    for transfer in made:
        transfer.close()


def test_bytes_sent_over_nccl_are_counted(make_transfer):
    tensors = {f"t{i}": torch.randn(i + 1, 3) for i in range(9)}
    transfer, receiver = make_transfer(), nccl_receiver()
    expected = 0
    for _ in range(2):
        transfer.connect(Client([receiver]))
        received(transfer, [receiver], tensors)
        transfer.disconnect()
        expected += sum(tensor.nbytes for tensor in tensors.values())
        assert expected <= transfer.sent <= expected + 1024
        expected = transfer.sent


NCCL_LINES = """\
here:7:9 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to lo
here:7:9 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
here:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
here:7:9 [0] NCCL INFO Channel 01/0 : 0[0] -> 2[1] via P2P/CUMEM
"""


def test_log_states_nccl_transport_once_per_group(make_transfer, monkeypatch, caplog):
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    with nccl_choice.logged_into_a_file(os.environ):
        transfer, receiver = make_transfer(), nccl_receiver()
        transfer.connect(Client([receiver]))
        file = os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid()))
        Path(file).write_text(NCCL_LINES)  # as NCCL does in its first broadcast
        with caplog.at_level(logging.INFO, nccl_choice.logger.name):
            for _ in range(2):
                received(transfer, [receiver], {"t": torch.zeros(3)})
    ends = 2  # learner and worker, in one process here
    assert [one.getMessage() for one in caplog.records] == ["NCCL moves weights via NET/Socket/0, P2P/CUMEM"] * ends


def test_nccl_log_settings_are_restored_after_run(tmp_path):
    for before in ({}, {"NCCL_DEBUG": "WARN"}):
        environment = dict(before)
        with pytest.raises(KeyError), nccl_choice.logged_into_a_file(environment):
            raise KeyError
        assert environment == before


def test_send_ends_when_worker_leaves(make_transfer):
    transfer, receiver = make_transfer(), nccl_receiver()
    transfer.connect(Client([receiver]))
    thread, errors = outcome_of(transfer.send, Packed([torch.zeros(2**28, dtype=torch.uint8)]))
    receiver.leave_group()
    thread.join(15)
    assert not thread.is_alive()
    assert len(errors) == 1


def test_nccl_group_that_does_not_form_times_out_on_both_sides(make_transfer):
    transfer = make_transfer(NeverEnters, timeout_s=2.0)  # by the clock: it is never formed
    joining = nccl_receiver(NeverEnters)

    class Late(Client):
        def post(self, path, phase, *, body):
            thread, errors = outcome_of(joining.join, GroupInfo(**body["init_info"]), 1)
            thread.join(15)
            assert "the NCCL group was not formed" in str(errors[0])
            raise ServerError(self.base_url, phase, str(errors[0]))

    with pytest.raises(ServerError, match=r"the NCCL group was not formed within 2 s"):
        transfer.connect(Late([joining]))


class CannotBeLeft(SocketCommunicator):
    def abort(self):
        threading.Event().wait()


def test_server_process_exits_when_nccl_abort_hangs(make_transfer, monkeypatch):
    """It could never take weights again; its container starts it anew."""
    monkeypatch.setattr(nccl_group, "ABORT_TIMEOUT_S", 0.1)  # by the clock: it is never left
    ended = []
    monkeypatch.setattr(worker_end.os, "_exit", ended.append)
    receiver = nccl_receiver(CannotBeLeft)
    make_transfer().connect(Client([receiver]))
    receiver.leave_group()
    assert ended == [EXIT_RETRYABLE]


def test_learner_continues_when_nccl_abort_hangs(monkeypatch):
    monkeypatch.setattr(nccl_group, "ABORT_TIMEOUT_S", 0.1)  # by the clock: it is never left
    assert not NcclGroup(CannotBeLeft(CPU), [], 1.0).close()


@pytest.mark.parametrize(
    ("call", "takes"),
    [
        ("ncclGetUniqueId", []),
        ("unique_id_from_bytes", ["data"]),
        ("ncclCommInitRank", ["world_size", "unique_id", "rank"]),
        ("ncclBroadcast", ["sendbuff", "recvbuff", "count", "datatype", "root", "comm", "stream"]),
        ("ncclCommAbort", ["comm"]),
    ],
)
def test_nccl_library_of_vllm_has_required_calls(call, takes):
    assert list(inspect.signature(getattr(NCCLLibrary, call)).parameters)[1:] == takes


def test_nccl_unique_id_has_expected_size_and_bytes_map_to_uint8():
    assert len(bytes(ncclUniqueId())) == UNIQUE_ID_BYTES
    assert ncclDataTypeEnum.from_torch(torch.uint8) == ncclDataTypeEnum.ncclUint8


def test_stand_in_has_signature_of_nccl_communicator():
    for call in ("new_unique_id", "open", "broadcast", "abort"):
        takes = inspect.signature(getattr(nccl_group.NcclCommunicator, call)).parameters
        assert list(inspect.signature(getattr(SocketCommunicator, call)).parameters) == list(takes)
