"""The benchmarks compare like with like, and their tables are Markdown."""

import numpy as np
import pytest
from bench.__main__ import BENCHMARKS, header, main
from bench.assignment import looped_assignment, looped_candidates
from bench.loss import everything, peak_bytes, portions
from bench.scenes import scene
from bench.tables import Row, Table

from stage2_trainer.matching.assign import assign, candidate_pairs
from stage2_trainer.matching.geometry import aabbs


def test_the_plain_loops_do_the_same_work():
    pred, gt = (aabbs(side) for side in scene(20, 0.5))
    assert looped_candidates(pred.tolist(), gt.tolist(), 4) == candidate_pairs(pred, gt, 4).tolist()
    costs = np.random.default_rng(0).random((20, 20))
    found = [side.tolist() for side in assign(costs, fp_cost=1.0, fn_cost=1.0)]
    assert looped_assignment(costs.tolist()) == found


def test_a_table_shows_amounts_in_its_unit_and_their_ratio():
    table = Table("Speed", "ms", 1e3, lambda: iter([Row("all", "peer", 0.002, 0.01, "0")]))
    assert list(table.lines())[-1] == "| all | peer | 2.00 | 10.00 | 5.00 | 0 |\n"


def test_the_loss_in_portions_takes_a_fraction_of_the_memory():
    shape = (4096, 65536, 8)
    assert peak_bytes(portions, shape) * 2 < peak_bytes(everything, shape)


def test_an_unknown_name_is_answered_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        main(["speed"])
    assert ", ".join(BENCHMARKS) in capsys.readouterr().err


def test_the_header_tells_versions():
    assert f"numpy {np.__version__}" in header()
