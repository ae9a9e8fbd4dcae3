"""The main job, end to end, as a person starts it: chart, `kubectl apply`, real servers, real training, the record."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.support.clusters import Published, whole_record

ROOT = Path(__file__).parents[2]
JOB = "job-3v1-tiny"
RECORDS = 150
RISE = 0.01
"""Of F1 over some 575 held-out objects; the job's own rise is about three times that."""


@pytest.fixture(scope="module")
def demo(installed: Path, published: Published, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The output folder of `make demo-cluster`, run to its end beside another job; its own is removed afterwards."""
    folder = tmp_path_factory.mktemp("demo")
    environment = {
        **os.environ,
        "KUBECONFIG": str(installed),
        "STAGE2_CONTROLLER_IMAGE": published.controller,
        "STAGE2_TRAINER_IMAGE": published.trainer,
        "STAGE2_CHART": " ".join(published.chart),
    }
    try:
        done = subprocess.run(
            [ROOT / "hack" / "demo-cluster", folder], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (folder / "printed").write_text(done.stdout)
        yield folder
    finally:
        _kubectl(installed, "delete", "rmj", JOB, "--ignore-not-found")


def _kubectl(kubeconfig: Path, *arguments: str) -> str:
    command = ["kubectl", f"--kubeconfig={kubeconfig}", "--namespace=default", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def records(demo: Path) -> dict[str, list[dict]]:
    """What `kubectl logs` of the learner has, one list for each kind of event."""
    found: dict[str, list[dict]] = {}
    for line in (demo / "learner.log").read_text().splitlines():
        if line.startswith('{"event"'):
            found.setdefault(json.loads(line)["event"], []).append(json.loads(line))
    return found


def test_job_succeeds_with_complete_status(demo: Path, kubeconfig: Path) -> None:
    status = json.loads(_kubectl(kubeconfig, "get", "rmj", JOB, "--output=json"))["status"]
    assert status["phase"] == "Succeeded"
    assert status["step"] == status["maxSteps"] == 60
    assert _kubectl(kubeconfig, "wait", "rmj", JOB, "--for=condition=Succeeded", "--timeout=1s")
    assert status["reproducibility"]["dataset"]["records"] == RECORDS
    digests = {image["name"]: image["digest"] for image in status["images"]}
    assert set(digests) == {"server-0", "server-1", "server-2", "learner"}
    assert all("sha256:" in digest for digest in digests.values()), digests


def test_pods_run_pushed_image_digests(demo: Path, kubeconfig: Path, published: Published) -> None:
    """The images that this session built are in a registry, from which pods pull them by their digests."""
    if "@" not in published.trainer:
        pytest.skip("the images of this cluster are named without digests")
    status = json.loads(_kubectl(kubeconfig, "get", "rmj", JOB, "--output=json"))["status"]
    assert {image["digest"] for image in status["images"]} == {published.trainer.partition("@")[2]}
    pods = _kubectl(kubeconfig, "get", "pods", "--namespace=stage2-system", "--output=json")
    ran = [one["imageID"] for pod in json.loads(pods)["items"] for one in pod["status"]["containerStatuses"]]
    assert {one.partition("@")[2] for one in ran} == {published.controller.partition("@")[2]}


def test_learner_logs_reproducibility_record(records: dict[str, list[dict]]) -> None:
    record = whole_record(records["reproducibility"], merge="server")
    assert len(record["servers"]) == len(set(record["servers"])) == 3
    assert record["dataset"]["records"] == RECORDS


def test_every_step_trains_on_rollouts_of_weights_it_starts_from(records: dict[str, list[dict]]) -> None:
    steps = records["step"]
    assert [step["step"] for step in steps] == list(range(1, 61))
    assert [step["sync/version"] for step in steps] == list(range(60))


def test_training_raises_f1_of_real_servers_on_held_out_records(records: dict[str, list[dict]]) -> None:
    before, after = (evaluation["eval_rollout_f1_iou50"] for evaluation in records["evaluation"])
    assert after > before + RISE


def test_demo_ends_with_table_and_picture(demo: Path) -> None:
    assert "Training steps" in (demo / "printed").read_text()
    with Image.open(demo / "rollouts.png") as image:
        assert image.width > 3 * 250


def test_kubectl_plugin_prints_logs_and_writes_report_by_job_name(demo: Path, kubeconfig: Path) -> None:
    environment = {
        **os.environ,
        "KUBECONFIG": str(kubeconfig),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }

    def plugin(*arguments: str) -> str:
        command = ["kubectl", "stage2", *arguments, "--namespace=default"]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    assert plugin("logs", JOB) == (demo / "learner.log").read_text()
    page = demo / "report.html"
    plugin("report", JOB, f"--html={page}")
    assert "<svg" in page.read_text()
