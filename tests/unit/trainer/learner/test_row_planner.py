"""Rows of a window: one for each micro-step, with everything in them; what waits for a row survives a checkpoint."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from itertools import chain

import pytest
import torch

from stage2_api.errors import ConfigError
from stage2_api.rollout_matching import RolloutMatching
from stage2_trainer.data.encode import Encoding
from stage2_trainer.learner.padding_free_batch import Placed, Segment
from stage2_trainer.learner.rows import (
    PARTS,
    PackedRowPlanner,
    RowGroup,
    SingleRowPlanner,
    StepRowPlanner,
    WindowRowPlanner,
    divided,
    load_waiting,
    save_waiting,
)
from stage2_trainer.learner.step_record import SampleStats
from stage2_trainer.matching import SegmentMeta
from stage2_trainer.packing import PackingError
from tests.support.hostile_checkpoints import Command
from tests.unit.trainer.learner.harness import box, record, shifted

ROUNDING = 2e-5  # float32, another order of additions


class Piece:
    """As long as it is."""

    stats = None

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length


def rows_of(length, window):
    return WindowRowPlanner(length, window=window, partial=PackedRowPlanner(length, capacity=8, min_fill=0.1))


def test_window_becomes_one_row_per_micro_step():
    micro_steps = [[Piece(3), Piece(4)], [Piece(5), Piece(6)], [Piece(2), Piece(8)]]
    planned = rows_of(10, 3).plan(micro_steps)
    assert [len(rows) for rows, _ in planned] == [1, 1, 1]
    placed = [piece for rows, _ in planned for row in rows for piece in row]
    assert sorted(map(id, placed)) == sorted(id(piece) for pieces in micro_steps for piece in pieces)
    assert {figures["packing/window_fill"] for _, figures in planned} == {28 / 30}
    assert {figures["packing/post_rollout_buffer"] for _, figures in planned} == {0.0}


def test_short_segments_are_spread_so_that_no_row_is_empty():
    planned = rows_of(100, 3).plan([[Piece(1)], [Piece(1)], [Piece(1)]])
    assert [len(row) for rows, _ in planned for row in rows] == [1, 1, 1]


def packed(*, min_fill):
    return PackedRowPlanner(10, capacity=8, min_fill=min_fill)


def test_row_reports_fill_and_number_of_waiting_segments():
    planned = packed(min_fill=0.1).plan([[Piece(3), Piece(4), Piece(6)], []])
    names = ("fill", "selected_total_len", "segments", "buffer")
    expected = [(0.9, 9.0, 2.0, 1.0), (0.4, 4.0, 1.0, 0.0)]
    assert [figures for _, figures in planned] == [
        {f"packing/post_rollout_{name}": value for name, value in zip(names, values, strict=True)}
        for values in expected
    ]


@pytest.mark.parametrize(("lengths", "warnings"), [([6, 6], 0), ([6, 5], 1), ([5, 4, 3], 1)])
def test_rows_below_min_fill_ratio_are_warned_about_once(lengths, warnings, caplog):
    packed(min_fill=0.6).plan([[Piece(length)] for length in lengths])
    found = [one for one in caplog.records if "training.packing_min_fill_ratio" in one.message]
    assert len(found) == warnings


def test_window_that_does_not_fit_is_refused_with_advice():
    with pytest.raises(PackingError, match="post_rollout_pack_scope: micro"):
        rows_of(10, 2).plan([[Piece(6), Piece(6)], [Piece(6)]])


def pieces(planned):
    return [piece.length for rows, _ in planned for row in rows for piece in row]


def test_segments_left_by_partial_window_go_into_next_window():
    rows = rows_of(10, 3)
    partial = rows.plan([[Piece(6), Piece(5)], [Piece(4), Piece(3)]])
    assert [pieces([one]) for one in partial] == [[6], [5, 4]]
    assert len(rows.waiting) == 1
    assert sorted(pieces(rows.plan([[Piece(9)], [Piece(7)], [Piece(8)]]))) == [3, 7, 8, 9]
    assert len(rows.waiting) == 0


def test_waiting_segment_goes_into_first_window_with_room():
    rows = rows_of(10, 2)
    rows.plan([[Piece(6), Piece(5)]])
    assert sorted(pieces(rows.plan([[Piece(9)], [Piece(8)]]))) == [8, 9]
    assert len(rows.waiting) == 1
    assert sorted(pieces(rows.plan([[Piece(9)], [Piece(4)]]))) == [4, 5, 9]
    assert len(rows.waiting) == 0


class Arriving:
    """Pieces of a step, which come in an order."""

    def __init__(self, pieces, order):
        self.pieces, self.order = pieces, order

    def __len__(self):
        return len(self.pieces)

    def as_they_come(self):
        return ((place, self.pieces[place]) for place in self.order)


def test_row_place_does_not_depend_on_arrival_order_of_segments():
    lengths = [7, 3, 5, 6, 2, 8, 4, 9, 1, 5]

    def rows(order):
        planned = StepRowPlanner(10).rows(Arriving([*map(Piece, lengths)], order))
        return {group.place: [[len(piece) for piece in row] for row in group.rows] for group in planned}

    in_order = rows(range(10))
    assert in_order == rows(range(9, -1, -1)) == rows([4, 9, 0, 7, 1, 8, 2, 6, 3, 5])
    assert all(len(row) == 1 and row[0][0] == lengths[place] for place, row in in_order.items())


def test_waiting_segments_from_checkpoint_go_into_first_step_only():
    planner = StepRowPlanner(20)
    planner.wait([Piece(4)])

    def trained_on():
        planned = planner.rows(Arriving([Piece(7)], [0]))
        return sorted(len(piece) for group in planned for row in group.rows for piece in row)

    assert (trained_on(), list(planner.waiting), trained_on()) == ([4, 7], [], [7])


def test_waiting_segments_are_refused_without_packing():
    with pytest.raises(PackingError, match="configuration that the checkpoint was written with"):
        SingleRowPlanner().wait([Piece(3)])


@pytest.fixture
def records(image_paths):
    return [
        record(image_paths[i % 3], i, object_1=box("red box", 100, 100, 400 + i, 400), object_2=box("ball", 5, 5, 9, 9))
        for i in range(6)
    ]


@pytest.fixture
def make(make, model):
    options = {"answer": shifted, "learning_rate": 0.0, "max_grad_norm": 0.0, "gradient_accumulation_steps": 3}
    options |= {"per_device_train_batch_size": 2, "seed": 3}

    def run(**changes):
        model.zero_grad()
        harness = make(**{**options, **changes})
        harness.train()
        return harness, harness.lines("step")[-1]

    return run


def window(size):
    return {"rows": rows_of(400, size)}


WINDOW = window(3)


def test_packed_window_has_same_loss_and_gradient_as_unpacked_samples(make):
    # one mean over the whole window, so that the spreading of samples over micro-steps cannot matter
    whole = RolloutMatching(loss_normalizer="window")
    _, single = make(loss=whole)
    _, packed = make(loss=whole, **WINDOW)
    for key in ("loss", "loss/ce", "loss/coord", "grad_norm"):
        assert packed[key] == pytest.approx(single[key], rel=ROUNDING), key
    assert packed["packing/post_rollout_segments"] == 2
    assert packed["packing/post_rollout_scope_window"] == 1


def test_window_normalized_loss_does_not_depend_on_gradient_accumulation(make):
    whole = RolloutMatching(loss_normalizer="window")
    _, thirds = make(loss=whole)
    _, once = make(loss=whole, gradient_accumulation_steps=1, per_device_train_batch_size=6)
    for key in ("loss", "grad_norm"):
        assert thirds[key] == pytest.approx(once[key], rel=ROUNDING), key


def test_window_rollouts_are_generated_together_after_one_push(make):
    harness, _ = make(**WINDOW)
    assert harness.sync.versions == [0]
    assert [plan.sizes for plan in harness.backend.plans] == [(2, 2, 2)]


def test_micro_steps_of_last_partial_window_are_packed_separately(make):
    _, last = make(**window(2), gradient_accumulation_steps=2, max_steps=2)
    assert last["packing/post_rollout_scope_window"] == 0
    assert last["packing/post_rollout_segments"] == 2
    assert last["packing/post_rollout_buffer"] == 0


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_processes_get_equal_numbers_of_row_groups_and_similar_tokens(processes):
    lengths = [9, 1, 8, 2, 7, 3, 5]
    shares = divided([RowGroup(place, [[Piece(one)]], {}, []) for place, one in enumerate(lengths)], processes)
    own = [[group for group in share if not group.repeated] for share in shares]
    assert sorted(group.place for share in own for group in share) == list(range(len(lengths)))
    assert {len(share) for share in shares} == {-(-len(lengths) // processes)}
    assert {group.tokens for share in shares for group in share if group.repeated} <= {min(lengths)}
    tokens = [sum(group.tokens for group in share) for share in own]
    assert max(tokens) - min(tokens) <= max(lengths)


def segment():
    ids = torch.arange(7)
    encoding = Encoding(ids, torch.zeros_like(ids), torch.rand(4, 3), torch.tensor([[1, 2, 2]]), 4, 2)
    meta = SegmentMeta((1, 2, 3, 4), 1, 2, 1, 7, (0,), (500,), (), plain_coords=True, weights=((1, -0.5),))
    stats = SampleStats(4, 2, False, 1, 0, 0, 1, 1, 1, 0, 0.75, 1, staleness=3)
    return Segment(Placed(encoding, torch.arange(28).reshape(4, 7)), meta, stats, ("a.png",), "train.jsonl:3")


def flat(value):
    """All fields of a dataclass and of those within it, tensors as lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if is_dataclass(value):
        return {type(value).__name__: [flat(getattr(value, field.name)) for field in fields(value)]}
    return value


def test_waiting_segment_is_restored_from_checkpoint_unchanged(tmp_path):
    save_waiting(tmp_path, [segment()])
    (found,) = load_waiting(tmp_path)
    assert flat(found.meta) == flat(segment().meta)
    assert flat(found.stats) == flat(segment().stats)
    assert (found.images, found.sample_id) == (("a.png",), "train.jsonl:3")
    assert torch.equal(found.placed.position_ids, segment().placed.position_ids)
    assert {type(part) for part in (found, found.placed, found.placed.encoding, found.meta, found.stats)} == set(PARTS)


@pytest.mark.parametrize(("processes", "all_in_first"), [(1, False), (2, False), (5, False), (2, True)])
def test_waiting_segments_are_divided_among_any_number_of_processes(tmp_path, monkeypatch, processes, all_in_first):
    def loaded_by(process):
        monkeypatch.setattr("stage2_trainer.learner.rows.rank", lambda: process)
        return [one.sample_id for one in load_waiting(tmp_path, all_in_first=all_in_first)]

    for process, name in enumerate("abc"):
        monkeypatch.setattr("stage2_trainer.learner.rows.rank", lambda process=process: process)
        save_waiting(tmp_path, [replace(segment(), sample_id=name)])
    monkeypatch.setattr("stage2_trainer.learner.rows.world_size", lambda: processes)
    taken = [loaded_by(process) for process in range(processes)]
    assert sorted(chain.from_iterable(taken)) == ["a", "b", "c"]
    assert taken[0] == ["a", "b", "c"] if all_in_first else max(map(len, taken)) == -(-3 // processes)


def test_waiting_segments_file_with_code_is_refused_without_running_it(tmp_path):
    made = tmp_path / "made"
    torch.save([Command(made)], tmp_path / "waiting-00000.pt")
    with pytest.raises(ConfigError, match=r"waiting-00000\.pt must hold tensors and settings only.*posix\.mkdir"):
        load_waiting(tmp_path)
    assert not made.exists()
