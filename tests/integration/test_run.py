"""`stage2 run` and `stage2 report`: the tiny job as processes, from a person's file to the picture they look at."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from PIL import Image

from stage2_trainer.sync.fleet.merge_location import FOLDERS_AGREE
from tests.integration import runs
from tests.integration.runs import JOB, stage2

STEPS = 2


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run: two steps of the example job, on CPU stubs."""
    folder = tmp_path_factory.mktemp("run")
    runs.run_example(
        folder, train=8, held_out=4, training={"max_steps": STEPS, "eval_steps": STEPS, "effective_batch_size": 4}
    )
    return folder


@pytest.fixture(scope="module")
def records(finished: Path) -> list[dict]:
    return runs.records(finished)


def test_learner_logs_reproducibility_record(records: list[dict]) -> None:
    (record,) = [record for record in records if record["event"] == "reproducibility"]
    ports = [int(url.rpartition(":")[2]) for url in record["servers"]]
    assert ports == list(range(ports[0], ports[0] + runs.SERVERS))
    how = {"merge": "server", "merge_reason": FOLDERS_AGREE, "transport": "tcp"}
    assert record["sync"] == {"requested": "full", "effective": "full", **how}
    assert record["dataset"]["records"] == 8
    assert record["engines"] == ["the CPU stub"] * runs.SERVERS
    assert len(record["config_sha256"]) == 64


def test_every_step_pushes_weights_before_rollouts(records: list[dict]) -> None:
    steps = [record for record in records if record["event"] == "step"]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert [record["sync/version"] for record in steps] == list(range(STEPS))
    syncs = {(step["sync/transport"], step["sync/merge"], step["sync/merge_reason"]) for step in steps}
    assert syncs == {("", "", ""), ("tcp", "server", FOLDERS_AGREE)}, (
        "the evaluation at the start has pushed for the first step"
    )


def test_termination_log_reports_end_of_run(finished: Path) -> None:
    last = json.loads((finished / "etc" / "termination-log").read_text())
    assert (last["phase"], last["step"], last["maxSteps"]) == ("done", STEPS, STEPS)


def test_no_server_outlives_run(finished: Path) -> None:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(finished) not in listed


def test_report_command_prints_tables_and_draws_picture(finished: Path) -> None:
    picture = finished / "rollouts.png"
    words = "report", finished / "logs" / "learner.log", "--picture", picture
    lost = stage2(*words)
    assert (lost.returncode, "--images" in lost.stderr) == (64, True), lost.stderr
    done = stage2(*words, "--images", finished / "shapes" / "images")
    assert done.returncode == 0, done.stderr
    assert "Training steps" in done.stdout
    assert "Held-out records" in done.stdout
    with Image.open(picture) as image:
        assert image.width > 3 * 250


def test_job_with_unmapped_volume_is_refused(tmp_path: Path) -> None:
    job = yaml.safe_load(JOB.read_text())
    job["spec"]["volumes"] = [{"name": "data", "mountPath": "/data", "persistentVolumeClaim": {"claimName": "d"}}]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    done = stage2("run", tmp_path / "job.yaml", "--work-dir", tmp_path / "work", "--cpu")
    assert done.returncode == 64
    assert "--map /data=FOLDER" in done.stderr
