"""The comparison of start rows: what the model is taught first, and the table of what was found."""

from bench.start_rows import REPORT_AT, digits, shown

from stage2_api.coordinates import COORD_TOKEN, coord_bin
from tiny_model.answers import write
from tiny_model.scenes import make_scene


def test_digits_spell_the_bins_and_nothing_else_differs():
    scene = make_scene(7, "warm-up", 3)
    tokens = COORD_TOKEN.findall(write(scene))
    assert tokens
    spelt = digits(scene)
    assert not COORD_TOKEN.search(spelt)
    assert [int(number) for number in tokens] == [coord_bin(f"<|coord_{number}|>") for number in tokens]
    assert COORD_TOKEN.sub(lambda token: token[1], write(scene)) == spelt


def test_each_kind_has_a_row_of_means_and_spreads():
    runs = [{"losses": dict.fromkeys(map(str, REPORT_AT), loss), "recall": 0.5, "iou": 0.25} for loss in (1.0, 3.0)]
    *_, row = shown({"mean": runs})
    assert row == f"| mean |{' 2.000 ± 1.414 |' * len(REPORT_AT)} 0.500 ± 0.000 | 0.250 ± 0.000 |\n"
