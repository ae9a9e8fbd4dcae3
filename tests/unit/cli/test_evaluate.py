"""`stage2 evaluate --rollouts`: figures for people and for machines, of one file and of several."""

import json

import pytest

from stage2_trainer.matching import serialize_objects
from tests.unit.cli.test_light_start import HEAVY, stage2
from tests.unit.trainer.scores.scenes import box, write_data, write_rollouts

CAT, DOG = box("cat", 0, 0, 200, 200), box("dog", 500, 500, 900, 900)


@pytest.fixture
def files(tmp_path):
    write_data(tmp_path, [[CAT], [DOG], [CAT, DOG]])
    good = [
        {"image": f"{place}.jpg", "text": serialize_objects(one)} for place, one in enumerate([[CAT], [DOG], [CAT]])
    ]
    write_rollouts(tmp_path, good, name="good.jsonl")
    write_rollouts(tmp_path, [{**one, "text": "{}"} for one in good[:2]], name="bad.jsonl")
    return tmp_path


def test_one_file_is_scored_without_anything_heavy(files):
    done, loaded = stage2(files, "evaluate", "--rollouts", "good.jsonl", "--records", "data.jsonl", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("AP", "AP50", "AP75", "AR", "f1@0.5", "f1_class@0.5", "parse_rate", "truncated_rate", "misses"):
        assert found[name] is not None, name
    assert found["f1@0.5"] == pytest.approx(6 / 7)
    low, high = found["intervals"]["f1@0.5"]
    assert low < found["f1@0.5"] < high
    assert found["scores_from"] == "equal"
    assert loaded & HEAVY == set()


def test_several_files_stand_side_by_side(files):
    words = ("evaluate", "--rollouts", "good.jsonl", "--rollouts", "bad.jsonl", "--records", "data.jsonl")
    done, _ = stage2(files, *words, "--json")
    found = json.loads(done.stdout)
    assert [one["rollouts"] for one in found["files"]] == ["good.jsonl", "bad.jsonl"]
    (row,) = found["differences"]
    assert (row["of"], row["minus"], row["recall@0.5"]["difference"]) == ("bad.jsonl", "good.jsonl", -0.75)
    shown, _ = stage2(files, *words)
    assert "2 - 1" in shown.stdout
    assert "1 records have no answer" in shown.stdout
    only, _ = stage2(files, *words, "--json", "--answered-only", "--resamples", "0")
    assert json.loads(only.stdout)["files"][0]["images"] == 2


def test_a_file_that_is_missing_ends_with_a_sentence(files):
    done, _ = stage2(files, "evaluate", "--rollouts", "lost.jsonl", "--records", "data.jsonl")
    assert done.returncode == 64
    assert "lost.jsonl" in done.stderr
    assert "must be an existing JSONL file" in done.stderr
