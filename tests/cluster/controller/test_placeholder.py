"""`bench.placement` at toy size: what decision 22 says of a placeholder pod, on the real scheduler.

The benchmark measures how often a way fails by chance; here are the cases in which chance has no part.
"""

from pathlib import Path

import pytest
from bench.placement import limits
from bench.placement.__main__ import measured
from bench.placement.rounds import WHOLE

OUTRANKED = "stronger pods"


@pytest.fixture(autouse=True)
def _on_cluster(kubeconfig: Path, kubectl_on_path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))


def kinds(way: str, scene: str, rounds: int = 2) -> list[str]:
    """What came of the rounds of one way and scene."""
    return [one.kind for one in measured(way, scene, rounds, 1)]


def test_pods_that_outrank_placeholder_take_its_place_whole():
    assert kinds(OUTRANKED, "nobody") == [WHOLE, WHOLE]


def test_node_that_comes_for_placeholder_takes_whole_job():
    assert kinds(OUTRANKED, "new node", 1) == [WHOLE]


def test_pod_of_others_evicts_placeholder_that_is_weaker():
    assert WHOLE not in kinds("weaker placeholder", "waiting")


def test_quota_of_exactly_one_job_refuses_pods_beside_placeholder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "SWAPPED_WITHIN_S", 10.0)
    assert WHOLE not in kinds(OUTRANKED, "exact quota", 1)
