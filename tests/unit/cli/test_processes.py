"""Resources of local processes: visible GPUs and reserved ports."""

import socket

import pytest

from stage2_api.errors import ConfigError
from stage2_cli.processes import learner_ports, require_gpus, visible_devices
from stage2_controller.spec.containers import LearnerPorts


def named(value):
    return {} if value is None else {"CUDA_VISIBLE_DEVICES": value}


@pytest.mark.parametrize(
    ("visible", "first", "last"),
    [
        (None, "0,1,2", "3"),
        ("4,5,6,7", "4,5,6", "7"),
        ("GPU-a, GPU-b,GPU-c,GPU-d", "GPU-a,GPU-b,GPU-c", "GPU-d"),
        ("", "", ""),
    ],
)
def test_places_are_counted_among_the_visible_ones(visible, first, last):
    require_gpus(4, named(visible))
    assert visible_devices(range(3), named(visible)) == first
    assert visible_devices(range(3, 4), named(visible)) == last


def test_too_few_are_refused_before_anything_starts():
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES: '4,5'.*needs, which is 4"):
        require_gpus(4, named("4,5"))


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


def test_an_error_inside_the_block_is_raised():
    with pytest.raises(OSError, match="No space left"), learner_ports(3):
        raise OSError("No space left on device")
