"""A sync session tells its server to forget what was computed with weights that moved, and nothing else."""

import socket
from types import SimpleNamespace

import pytest
import torch

from stage2_api.vllm import ServerAddress
from stage2_trainer.sync.fleet.server import Fleet, ServerSession
from stage2_trainer.wire.errors import LinkError, ServerError
from tests.support.ports import free_port
from tests.unit.trainer.sync.transports import ends
from tests.unit.trainer.sync.transports.ends import LIMIT, arrives, metas_of, tcp_receiver


class Client:
    """A server that takes every call, and remembers which."""

    base_url = "http://s"
    version = "3"
    timeout_s = 60.0

    def __init__(self, *, resets=(True,)):
        self.resets = list(resets)  # what it says of its prefix cache; the last word is repeated
        self.posts = []
        self.unloaded = []
        self.listed = 0

    def post(self, path, phase, **options):
        self.posts.append(path)
        if path != "/reset_prefix_cache":
            return {}
        return {"success": self.resets.pop(0) if len(self.resets) > 1 else self.resets[0]}

    def weight_version(self):
        return self.version

    def adapters(self):
        self.listed += 1
        return ["policy-1-aa", "policy-3-bb"]

    def unload_adapter(self, name):
        self.unloaded.append(name)


@pytest.mark.parametrize(
    ("vision_moved", "resets"),
    [(False, ["/reset_prefix_cache"]), (True, ["/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"])],
)
def test_caches_are_reset_after_update_and_before_generation_resumes(vision_moved, resets):
    client = Client()
    ServerSession(client, transfer=None).finish(3, vision_moved=vision_moved)
    assert client.posts == ["/finish_weight_update", *resets, "/resume"]


def test_cache_reset_is_repeated_while_aborted_request_holds_cache():
    client = Client(resets=(False, False, True))
    ServerSession(client, transfer=None).finish(3, vision_moved=False)
    assert client.posts == ["/finish_weight_update", *["/reset_prefix_cache"] * 3, "/resume"]


@pytest.mark.parametrize("answer", [False, None])
def test_server_that_cannot_reset_cache_is_not_resumed(answer):
    client = Client(resets=(answer,))
    client.timeout_s = 0.05  # by the clock: it never lets go
    with pytest.raises(ServerError, match="older weights"):
        ServerSession(client, transfer=None).finish(3, vision_moved=False)
    assert "/resume" not in client.posts


def test_adapters_of_earlier_learners_are_unloaded():
    client = Client()
    ServerSession(client, transfer=None).use_adapter("policy-3-bb")
    assert client.unloaded == ["policy-1-aa"]


def test_server_with_merged_weights_unloads_every_adapter():
    client = Client()
    ServerSession(client, transfer=None).drop_adapters()
    assert client.unloaded == ["policy-1-aa", "policy-3-bb"]


def test_adapters_are_listed_once_and_again_after_lost_server():
    client = Client()
    session = ServerSession(client, transfer=Leaves())
    for _ in range(2):
        session.drop_adapters()
    client.unloaded = []
    session.use_adapter("policy-3-bb")
    session.use_adapter("policy-4-cc")
    session.drop_adapters()
    assert client.unloaded == ["policy-3-bb", "policy-4-cc"]
    assert client.listed == 1
    session.lose()
    session.drop_adapters()
    assert client.listed == 2


class Leaves:
    """A transfer that counts how often it is left and formed."""

    sent = 0

    def __init__(self):
        self.left = self.formed = 0

    def disconnect(self):
        self.left += 1

    def connect(self, client):
        self.formed += 1


def test_server_with_unexpected_version_forms_new_group_before_pause():
    client, transfer = Client(), Leaves()
    session = ServerSession(client, transfer)
    session.begin()
    session.finish(3, vision_moved=False)
    client.posts, held = [], session.held
    client.version = "77"
    session.begin()
    assert (transfer.left, transfer.formed) == (1, 1)
    assert client.posts == ["/pause?mode=abort&clear_cache=false", "/start_weight_update"]
    assert session.held is not held


@pytest.mark.parametrize(("version", "holds_base"), [("default", True), ("3", False)])
def test_weight_version_tells_new_session_whether_server_holds_base(version, holds_base):
    client = Client()
    client.version = version
    session = ServerSession(client, transfer=None)
    session.begin()
    assert session.holds_base is holds_base


def test_server_reporting_wrong_version_after_update_is_error():
    client = Client()
    with pytest.raises(ServerError, match="phase confirm: reports weight version '3' instead of 4"):
        ServerSession(client, transfer=None).finish(4, vision_moved=False)


def test_digests_are_requested_before_update_is_finished():
    client = Client()
    session = ServerSession(client, transfer=Grouped())
    session.finish(3, vision_moved=False, expected='{"names": []}')
    assert client.posts[:2] == ["/update_weights", "/finish_weight_update"]


class Grouped:
    """A transfer whose group has a name."""

    group = "first"


class Refusing(Client):
    """A server that refuses some calls, each a given number of times; without a status it is lost."""

    status = 500

    def __init__(self, **refusals):
        super().__init__()
        self.refusals = refusals

    def post(self, path, phase, **options):
        name = path.strip("/").partition("_")[0].partition("?")[0]
        if self.refusals.get(name, 0):
            self.refusals[name] -= 1
            raise ServerError(self.base_url, phase, "refused", status=self.status)
        return super().post(path, phase, **options)


@pytest.mark.parametrize("finishes", [0, 1])
def test_update_left_open_is_finished_before_new_update(finishes):
    client = Refusing(start=1, finish=finishes)
    session = ServerSession(client, transfer=None)
    session.holds_base = True
    session.begin()
    assert client.posts[-1] == "/start_weight_update"
    assert not session.holds_base


def test_server_lost_while_finishing_open_update_is_error():
    client = Refusing(start=1, finish=1)
    client.status = None
    with pytest.raises(ServerError, match="refused"):
        ServerSession(client, transfer=None).begin()


def test_full_push_replaces_base_and_unloads_adapters():
    client, held = Client(), {}
    session = ServerSession(client, transfer=None)
    session.holds_base = True
    session.finish_full(3, held, vision_moved=False, expected=None)
    assert (session.holds_base, session.held is held) == (False, True)
    assert client.unloaded == ["policy-1-aa", "policy-3-bb"]


def test_image_caches_are_reset_once_when_base_changes():
    client = Client()
    session = ServerSession(client, transfer=None)
    for version in (3, 3):
        session.finish_adapter(version, "policy-3-bb")
    assert client.posts.count("/reset_mm_cache") == client.posts.count("/reset_encoder_cache") == 1


def test_server_that_refuses_to_start_update_is_error():
    with pytest.raises(ServerError, match="refused"):
        ServerSession(Refusing(start=2), transfer=None).begin()


@pytest.fixture
def fleet():
    """Two servers that take every call."""
    addresses = [ServerAddress(f"http://127.0.0.1:{port}", port) for port in (1, 2)]
    made = Fleet(addresses, token="t", timeout_s=60.0, device=torch.device("cpu"), bucket_bytes=1)
    made.close()
    made.sessions = [ServerSession(Client(), Leaves()) for _ in addresses]
    return made


def left(fleet):
    return [session.transfer.left for session in fleet.sessions]


def test_server_that_fails_during_push_is_dropped_and_others_continue(fleet):
    def fail(session):
        if session is fleet.sessions[0]:
            raise ServerError(session.client.base_url, "push", "went away")

    with pytest.raises(ServerError, match="went away"), fleet.update() as update:
        update.each(fail)
    assert update.fit == fleet.sessions[1:]
    assert left(fleet) == [1, 0]


def test_internal_error_during_push_drops_every_server(fleet):
    with pytest.raises(KeyError), fleet.update():
        raise KeyError
    assert left(fleet) == [1, 1]


def test_server_removed_from_list_is_disconnected_and_its_port_freed(token):
    addresses = [ServerAddress(f"http://127.0.0.1:{port}", port) for port in (free_port(), free_port())]
    fleet = Fleet(addresses, token=token, timeout_s=10.0, device=torch.device("cpu"), bucket_bytes=LIMIT)
    workers = [tcp_receiver(), tcp_receiver()]
    for session, worker in zip(fleet.sessions, workers, strict=True):
        session.client = ends.Client([worker])
        session.connect()
    (stays, leaves), groups = addresses, [session.transfer.group for session in fleet.sessions]
    fleet.set_servers([stays])
    socket.create_server(("127.0.0.1", leaves.group_port)).close()
    with pytest.raises(LinkError, match="closed"):
        workers[1].receive(metas_of({"a": torch.ones(3)}), print, groups[1])
    arrives(fleet.sessions[0].transfer, workers[0])
    fleet.close()


def test_leaving_ended_shared_group_disconnects_every_server(fleet):
    with fleet.update():
        pass
    fleet._shared = SimpleNamespace(ended=True)
    assert fleet.leave_ended_group()
    assert left(fleet) == [1, 1]
    assert not any(session.connected for session in fleet.sessions)
