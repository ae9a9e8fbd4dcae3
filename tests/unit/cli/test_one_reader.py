"""validate, inspect, learn and GRPO read a record alike; trainer/data/test_records.py has all mistakes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from stage2_api.errors import ConfigError
from stage2_cli.config_files import load_config
from stage2_cli.inspect_sample import inspect_sample
from stage2_cli.requests import InspectionRequest
from stage2_cli.validate import validate_files
from stage2_trainer.checks.preflight import checked_records
from tests.unit.api.grpo_configs import GOOD
from tests.unit.api.wrong_jobs import merge_patch
from tests.unit.cli.test_light_start import MATCHING

METADATA = {"_fusion_template": "summary_bbu", "_fusion_mode": "summary", "summary_ref": '{"items": []}'}
TOKENS = [f"<|coord_{k}|>" for k in (1, 2, 30, 999)]
SQUARE = [10, 20, 50, 40]
WRONG = None


@dataclass(frozen=True)
class Case:
    """A record and what readers make of it: the bins of its objects, or WRONG.

    pixels: what the configuration says of plain numbers; None: nothing.
    """

    record: dict[str, Any]
    bins: list[list[int]] | None
    pixels: bool | None = False


def record(**changes: Any) -> dict[str, Any]:
    whole = {"images": ["a.png"], "width": 100, "height": 50, "objects": [], "metadata": METADATA} | changes
    return {key: value for key, value in whole.items() if value != "absent"}


def box(value: Any, **more: Any) -> dict[str, Any]:
    return record(objects=[{"desc": "cat", "bbox_2d": value, **more}])


OBJECTS = {
    "numbers are bins": Case(box(SQUARE), [SQUARE]),
    "numbers are pixels": Case(box(SQUARE), [[100, 400, 500, 800]], pixels=True),
    "tokens among pixels of other objects": Case(
        record(objects=[{"desc": "a", "bbox_2d": TOKENS}, {"desc": "b", "bbox_2d": SQUARE}]),
        [[1, 2, 30, 999], [100, 400, 500, 800]],
        pixels=True,
    ),
    "bins by the record's word": Case(box(SQUARE) | {"units": "bins"}, [SQUARE], pixels=None),
    "pixels by the record's word": Case(box(SQUARE) | {"units": "pixels"}, [[100, 400, 500, 800]], pixels=None),
    "bins by both words": Case(box(SQUARE) | {"units": "bins"}, [SQUARE]),
    "tokens, and nobody says anything": Case(box(TOKENS), [[1, 2, 30, 999]], pixels=None),
    "tokens that are called bins": Case(box(TOKENS) | {"units": "bins"}, [[1, 2, 30, 999]], pixels=None),
    "numbers, and nobody says anything": Case(box(SQUARE), WRONG, pixels=None),
    "a record that contradicts the configuration": Case(box(SQUARE) | {"units": "bins"}, WRONG, pixels=True),
    "the same the other way round": Case(box(SQUARE) | {"units": "pixels"}, WRONG),
    "a box in pairs": Case(box([[10, 20], [50, 40]]), [SQUARE]),
    "bins that round into the range": Case(box([-0.4, 2.5, 3.5, 999.4]), [[0, 2, 4, 999]]),
    "a geometry that is null": Case(box(SQUARE, poly=None), [SQUARE]),
    "keys that nobody knows": Case(box(SQUARE, score=1), [SQUARE]),
    "a bin beyond the last": Case(box([1, 2, 3, 999.6]), WRONG),
    "a token in other digits": Case(box([*TOKENS[:3], "<|coord_३|>"]), WRONG),
    "true": Case(box([0, 0, 1, True]), WRONG),
    "no width": Case(box(SQUARE) | {"width": None}, WRONG),
}
LINES = {
    "no objects": Case(record(), []),
    "an image as text": Case(record(images="a.png"), WRONG),
    "a summary that is none": Case(record(summary=3), WRONG),
}


def configs(folder: Path, case: Case) -> tuple[Path, Path]:
    """A matching run and a GRPO run over one record."""
    Image.new("RGB", (100, 50)).save(folder / "a.png")
    (folder / "train.jsonl").write_text(json.dumps(case.record) + "\n", encoding="utf-8")
    says = {} if case.pixels is None else {"skip_bbox_norm": not case.pixels}
    custom = {"train_jsonl": str(folder / "train.jsonl"), "coord_tokens": says}
    one_prompt = merge_patch(GOOD, {"rlhf": {"num_generations": GOOD["rlhf"]["generation_batch_size"]}})
    for name, run in (("matching", MATCHING), ("grpo", one_prompt)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(merge_patch(run, {"custom": custom})), encoding="utf-8")
    return folder / "matching.yaml", folder / "grpo.yaml"


def learnt(config: Path) -> list[list[int]] | None:
    try:
        (one,) = checked_records(load_config(config), world_size=1).train
    except ConfigError:
        return WRONG
    return [list(found.bins) for found in one.objects]


def inspected(config: Path, capsys: pytest.CaptureFixture[str]) -> list[list[int]] | None:
    answer = config.with_name("answer.txt")
    answer.write_text("{}")
    try:
        inspect_sample(InspectionRequest(config=config, sample=0, response_file=answer, as_json=True))
    except ConfigError:
        return WRONG
    return [found["bins"] for found in json.loads(capsys.readouterr().out)["ground_truth"]]


@pytest.mark.parametrize("case", [*OBJECTS.values(), *LINES.values()], ids=[*OBJECTS, *LINES])
def test_validate_inspect_and_learn_read_objects_alike(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    matching, _ = configs(tmp_path, case)
    assert inspected(matching, capsys) == case.bins
    assert learnt(matching) == case.bins
    assert validate_files([matching]) == (64 if case.bins is WRONG else 0)


@pytest.mark.parametrize("case", LINES.values(), ids=LINES)
def test_grpo_validates_everything_but_objects_like_rollout_matching(case: Case, tmp_path: Path) -> None:
    _, grpo = configs(tmp_path, case)
    assert learnt(grpo) == case.bins
    assert validate_files([grpo]) == (64 if case.bins is WRONG else 0)


@pytest.mark.parametrize("case", OBJECTS.values(), ids=OBJECTS)
def test_grpo_on_summaries_reads_no_objects(case: Case, tmp_path: Path) -> None:
    _, grpo = configs(tmp_path, case)
    assert learnt(grpo) == []
    assert validate_files([grpo]) == 0


@pytest.mark.parametrize("case", OBJECTS.values(), ids=OBJECTS)
def test_grpo_on_objects_reads_them_like_rollout_matching(case: Case, tmp_path: Path) -> None:
    _, grpo = configs(tmp_path, case)
    on_objects = {
        "rlhf": {"reward_funcs": ["objects.f1", "objects.iou"]},
        "custom": {"use_summary": None, "grpo": None},
    }
    grpo.write_text(yaml.safe_dump(merge_patch(yaml.safe_load(grpo.read_text()), on_objects)))
    assert learnt(grpo) == case.bins
    assert validate_files([grpo]) == (64 if case.bins is WRONG else 0)


@pytest.mark.parametrize("changes", [{"width": 50}, {"height": 51}])
def test_wrong_image_size_is_refused(
    changes: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    matching, _ = configs(tmp_path, Case(box(TOKENS) | changes, WRONG))
    assert learnt(matching) is WRONG
    assert validate_files([matching]) == 64
    shown = capsys.readouterr().err
    assert "train.jsonl:1 width, height: '" in shown
    assert "its image has 100x50 as it is shown" in shown


def test_objects_may_be_absent_only_if_not_trained_on(tmp_path: Path) -> None:
    bare = Case(record(objects="absent", width="absent", height="absent"), [])
    matching, grpo = configs(tmp_path, bare)
    assert learnt(grpo) == []
    assert learnt(matching) is WRONG
    assert (validate_files([matching]), validate_files([grpo])) == (64, 0)


def test_grpo_record_without_summary_template_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    matching, grpo = configs(tmp_path, Case(record(metadata="absent"), []))
    assert learnt(matching) == []
    assert validate_files([grpo]) == 64
    assert "train.jsonl:1 metadata._fusion_template\n    rule: must be the template" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"train\.jsonl:1 metadata\._fusion_template"):
        checked_records(load_config(grpo), world_size=1)
