"""A sync session tells its server to forget what was computed with weights that moved, and nothing else."""

import pytest

from stage2_trainer.weights.sync_session import SyncSession


class Client:
    """A server that takes every call, and remembers which."""

    base_url = "http://s"

    def __init__(self):
        self.posts = []
        self.unloaded = []

    def post(self, path, phase, **options):
        self.posts.append(path)
        return {}

    def weight_version(self):
        return "3"

    def adapters(self):
        return ["policy-1-aa", "policy-3-bb"]

    def unload_adapter(self, name):
        self.unloaded.append(name)


@pytest.mark.parametrize(
    ("vision_moved", "resets"),
    [
        (False, ["/reset_prefix_cache"]),
        (True, ["/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"]),
    ],
)
def test_caches_are_reset_after_the_update_and_before_generation_goes_on(vision_moved, resets):
    client = Client()
    SyncSession(client, transfer=None).finish(3, vision_moved=vision_moved)
    assert client.posts == ["/finish_weight_update", *resets, "/resume"]


def test_adapters_that_an_earlier_learner_left_are_dropped_with_the_last_one():
    client = Client()
    SyncSession(client, transfer=None).use_adapter("policy-3-bb")
    assert client.unloaded == ["policy-1-aa"]


def test_a_server_of_merged_weights_keeps_no_adapter():
    client = Client()
    SyncSession(client, transfer=None).drop_adapters()
    assert client.unloaded == ["policy-1-aa", "policy-3-bb"]
