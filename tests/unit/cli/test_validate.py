"""`stage2 validate`: what a person sees, and the exit code that scripts see."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stage2_cli.validate import validate_files
from tests.unit.api.wrong_jobs import good_job, merge_patch

ROOT = Path(__file__).parents[3]
STAGE2 = str(Path(sys.executable).with_name("stage2"))


def validate(*files: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([STAGE2, "validate", *map(str, files)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["job-3v1.yaml", "job-3v1-tiny.yaml"])
def test_the_examples_are_valid(name: str) -> None:
    done = validate(ROOT / "examples" / name)
    assert done.returncode == 0, done.stderr
    assert "valid RolloutMatchingJob" in done.stdout


def test_a_mistake_is_told_with_path_value_rule_and_way_out_and_exit_code_64(tmp_path: Path) -> None:
    job = merge_patch(good_job(), {"spec": {"config": {"training": {"learning_rat": 1e-4}}}})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    done = validate(tmp_path / "job.yaml")
    assert done.returncode == 64
    assert "spec.config.training.learning_rat: 0.0001" in done.stderr
    assert "rule:" in done.stderr
    assert "learning_rate" in done.stderr.partition("way out:")[2]


def test_a_pod_template_that_the_controller_would_refuse_is_refused_here_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = {"spec": {"hostNetwork": True, "containers": [{"name": "server", "command": ["bash"]}]}}
    job = merge_patch(good_job(), {"spec": {"rollout": {"template": template}}})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    assert validate_files([tmp_path / "job.yaml"]) == 64
    told = capsys.readouterr().err
    assert "spec.rollout.template.spec.hostNetwork" in told
    assert "spec.rollout.template.spec.containers[0].command" in told


def test_one_wrong_file_among_right_ones_still_fails(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("kind: RolloutMatchingJob\n")
    done = validate(ROOT / "examples" / "job-3v1-tiny.yaml", tmp_path / "wrong.yaml")
    assert done.returncode == 64
    assert "job-3v1-tiny.yaml: valid" in done.stdout
