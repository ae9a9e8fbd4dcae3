"""Runs on one machine do not get into each other's way."""

import socket

import pytest

from stage2_cli.local_ports import learner_ports
from stage2_controller.spec.containers import LearnerPorts


def used(ports: LearnerPorts) -> set[int]:
    return {ports.progress, ports.metrics, *range(ports.group, ports.group + 3)}


def test_each_of_two_runs_has_ports_of_its_own():
    with learner_ports(3) as first, learner_ports(3) as second:
        assert not used(first) & used(second)


def test_a_run_that_has_ended_leaves_its_ports_to_the_next():
    with learner_ports(3) as first:
        pass
    with learner_ports(3) as second:
        assert first == second


def test_ports_that_somebody_listens_on_are_left_alone():
    with learner_ports(3) as ports:
        pass
    with socket.socket() as other:
        other.bind(("127.0.0.1", ports.group + 1))
        other.listen()
        with learner_ports(3) as found:
            assert ports.group + 1 not in used(found)


def test_what_breaks_a_run_is_told():
    with pytest.raises(OSError, match="No space left"), learner_ports(3):
        raise OSError("No space left on device")
