"""Packing against brute force: the fullest row, and whole windows."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage2_trainer.packing import PackingBuffer, PackingError, pack_window, select_segments
from stage2_trainer.packing import window as packing_window
from stage2_trainer.packing.window import least_rows
from tests.unit.trainer.matching.golden import golden


def best_selection(lengths, cap):
    """All subsets: first fit in order unless another set is longer; then fewest segments, then smallest indices."""
    in_order, total = [], 0
    for i, length in enumerate(lengths):
        if total + length <= cap:
            in_order.append(i)
            total += length
    keys = []
    for size in range(len(lengths)):
        for others in itertools.combinations(range(1, len(lengths)), size):
            reached = lengths[0] + sum(lengths[i] for i in others)
            if reached <= cap:
                keys.append((-reached, size, others))
    best = min(keys)
    return [0, *best[2]] if -best[0] > total else in_order


def test_selection_of_many_segments_fills_row_exactly():
    # The only way to fill the row is with the three odd ones, far apart.
    lengths = [2] + [4] * 40 + [1] + [4] * 40 + [1] + [4] * 40 + [3]
    chosen = select_segments(lengths, 9)
    assert sum(lengths[i] for i in chosen) == 9
    assert chosen == [0, 1, 123]


def test_row_may_hold_more_than_255_segments():
    lengths = [3] + [2] * 400 + [1]
    chosen = select_segments(lengths, 802)
    assert sum(lengths[i] for i in chosen) == 802
    assert len(chosen) == 401


def test_segment_longer_than_row_is_refused():
    with pytest.raises(
        PackingError, match=r"segment of 11 tokens.*raise global_max_length.*max_new_tokens.*training.packing: false"
    ):
        select_segments([3, 11], 10)


def test_segments_not_taken_wait_for_next_row():
    buffer = PackingBuffer(packing_length=10, capacity=5)
    buffer.insert("abcd", [4, 5, 3, 3])
    first = buffer.take()
    assert (first.items, first.total_len) == (("a", "c", "d"), 10)
    buffer.insert("e", [5])
    assert buffer.take().items == ("b", "e")
    assert len(buffer) == 0
    assert buffer.take().items == ()


def test_full_packing_buffer_refuses_new_segments():
    buffer = PackingBuffer(packing_length=10, capacity=2)
    buffer.insert("a", [4])
    with pytest.raises(PackingError, match=r"training.packing_buffer: 1 segments wait, 2 are new; 2 may wait") as error:
        buffer.insert("bc", [1, 1])
    assert len(buffer) == 1
    assert "raise training.packing_buffer for those that wait" in str(error.value), (
        "a smaller batch alone does not help"
    )
    assert "post_rollout_pack_scope: step" in str(error.value)


@pytest.mark.parametrize("length", [0, -1, 11])
def test_segment_of_invalid_length_does_not_enter_packing_buffer(length):
    buffer = PackingBuffer(packing_length=10, capacity=4)
    with pytest.raises(PackingError, match=f"segment of {length} tokens"):
        buffer.insert("ab", [3, length])
    assert len(buffer) == 0


def check(rows, lengths, cap, count):
    assert len(rows) == count
    assert all(rows)
    assert sorted(itertools.chain.from_iterable(rows)) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in row) for row in rows) <= cap
    assert rows == sorted(sorted(row) for row in rows)


def fits(lengths, cap, rows):
    lengths = sorted(lengths, reverse=True)

    def packs(k, free):
        if k == len(lengths):
            return True
        return any(
            room >= lengths[k] and room not in free[:r] and packs(k + 1, (*free[:r], room - lengths[k], *free[r + 1 :]))
            for r, room in enumerate(free)
        )

    return len(lengths) >= rows and packs(0, (cap,) * rows)


@given(st.integers(2, 8), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_windows_without_spare_tokens_are_packed(rows, seed):
    rng = random.Random(seed)
    lengths = []
    for _ in range(rows):
        marks = [0, *sorted(rng.sample(range(1, 2000), 4)), 2000]
        lengths += [b - a for a, b in itertools.pairwise(marks)]
    rng.shuffle(lengths)
    check(pack_window(lengths, 2000, rows), lengths, 2000, rows)


def test_empty_row_gets_shortest_segment_of_row_with_most_segments():
    assert packing_window._without_empty_rows([[0, 2], [1, 3, 4], []], 3) == [[0, 2], [1, 3], [4]]


def test_too_few_segments_for_rows_are_refused_with_advice():
    with pytest.raises(PackingError, match=r"2 segments for 3 rows.*post_rollout_pack_scope: micro"):
        pack_window([1, 1], 10, 3)


@pytest.mark.parametrize(
    ("lengths", "rows", "needed"),
    [
        ([6, 6, 6], 2, 3),  # none of them shares a row
        ([5, 5, 5], 1, 2),  # one token more than a row would need another one
        ([8, 6, 6, 3, 3, 3], 3, 4),  # 8 stands alone, and beside each 6 there is room for one 3
    ],
)
def test_too_many_tokens_are_refused_with_required_number_of_rows(lengths, rows, needed):
    words = rf"{len(lengths)} segments of {sum(lengths)} tokens in all \(longest {max(lengths)}\) for {rows} rows of 10"
    with pytest.raises(PackingError, match=f"{words}; they need at least {needed} rows"):
        pack_window(lengths, 10, rows)


def small_cases(count, *, most):
    random_ = random.Random(23)
    for _ in range(count):
        cap = random_.randint(3, 24)
        yield cap, random_.randint(1, 4), [random_.randint(1, cap) for _ in range(random_.randint(1, most))]


def test_selection_equals_brute_force_on_thousands_of_small_rows():
    for cap, _, lengths in small_cases(3000, most=8):
        assert select_segments(lengths, cap) == best_selection(lengths, cap), (lengths, cap)


def test_window_packing_agrees_with_brute_force_on_thousands_of_small_windows():
    packed = 0
    for cap, rows, lengths in small_cases(4000, most=9):
        if fits(lengths, cap, rows):
            check(pack_window(lengths, cap, rows), lengths, cap, rows)
            packed += 1
        else:
            with pytest.raises(PackingError, match="accumulation window"):
                pack_window(lengths, cap, rows)
    assert 1000 < packed < 3000


def tight_cases(count):
    """Windows of as many rows as the bound asks for, which longest first onto the emptiest row does not place."""
    random_ = random.Random(29)
    while count:
        cap = random_.choice([20, 60, 100])
        shortest = random_.choice([1, cap // 5, cap // 4])
        sizes = sorted((random_.randint(shortest, cap // 2) for _ in range(random_.randint(6, 11))), reverse=True)
        rows = least_rows(sizes, cap)
        if fullest_of_longest_first(sizes, rows) > cap:
            count -= 1
            yield cap, rows, sizes


def fullest_of_longest_first(sizes, rows):
    loads = [0] * rows
    for size in sizes:
        loads[loads.index(min(loads))] += size
    return max(loads)


def test_tight_windows_are_packed_or_rightly_refused():
    packed = 0
    for cap, rows, sizes in tight_cases(150):
        if fits(sizes, cap, rows):
            check(pack_window(sizes, cap, rows), sizes, cap, rows)
            packed += 1
        else:
            with pytest.raises(PackingError, match=r"they need at least|no way of placing them fits"):
                pack_window(sizes, cap, rows)
    assert 10 < packed < 140


def test_window_with_two_per_cent_to_spare_needs_no_complete_search(monkeypatch):
    monkeypatch.setattr(packing_window, "_STEPS", 0)
    random_ = random.Random(31)
    for _ in range(10):
        pieces = []
        for _ in range(32):
            shares = [random_.uniform(1, 3) for _ in range(random_.choice([3, 4]))]
            pieces += [int(share / sum(shares) * 16384 * 0.98) for share in shares]
        random_.shuffle(pieces)
        assert fullest_of_longest_first(sorted(pieces, reverse=True), 32) > 16384
        check(pack_window(pieces, 16384, 32), pieces, 16384, 32)


def test_segments_that_fit_by_their_sum_but_in_no_rows_are_refused():
    random_ = random.Random(0)
    lengths = [random_.randint(300, 450) for _ in range(40)]
    assert sum(lengths) < 16 * 1000
    with pytest.raises(PackingError, match=r"for 16 rows of 1000; whether they fit is not known"):
        pack_window(lengths, 1000, 16)


def test_aborted_search_is_not_reported_as_proof(monkeypatch):
    monkeypatch.setattr(packing_window, "_STEPS", 0)
    with pytest.raises(PackingError, match="whether they fit is not known: the search was ended after 0 steps"):
        pack_window([5, 5, 5, 4, 4, 4, 3], 10, 3)


@pytest.mark.parametrize("case", golden()["select"])
def test_selection_matches_golden_vectors(case):
    assert select_segments(case["lengths"], case["cap"]) == case["chosen"]


@pytest.mark.parametrize("case", golden()["window"])
def test_window_packing_matches_golden_vectors(case):
    if not case["feasible"]:
        with pytest.raises(PackingError):
            pack_window(case["lengths"], case["cap"], case["rows"])
        return
    rows = pack_window(case["lengths"], case["cap"], case["rows"])
    assert len(rows) == case["rows"]
    assert max(sum(case["lengths"][i] for i in row) for row in rows) <= case["cap"]
