"""A sync session tells its server to forget what was computed with weights that moved, and nothing else."""

import socket
from types import SimpleNamespace

import pytest
import torch

from stage2_api.vllm import ServerAddress
from stage2_trainer.sync.fleet.server import Fleet, ServerSession
from stage2_trainer.sync.tensors.merge import HeldVersions
from stage2_trainer.wire.calls import is_met
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

    def in_order(self, phase, calls):
        answers = []
        for call in calls:
            answers.append(
                {"weight_version": self.version} if call.method == "GET" else self.post(call.path, call.phase)
            )
            if not is_met(call.demand, answers[-1]):
                break
        return answers

    def adapters(self):
        self.listed += 1
        return ["policy-1-aa", "policy-3-bb"]

    def unload_adapter(self, name):
        self.unloaded.append(name)


@pytest.mark.parametrize(
    ("vision_moved", "resets"),
    [(False, ["/reset_prefix_cache"]), (True, ["/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"])],
)
def test_caches_are_reset_after_the_update_and_before_generation_goes_on(vision_moved, resets):
    client = Client()
    ServerSession(client, transfer=None).finish(3, vision_moved=vision_moved)
    assert client.posts == ["/finish_weight_update", *resets, "/resume"]


def test_a_cache_that_an_aborted_request_still_holds_is_reset_until_it_is_free():
    client = Client(resets=(False, False, True))
    ServerSession(client, transfer=None).finish(3, vision_moved=False)
    assert client.posts == ["/finish_weight_update", *["/reset_prefix_cache"] * 3, "/resume"]


@pytest.mark.parametrize("answer", [False, None])
def test_a_server_that_keeps_its_cache_does_not_hold_the_weights(answer):
    client = Client(resets=(answer,))
    client.timeout_s = 0.05  # by the clock: it never lets go
    with pytest.raises(ServerError, match="older weights"):
        ServerSession(client, transfer=None).finish(3, vision_moved=False)
    assert "/resume" not in client.posts


def test_adapters_that_an_earlier_learner_left_are_dropped_with_the_last_one():
    client = Client()
    ServerSession(client, transfer=None).use_adapter("policy-3-bb")
    assert client.unloaded == ["policy-1-aa"]


def test_a_server_of_merged_weights_keeps_no_adapter():
    client = Client()
    ServerSession(client, transfer=None).drop_adapters()
    assert client.unloaded == ["policy-1-aa", "policy-3-bb"]


def test_adapters_are_asked_for_only_where_some_may_be():
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


def test_a_server_of_another_version_is_not_paused_before_a_new_group_is_formed():
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
def test_a_new_session_learns_from_the_version_whether_the_server_has_its_own_base(version, holds_base):
    client = Client()
    client.version = version
    session = ServerSession(client, transfer=None)
    session.begin()
    assert session.holds_base is holds_base


def test_a_server_that_says_another_version_at_the_end_does_not_hold_the_weights():
    client = Client()
    with pytest.raises(ServerError, match="phase confirm: reports weight version '3' instead of 4"):
        ServerSession(client, transfer=None).finish(4, vision_moved=False)


def test_digests_are_asked_for_before_the_update_is_closed():
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
def test_an_update_that_somebody_left_open_is_closed_though_it_may_end_by_itself_meanwhile(finishes):
    client = Refusing(start=1, finish=finishes)
    session = ServerSession(client, transfer=None)
    session.holds_base = True
    session.begin()
    assert client.posts[-1] == "/start_weight_update"
    assert not session.holds_base


def test_a_server_that_is_lost_while_an_update_is_closed_is_asked_nothing_more():
    client = Refusing(start=1, finish=1)
    client.status = None
    with pytest.raises(ServerError, match="refused"):
        ServerSession(client, transfer=None).begin()


def test_merged_weights_replace_the_base_and_every_adapter():
    client, held = Client(), HeldVersions()
    session = ServerSession(client, transfer=None)
    session.holds_base = True
    session.finish_full(3, held, vision_moved=False, expected=None)
    assert (session.holds_base, session.held is held) == (False, True)
    assert client.unloaded == ["policy-1-aa", "policy-3-bb"]


def test_images_that_another_base_has_encoded_are_forgotten_with_it():
    client = Client()
    session = ServerSession(client, transfer=None)
    for version in (3, 3):
        session.finish_adapter(version, "policy-3-bb")
    assert client.posts.count("/reset_mm_cache") == client.posts.count("/reset_encoder_cache") == 1


def test_a_server_that_refuses_to_begin_at_all_is_an_error():
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


def test_a_server_that_fails_in_a_push_is_given_up_and_the_others_go_on(fleet):
    def fail(session):
        if session is fleet.sessions[0]:
            raise ServerError(session.client.base_url, "push", "went away")

    with pytest.raises(ServerError, match="went away"), fleet.update() as update:
        update.each(fail)
    assert update.fit == fleet.sessions[1:]
    assert left(fleet) == [1, 0]


def test_an_error_of_our_own_in_a_push_gives_every_server_up(fleet):
    with pytest.raises(KeyError), fleet.update():
        raise KeyError
    assert left(fleet) == [1, 1]


def test_server_off_the_list_is_sent_nothing_more_and_its_port_is_free_again(token):
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


def test_with_the_group_of_all_servers_what_they_hold_is_forgotten(fleet):
    with fleet.update():
        pass
    fleet._shared = SimpleNamespace(ended=True)
    assert fleet.leave_ended_group()
    assert left(fleet) == [1, 1]
    assert not any(session.connected for session in fleet.sessions)
