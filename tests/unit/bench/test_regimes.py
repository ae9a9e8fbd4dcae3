"""The study of few images and missing labels: what its arms teach, and what its table says, on cases made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench.regimes import study
from bench.regimes.__main__ import main
from bench.regimes.arms import ARMS, LABELS_FOUND, REGIMES
from bench.regimes.study import joined
from bench.regimes.table import difference, tables

from stage2_trainer.data.records import Record
from stage2_trainer.grpo.loaded_rewards import load_rewards
from stage2_trainer.grpo.rewards import Sample
from stage2_trainer.matching import GroundTruth, GTObject, build_target, serialize_objects
from tests.unit.trainer.matching.golden import toy_vocab


def labelled(desc: str, *bins: int) -> dict[str, Any]:
    return {"desc": desc, "bbox_2d": [f"<|coord_{one}|>" for one in bins]}


CAT, DOG, BIRD = labelled("cat", 0, 0, 100, 100), labelled("dog", 200, 0, 300, 100), labelled("bird", 0, 500, 100, 600)


def descs(record: dict[str, Any]) -> list[str]:
    return [one["desc"] for one in record["objects"]]


def test_model_boxes_are_added_in_reading_order_unless_they_overlap_label() -> None:
    near = labelled("lion", 0, 0, 90, 100)
    assert descs(joined({"objects": [BIRD, CAT]}, [[near, DOG, DOG]])) == ["cat", "dog", "bird"]


def test_only_boxes_found_by_two_answers_are_added_to_labels() -> None:
    assert descs(joined({"objects": [CAT]}, [[DOG, BIRD], [DOG], []])) == ["cat", "dog"]


@pytest.mark.parametrize(
    ("kind", "left"), [("small", ["big box"]), ("ellipses", ["big box"]), ("right", ["small ellipse"])]
)
def test_selected_kind_of_objects_is_removed_from_record(kind: str, left: list[str]) -> None:
    record = {"objects": [labelled("small ellipse", 0, 0, 100, 100), labelled("big box", 500, 0, 999, 400)]}
    assert descs(study._without(kind, record)) == left


def test_record_of_only_selected_kind_keeps_its_first_object() -> None:
    assert descs(study._without("small", {"objects": [CAT, DOG]})) == ["cat"]


def test_target_keeps_matches_up_to_first_out_of_order_and_appends_the_rest() -> None:
    boxes = [GTObject(name, "bbox", (at, 0, at + 90, 90)) for name, at in (("a", 0), ("b", 200), ("c", 400))]
    truth = GroundTruth(tuple(boxes))
    vocab = toy_vocab()
    swapped = list(vocab.encode(serialize_objects([boxes[0], boxes[2], boxes[1]])))
    whole = build_target(swapped, truth, vocab)
    with study._cut():
        cut = build_target(swapped, truth, vocab)
    assert (len(whole.matching.pairs), whole.matching.false_negatives) == (3, ())
    assert [(pair.pred, pair.gt) for pair in cut.matching.pairs] == [(0, 0)]
    assert cut.matching.false_negatives == (1, 2)
    assert build_target(swapped, truth, vocab).matching == whole.matching, "the cut ends with its block"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("a", 0.5), ("ab", 1.0), ("abc", 1.0), ("ac", 0.5), ("", 0.0), ("aabb", 0.5)],
)
def test_label_reward_penalises_duplicates_but_not_unlabelled_objects(answer: str, expected: float) -> None:
    boxes = {name: GTObject(name, "bbox", (at, 0, at + 90, 90)) for name, at in (("a", 0), ("b", 200), ("c", 400))}
    record = Record(0, "one", (), 100, 100, (boxes["a"], boxes["b"]))
    (reward,) = load_rewards(["labels.py:reward"], [1.0], files={"labels.py": LABELS_FOUND})
    assert reward(Sample(serialize_objects([boxes[one] for one in answer]), record)) == expected


def test_difference_has_t_interval_unless_there_is_one_start() -> None:
    assert difference([0.1, 0.2, 0.3]) == "+0.200 [-0.048, +0.448]"
    assert difference([-0.25]) == "-0.250 (one start)"
    assert difference([]) == ""


def test_table_compares_arms_start_by_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = dict.fromkeys(study.FIGURES, 0.5)
    lines = [
        {"regime": "few-150", "start": start, "arm": arm, "steps": 60, "cpu_s": 10.0, **figures, "f1@0.5": f1}
        for arm, scores in (("a", (0.5, 0.6)), ("e", (0.6, 0.8)))
        for start, f1 in enumerate(scores)
    ]
    told = "".join(tables(lines, ["few-150", "few-400"]))
    assert "| (e) stage 2, recommended | 2 | 60 | 10 | 0.700 |" in told
    assert "| e | +0.150 [-0.485, +0.785]<br>+0.000 [+0.000, +0.000] |" in told
    assert "few-400" not in told
    path = tmp_path / "figures.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert main(["table", "--figures", str(path)]) == 0
    assert capsys.readouterr().out == told


def test_table_has_every_line_of_an_arm_in_the_order_of_the_arms() -> None:
    figures = dict.fromkeys(study.FIGURES, 0.5)
    names = ["n-long", "n-long, 125 steps", "a", "a, best step", "start"]
    lines = [{"regime": "few-150", "start": 1, "arm": arm, "steps": 1, "cpu_s": 1.0, **figures} for arm in names]
    rows = [one for one in tables(lines, ["few-150"]) if "| 1 | 1 |" in one]
    assert [row.split(" | ")[0].lstrip("| (") for row in rows] == [
        "start",
        "a) stage 1 continued",
        "a) stage 1 continued, best step",
        "n-long) (n), 25 / 3 of the steps",
        "n-long) (n), 25 / 3 of the steps, 125 steps",
    ]


def test_every_evaluated_checkpoint_is_saved() -> None:
    for regime in REGIMES.values():
        first = regime.start_steps[0]
        assert all(step % first == 0 for step in regime.start_steps)
        for arm in ARMS.values():
            assert not (arm.chosen or arm.quarters) or round(regime.sizes.steps * arm.steps) % 4 == 0
