"""Sums that follow entries as they come, change and go, equal to a count from scratch."""

from hypothesis import given
from hypothesis import strategies as st

from stage2_controller.place.reservations import Reservations

CHANGES = st.lists(
    st.tuples(
        st.integers(0, 5),  # identity
        st.none() | st.tuples(st.integers(0, 8), st.integers(0, 4000), st.sampled_from((-5, 0, 1000))),
    ),
    max_size=40,
)


@given(CHANGES, st.sampled_from((None, 0, 1)))
def test_sums_equal_a_count_from_scratch(changes: list, at_least: int | None) -> None:
    reserved, entries = Reservations(), {}
    for identity, entry in changes:
        if entry is None:
            reserved.remove(identity)
            entries.pop(identity, None)
        else:
            gpus, cpu, priority = entry
            entries[identity] = ({"nvidia.com/gpu": gpus, "cpu": cpu / 1000}, priority)
            reserved.add(identity, *entries[identity])
    counted = [amounts for amounts, priority in entries.values() if at_least is None or priority >= at_least]
    total = reserved.total(at_least=at_least)
    for key in ("nvidia.com/gpu", "cpu"):
        assert abs(total.get(key, 0) - sum(amounts[key] for amounts in counted)) < 1e-9


def test_nothing_is_left_when_all_entries_are_gone() -> None:
    reserved = Reservations()
    for index in range(3):
        reserved.add(index, {"cpu": 0.1}, 0)
    for index in range(3):
        reserved.remove(index)
    assert reserved.total() == {}


@given(st.permutations((2.0**63, 4.0, 0.1, 1e300, 200.0)), st.integers(0, 4))
def test_an_absurd_amount_leaves_no_trace_when_it_is_gone(amounts: list[float], stay: int) -> None:
    reserved = Reservations()
    for index, amount in enumerate(amounts):
        reserved.add(index, {"nvidia.com/gpu": amount}, 0)
        reserved.total()
    for index in range(len(amounts)):
        if index != stay:
            reserved.remove(index)
            reserved.total()
    assert reserved.total() == {"nvidia.com/gpu": amounts[stay]}
