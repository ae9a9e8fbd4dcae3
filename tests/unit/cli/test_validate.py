"""`stage2 validate`: its output, its exit code, and its check of local data files."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from stage2_cli.config_files import load_job
from stage2_cli.validate import FIRST_RECORDS, unchecked_rewards, validate_files
from stage2_trainer.data.images import BLANK_SIDE, blank_image
from tests.unit.api.wrong_jobs import good_job, merge_patch
from tests.unit.cli.test_light_start import MATCHING

ROOT = Path(__file__).parents[3]
STAGE2 = str(Path(sys.executable).with_name("stage2"))


def validate(*files: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([STAGE2, "validate", *map(str, files)], capture_output=True, text=True, check=False)


def test_mistake_is_reported_with_path_rule_and_fix_and_exit_code_64(tmp_path: Path) -> None:
    job = merge_patch(good_job(), {"spec": {"config": {"training": {"learning_rat": 1e-4}}}})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    done = validate(tmp_path / "job.yaml")
    assert done.returncode == 64
    assert "spec.config.training.learning_rat: 0.0001" in done.stderr
    assert "rule:" in done.stderr
    assert "learning_rate" in done.stderr.partition("fix:")[2]


def test_template_refused_by_controller_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = {"spec": {"hostNetwork": True, "containers": [{"name": "server", "command": ["bash"]}]}}
    job = merge_patch(good_job(), {"spec": {"rollout": {"template": template}}})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    assert validate_files([tmp_path / "job.yaml"]) == 64
    shown = capsys.readouterr().err
    assert "spec.rollout.template.spec.hostNetwork" in shown
    assert "spec.rollout.template.spec.containers[0].command" in shown


def test_single_invalid_file_among_valid_ones_fails(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("kind: RolloutMatchingJob\n")
    done = validate(ROOT / "examples" / "job-3v1-tiny.yaml", tmp_path / "wrong.yaml")
    assert done.returncode == 64
    assert "job-3v1-tiny.yaml: valid" in done.stdout


def test_data_file_can_be_validated_directly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = tmp_path / "train.jsonl"
    Image.new("RGB", (64, 48)).save(tmp_path / "a.png")
    record = {"images": ["a.png"], "width": 64, "height": 48, "objects": []}
    records.write_text(f"{json.dumps(record)}\n{json.dumps(record)}\n")
    assert validate_files([records]) == 0
    assert f"{records}: valid data file\n  records: {records}: 2 valid records, 0 objects\n" == capsys.readouterr().out
    records.write_text(f"{json.dumps(record)}\n{json.dumps(record | {'width': 63})}\n")
    assert validate_files([records]) == 64
    shown = capsys.readouterr()
    assert "train.jsonl:2" in shown.err
    assert "data file" not in shown.out


def test_unknown_reward_is_refused_with_suggestion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = yaml.safe_load((ROOT / "examples" / "job-grpo-objects-tiny.yaml").read_text())
    job["spec"]["config"]["rlhf"]["reward_funcs"][1] = "objects.iuo"
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    assert validate_files([tmp_path / "job.yaml"]) == 64
    shown = capsys.readouterr().err
    assert "spec.config.rlhf.reward_funcs[1]: 'objects.iuo'" in shown
    assert "objects.box_f1, objects.count, objects.f1, objects.f1_class" in shown
    assert "did you mean objects.iou?" in shown


GOOD: dict[str, Any] = {
    "images": [blank_image()],
    "width": BLANK_SIDE,
    "height": BLANK_SIDE,
    "units": "bins",
    "objects": [{"desc": "a", "bbox_2d": [1, 2, 3, 4]}, {"desc": "b", "poly": [1, 2, 3, 4, 5, 6]}],
}


def write_records(path: Path, *changes: dict[str, Any], times: int = 1) -> Path:
    path.write_text("".join(json.dumps(GOOD | change) + "\n" for change in changes) * times)
    return path


def write_run(folder: Path, **custom: Any) -> Path:
    (folder / "run.yaml").write_text(yaml.safe_dump(merge_patch(MATCHING, {"custom": custom})))
    return folder / "run.yaml"


def write_job(folder: Path, volumes: list[dict[str, Any]], train: str) -> Path:
    claims = [
        {"name": name, "mountPath": f"/{name}", "persistentVolumeClaim": {"claimName": name}}
        for name in ("models", "output")
    ]
    spec = {"volumes": [*volumes, *claims], "config": {"custom": {"train_jsonl": train}}}
    job = merge_patch(good_job(), {"spec": spec})
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def test_records_and_objects_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = write_records(tmp_path / "train.jsonl", {}, {}, {"objects": []})
    assert validate_files([write_run(tmp_path, train_jsonl=str(train))]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/run.yaml: valid training configuration",
        f"  custom.train_jsonl: {train}: 3 valid records, 4 objects (2 bbox_2d, 2 poly)",
        "  not checked: GPUs, memory, disk and ports: `stage2 doctor` checks them where the run will be",
    ]


def test_round_of_rollouts_with_too_few_records_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = write_records(tmp_path / "train.jsonl", {}, {})
    job = yaml.safe_load((ROOT / "examples" / "job-grpo-objects-tiny.yaml").read_text())
    run = merge_patch(job["spec"]["config"], {"custom": {"train_jsonl": str(train)}})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    assert validate_files([tmp_path / "run.yaml"]) == 64
    assert "records, and custom.train_jsonl has 2\n" in capsys.readouterr().err


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}}


@pytest.mark.parametrize(
    ("deepspeed", "words"),
    [
        (zero(3), "deepspeed.zero_optimization.stage: 3\n    rule: weights that ZeRO has partitioned cannot be pushed"),
        (zero(2) | {"bf16": True}, "deepspeed.bf16: true\n    rule: must be a mapping"),
        (zero(2) | {"scheduler": {"type": "WarmupLR"}}, "takes the place of training.vit_lr"),
        ("zero2", "deepspeed: 'zero2'\n    rule: must be a DeepSpeed configuration or the path of one; named presets"),
        ("/data/zero.json", "zero_optimization.stage: 0\n    rule: must be 1, 2 or 3"),
    ],
)
def test_deepspeed_that_learner_would_refuse_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], deepspeed: Any, words: str
) -> None:
    """It was called valid, and the job's learner ended with exit code 64."""
    (tmp_path / "zero.json").write_text(json.dumps(zero(0)))
    write_records(tmp_path / "train.jsonl", {})
    data = {"name": "data", "mountPath": "/data", "hostPath": {"path": str(tmp_path)}}
    path = write_job(tmp_path, [data], "/data/train.jsonl")
    job = merge_patch(yaml.safe_load(path.read_text()), {"spec": {"config": {"training": {"vit_lr": 1e-6}}}})
    path.write_text(yaml.safe_dump(merge_patch(job, {"spec": {"config": {"deepspeed": deepspeed}}})))
    assert validate_files([path]) == 64
    assert words in capsys.readouterr().err


def test_deepspeed_file_of_another_machine_is_not_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, train_jsonl=str(write_records(tmp_path / "train.jsonl", {})))
    run.write_text(yaml.safe_dump(yaml.safe_load(run.read_text()) | {"deepspeed": {"config": "/lost/zero.json"}}))
    assert validate_files([run]) == 0
    assert "  not checked: deepspeed: /lost/zero.json: not on this machine\n" in capsys.readouterr().out


def test_broken_lines_of_train_and_held_out_files_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = write_records(tmp_path / "train.jsonl", {}, {"width": 0}, times=40)
    held_out = write_records(tmp_path / "val.jsonl", {"images": ["lost.png"]}, {"height": "9"})
    assert validate_files([write_run(tmp_path, train_jsonl=str(train), val_jsonl=str(held_out))]) == 64
    shown = capsys.readouterr()
    assert f"{tmp_path}/run.yaml: broken data of a training configuration" in shown.out
    assert "40 valid records, 40 broken, 80 objects" in shown.out
    for line in range(2, 81, 2):
        assert f"{train}:{line} width: 0\n    rule: must be a positive integer\n    fix:  write the" in shown.err
    assert f"{held_out}:2 height: '9'" in shown.err
    assert f"{held_out} images: ['{tmp_path}/lost.png']\n    rule: 1 image is missing" in shown.err


def test_only_first_records_are_read_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = write_records(tmp_path / "train.jsonl", {}, times=FIRST_RECORDS)
    with train.open("a") as file:
        file.write("{}\n")
    run = write_run(tmp_path, train_jsonl=str(train))
    assert validate_files([run]) == 0
    assert "; only the first 1,000 records, --all-records reads all" in capsys.readouterr().out
    assert validate_files([run], all_records=True) == 64
    assert f"{train}:{FIRST_RECORDS + 1} width" in capsys.readouterr().err
    assert validate_files([write_run(tmp_path, train_jsonl=str(train), train_sample_limit=3)], all_records=True) == 0
    assert "3 valid records, 6 objects (3 bbox_2d, 3 poly)\n" in capsys.readouterr().out


def test_data_file_on_other_machine_is_not_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate_files([write_run(tmp_path, train_jsonl="/nowhere/train.jsonl")]) == 0
    assert "  not checked: custom.train_jsonl: /nowhere/train.jsonl: not on this machine" in capsys.readouterr().out


def test_folder_in_place_of_data_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate_files([write_run(tmp_path, train_jsonl=str(tmp_path))]) == 64
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize("sub_path", [None, "sets/shapes"])
def test_host_path_volume_is_followed_to_data_file(
    sub_path: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / (sub_path or "")
    folder.mkdir(parents=True, exist_ok=True)
    train = write_records(folder / "train.jsonl", {})
    volume = {"name": "data", "mountPath": "/data", "hostPath": {"path": str(tmp_path)}}
    job = write_job(tmp_path, [volume | ({"subPath": sub_path} if sub_path else {})], "/data/train.jsonl")
    assert validate_files([job]) == 0
    assert f"  custom.train_jsonl: {train}: 1 valid record, 2 objects" in capsys.readouterr().out


def test_data_in_claim_is_checked_only_if_mapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_records(tmp_path / "train.jsonl", {"width": 0})
    volume = {"name": "data", "mountPath": str(tmp_path), "persistentVolumeClaim": {"claimName": "data"}}
    job = write_job(tmp_path, [volume], str(tmp_path / "train.jsonl"))
    assert validate_files([job]) == 0
    assert "not on this machine" in capsys.readouterr().out
    assert validate_files([job], mapped=[f"{tmp_path}={tmp_path}"]) == 64
    assert "train.jsonl:1 width" in capsys.readouterr().err


def test_unchecked_parts_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["model.model=/models/mine", "custom.train_jsonl=/data/train.jsonl"]
    assert validate_files([ROOT / "examples" / "job-grpo-objects.yaml"], changes=changes) == 0
    shown = capsys.readouterr().out
    assert "  not checked: model.model: /models/mine: not on this machine\n" in shown
    assert "  not checked: custom.train_jsonl: /data/train.jsonl: not on this machine\n" in shown
    assert "stage2 doctor" in shown
    assert "rlhf.reward_funcs" not in shown, "all are of stage2"


def test_installed_reward_package_is_noted_as_possibly_missing_in_image() -> None:
    changes = ["rlhf.reward_funcs=[mine.reward, objects.f1]", "rlhf.reward_weights=[1.0, 1.0]"]
    job = load_job(ROOT / "examples" / "job-grpo-objects.yaml", changes)
    (line,) = [line for line in unchecked_rewards(job.spec.config) if "mine.reward" in line]
    assert "the job's image" in line


def test_json_option_prints_result_per_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wrong.yaml").write_text("training: {seed: x}\n")
    train = write_records(tmp_path / "train.jsonl", {})
    right = write_run(tmp_path, train_jsonl=str(train))
    assert validate_files([right, tmp_path / "wrong.yaml"], as_json=True) == 64
    first, second = json.loads(capsys.readouterr().out)
    assert (first["file"], first["valid"], first["kind"]) == (str(right), True, "training configuration")
    assert first["checked"] == [f"custom.train_jsonl: {train}: 1 valid record, 2 objects (1 bbox_2d, 1 poly)"]
    assert (second["valid"], second["kind"]) == (False, None)
    assert {"path", "value", "rule", "way_out"} == set(second["problems"][0])


def test_output_folder_lost_with_pod_causes_warning(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "examples" / "job-3v1-tiny.yaml"
    assert validate_files([path]) == 0
    warned = capsys.readouterr().err
    assert "1 warning" in warned
    assert "spec.config.training.output_dir: '/output/job-3v1-tiny'" in warned
    assert "starts again at step 0" in warned
    assert "persistentVolumeClaim" in warned
    assert validate_files([path], as_json=True) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert [one["path"] for one in found["warnings"]] == ["spec.config.training.output_dir"]
    assert validate_files([ROOT / "examples" / "job-3v1.yaml"]) == 0
    assert "warning" not in capsys.readouterr().err
