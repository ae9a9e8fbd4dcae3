"""`stage2 run`: visible GPUs and ports, the start of servers and learner, their failures, and the console."""

import json
import os
import shutil
import signal
import socket
import time
from contextlib import closing
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest
from PIL import Image

from stage2_api.errors import ConfigError
from stage2_api.kubernetes_types import HostPathSource
from stage2_api.training import Training
from stage2_cli import run
from stage2_cli.config_files import load_job
from stage2_cli.processes import LocalProcess, gpus_hidden, learner_ports, require_gpus, visible_devices
from stage2_cli.requests import RunRequest
from stage2_cli.run import Watcher, console, describe
from stage2_controller.job.containers import Container, LearnerPorts
from tests.support.patience import crowding

STEP = {"event": "step", "step": 1, "loss": 2.0}
EVALUATION = {"event": "evaluation", "step": 3}


@pytest.mark.parametrize(
    ("record", "line"),
    [
        ({**STEP, "supervised/objects": 31.0}, "step 1: loss 2.000, 31 objects"),
        ({**STEP, "reward": 0.2}, "step 1: loss 2.000, mean reward 0.200"),
        ({**STEP, "reward": None}, "step 1: loss 2.000, mean reward –"),
        ({**EVALUATION, "eval_reward": None}, "evaluation at step 3: mean reward –"),
        (
            {**STEP, "rollout/matched_maskiou_count": 2.0, "rollout/gt_objects": 5.0},
            "step 1: loss 2.000, matched 2 of 5 objects",
        ),
        (
            {**STEP, "supervised/objects": 31.0, "rollout/decode_steps_per_token": 0.188, "bad_samples_total": 2.0},
            "step 1: loss 2.000, 31 objects, 0.19 decode steps a token; 2 samples set aside so far",
        ),
        (
            {**STEP, "reward": 0.2, "rollout/decode_steps_per_token": None},
            "step 1: loss 2.000, mean reward 0.200",
        ),
        (
            {**STEP, "supervised/objects": 31.0, "bad_samples_total": 1.0},
            "step 1: loss 2.000, 31 objects; 1 sample set aside so far",
        ),
        ({**EVALUATION, "eval_reward": 0.625}, "evaluation at step 3: mean reward 0.625"),
        (
            {**EVALUATION, "eval_rollout_f1_iou50": 0.25},
            "evaluation at step 3, IoU 0.5: F1 of training's matching 0.250",
        ),
        (
            {**EVALUATION, "eval_rollout_f1": 0.9, "eval_rollout_f1_iou50": 0.25, "eval_rollout_f1_class_iou50": 0.125},
            "evaluation at step 3, IoU 0.5: F1 with class 0.125, F1 of training's matching 0.250",
        ),
        (
            {**EVALUATION, "eval_rollout_f1_iou50": None, "eval_rollout_f1_class_iou50": None},
            "evaluation at step 3, IoU 0.5: F1 with class –, F1 of training's matching –",
        ),
        ({"event": "start", "step": 0, "max_steps": 9}, None),
        ({"event": "start", "step": 6, "max_steps": 9}, "resumed after step 6 of 9"),
        ({"event": "bad_sample", "sample_id": "a", "reason": "[gone]"}, "sample a is set aside: [gone]"),
    ],
)
def test_log_record_is_described_in_single_line(record, line):
    assert describe(record) == line


def test_only_complete_new_log_lines_are_shown(tmp_path, capsys):
    console.cache_clear()
    log = tmp_path / "learner.log"
    log.write_text('{"event": "step", "step": 1, "loss": 9.0, "reward": 0.5}\n')
    with closing(Watcher(log)) as watcher, log.open("a") as file:
        for piece in ('noise\n{"event": "step", "step": 2, ', '"loss": 1.0, "reward": 0.25}\n', ""):
            file.write(piece)
            file.flush()
            watcher.refresh()
    assert capsys.readouterr().out == "step 2: loss 1.000, mean reward 0.250\n"
    console.cache_clear()


def test_loading_learner_is_shown_without_step(capsys):
    console.cache_clear()
    bodies = [{"phase": "loading"}, {"phase": "done", "step": 3, "maxSteps": 3}]
    with closing(Watcher(progress=lambda: json.dumps(bodies.pop(0)).encode())) as watcher:
        watcher.refresh()
        watcher.refresh()
    assert capsys.readouterr().out == "learner: loading\nlearner: done, step 3 of 3\n"
    console.cache_clear()


ROOT = Path(__file__).parents[3]
MAPPED = {"/opt/stage2/examples/few": ROOT, "/opt/stage2/examples/tiny-few": ROOT}


def started(folder: Path, monkeypatch: pytest.MonkeyPatch, *, server: str, deadline_s: int) -> int:
    """The exit code of a run whose servers are a line of shell, and whose learner may never start."""

    def process(local: run.LocalRun, container: Container, gpus: object) -> LocalProcess:
        assert container.name != "learner"
        return LocalProcess(container.name, ["sh", "-c", server], {}, local.work_dir / "logs" / f"{container.name}.log")

    monkeypatch.setattr(run.LocalRun, "process", process)
    local = run.prepare(load_job(ROOT / "examples" / "job-3v1-tiny.yaml"), MAPPED, folder, "stub")
    learner = local.job.spec.learner.model_copy(update={"start_deadline_seconds": deadline_s})
    spec = local.job.spec.model_copy(update={"learner": learner})
    return run._run(replace(local, job=local.job.model_copy(update={"spec": spec})))


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, r"train\.jsonl:1 objects\[0\]\.bbox_2d: .*plain numbers must say"),
        ({"units": "pixels", "width": 96}, "97x96"),
        (None, "no such file"),
    ],
    ids=["units that nobody says", "a width that the image has not", "no file"],
)
def test_data_errors_are_reported_before_servers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object] | None, shown: str
) -> None:
    monkeypatch.setattr(run.LocalRun, "process", lambda *_: pytest.fail("a process was started"))
    Image.new("RGB", (97, 96)).save(tmp_path / "a.png")
    line = {"images": ["a.png"], "width": 97, "height": 96, "objects": [{"desc": "a", "bbox_2d": [1, 2, 3, 4]}]}
    for name in ("train", "held-out") if changes is not None else ():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line | (changes or {})))
    places = {**MAPPED, "/opt/stage2/examples/few": tmp_path}
    mapped = [f"{container}={place}" for container, place in places.items()]
    with pytest.raises(ConfigError, match=shown):
        run.run_job(
            RunRequest(ROOT / "examples" / "job-3v1-tiny.yaml", mapped=mapped, work_dir=tmp_path / "run", engine="stub")
        )


def write_data(folder: Path) -> None:
    """Write the data files of the tiny jobs, of one record each."""
    Image.new("RGB", (97, 96)).save(folder / "a.png")
    objects = [{"desc": "a", "bbox_2d": [1, 2, 3, 4]}]
    line = {"images": ["a.png"], "width": 97, "height": 96, "units": "pixels", "objects": objects}
    for name in ("train", "held-out"):
        (folder / f"{name}.jsonl").write_text(json.dumps(line) + "\n")


@pytest.mark.parametrize(
    ("file", "exists", "rule"),
    [
        ("job-3v1-tiny.yaml", False, "there is no such folder; train stage 1 first and export it to this folder"),
        ("job-3v1-tiny.yaml", True, "there is no config.json; train stage 1 first"),
        ("job-stage1-tiny.yaml", False, "there is no such folder; let `stage2 prepare MODEL"),
    ],
)
def test_missing_or_unexported_model_is_reported_before_servers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, exists: bool, rule: str
) -> None:
    monkeypatch.setattr(run.LocalRun, "process", lambda *_: pytest.fail("a process was started"))
    exported = tmp_path / "models" / "stage1"
    if exists:
        exported.mkdir(parents=True)
    write_data(tmp_path)
    mapped = [f"/opt/stage2/examples/few={tmp_path}", f"/opt/stage2/examples/tiny-few={exported}"]
    with pytest.raises(ConfigError, match=rf"model\.model: '{exported}'; .*{rule}"):
        run.run_job(
            RunRequest(ROOT / "examples" / file, mapped=mapped, work_dir=tmp_path / "run", engine="stub", cpu=True)
        )


def test_too_little_disk_space_for_checkpoints_is_reported_before_servers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.LocalRun, "process", lambda *_: pytest.fail("a process was started"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))
    write_data(tmp_path)
    mapped = [
        f"/opt/stage2/examples/few={tmp_path}",
        f"/opt/stage2/examples/tiny-few={ROOT / 'examples' / 'tiny-few'}",
    ]
    with pytest.raises(ConfigError, match=r"training\.output_dir: '.*'; a checkpoint takes .* 0 MiB are free"):
        run.run_job(
            RunRequest(ROOT / "examples" / "job-3v1-tiny.yaml", mapped=mapped, work_dir=tmp_path / "run", engine="stub")
        )


def test_second_ctrl_c_kills_process_that_ignores_first(tmp_path: Path) -> None:
    asked_to_end = "trap 'kill -INT $PPID' TERM; echo on; while :; do sleep 0.1; done"
    hung = LocalProcess("server-0", ["sh", "-c", asked_to_end], {}, tmp_path / "server-0.log")
    hung.start()
    while hung.tail() != "on\n":
        time.sleep(0.01)
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            hung.stop()
    finally:
        signal.signal(signal.SIGINT, usual)
    assert hung.exit_code == -signal.SIGKILL


def test_finished_run_reports_saved_checkpoints_and_next_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["stage2", "run", "my job.yaml", "--overwrite"])
    training = Training(output_dir=str(tmp_path), lr_scheduler_type="constant")
    assert "nothing, so the run starts from its first step; to resume: stage2 run 'my job.yaml'" in (
        run._how_to_resume(training)
    )
    for step, best in ((2, None), (4, "/elsewhere/checkpoint-2")):
        (tmp_path / f"checkpoint-{step}").mkdir()
        state = {"global_step": step, "best_model_checkpoint": best}
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    assert run._how_to_resume(training).startswith(f"saved: {tmp_path}/checkpoint-4; to resume: ")
    assert f"best checkpoint: {tmp_path}/checkpoint-2. To export it: stage2 export {tmp_path}" in (
        run._what_is_next(training)
    )


def test_servers_that_never_answer_end_run_at_start_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deadline_s = ceil(2 * crowding())
    assert started(tmp_path, monkeypatch, server="echo still loading; sleep 60", deadline_s=deadline_s) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert f"did not answer within spec.learner.startDeadlineSeconds ({deadline_s} s)" in shown
    assert "still loading" in shown


@pytest.mark.parametrize(("ends_with", "shown"), [(64, 64), (3, 1)])
def test_server_exit_during_start_ends_run_with_64_only_for_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_with: int, shown: int
) -> None:
    assert started(tmp_path, monkeypatch, server=f"exit {ends_with}", deadline_s=60) == shown


def test_server_configuration_error_ends_run_with_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched(tmp_path, monkeypatch, server="exit 64", learner="sleep 60") == 64


def test_crashing_server_is_restarted_at_most_three_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = tmp_path / "starts"
    dies = f"echo >> {starts}; exit 3"
    outlives = f"until [ -e {starts} ] && [ $(wc -l < {starts}) -ge 4 ]; do sleep 0.1; done; sleep 5; exit 75"
    assert watched(tmp_path, monkeypatch, server=dies, learner=outlives) == 75
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("ended with exit code 3; restarting it") == 3
    assert shown.count("not restarting it after 3 restarts") == 1


@pytest.mark.parametrize(
    ("last", "blamed"),
    [
        ("ERROR stage2_trainer.main: reward mine.f, record a: None; must return a number", 0),
        ("ERROR stage2_trainer.main: server {0}: rollout: answered 500", 1),
    ],
)
def test_learner_error_blames_only_server_it_mentions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], last: str, blamed: int
) -> None:
    url = run.prepare(load_job(ROOT / "examples" / "job-3v1-tiny.yaml"), MAPPED, tmp_path, "stub").workload.addresses[0]
    plan = f"INFO stage2_trainer.rollouts.http: step 0: 4 rollouts: server {url.base_url} requests 0..3"
    line = f"echo '2026 {plan}'; echo '2026 {last.format(url.base_url)}'; exit 64"
    assert watched(tmp_path, monkeypatch, server="sleep 60", learner=line) == 64
    assert capsys.readouterr().out.count("is mentioned there") == blamed


def watched(folder: Path, monkeypatch: pytest.MonkeyPatch, *, server: str, learner: str) -> int:
    """The exit code of a learner, which is a line of shell, beside three servers; the first is another such line."""
    monkeypatch.setattr(run, "_POLL_S", 0.05)
    local = run.prepare(load_job(ROOT / "examples" / "job-3v1-tiny.yaml"), MAPPED, folder, "stub")
    processes = [
        LocalProcess(name, ["sh", "-c", line], {}, folder / "logs" / f"{name}.log")
        for name, line in zip(
            ("server-0", "server-1", "server-2", "learner"), (server, "sleep 60", "sleep 60", learner), strict=True
        )
    ]
    for process in processes:
        process.start()
    try:
        return run._watch(local, processes[-1], processes[:-1])
    finally:
        for process in processes:
            process.stop()


@pytest.mark.parametrize(("kind", "made"), [("Directory", False), ("File", False), ("Directory", True), ("", False)])
def test_missing_host_path_is_reported_before_servers_start(tmp_path: Path, kind: str, made: bool) -> None:
    job = load_job(ROOT / "examples" / "job-3v1.yaml")
    place = tmp_path / "models"
    if made:
        place.mkdir()
    volumes = [
        volume.model_copy(update={"host_path": HostPathSource(path=str(place), type=kind)})
        if volume.mount_path == "/models"
        else volume.model_copy(update={"host_path": HostPathSource(path=str(tmp_path))})
        for volume in job.spec.volumes
    ]
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"volumes": volumes})})
    if made or not kind:
        run.prepare(job, {}, tmp_path / "work", "stub")
        return
    with pytest.raises(ConfigError, match=rf"hostPath\.path: .*{kind} requires one.*--map /models="):
        run.prepare(job, {}, tmp_path / "work", "stub")


def named(value):
    return {} if value is None else {"CUDA_VISIBLE_DEVICES": value}


@pytest.mark.parametrize(
    ("visible", "first", "last"),
    [
        (None, "0,1,2", "3"),
        ("4,5,6,7", "4,5,6", "7"),
        ("GPU-a, GPU-b,GPU-c,GPU-d", "GPU-a,GPU-b,GPU-c", "GPU-d"),
        ("", "", ""),
    ],
)
def test_gpu_indices_count_among_visible_devices(visible, first, last):
    require_gpus(4, named(visible), found=8)
    assert visible_devices(range(3), named(visible)) == first
    assert visible_devices(range(3, 4), named(visible)) == last


def test_too_few_visible_gpus_are_refused():
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES: '4,5'.*needs, which is 4"):
        require_gpus(4, named("4,5"))


@pytest.mark.parametrize("visible", [None, "0,1,2,3"])
def test_missing_gpus_are_reported_unless_hidden_on_purpose(visible):
    with pytest.raises(ConfigError, match=r"spec\.rollout, spec\.learner: '4 GPUs'; .* has 0; .*--cpu"):
        require_gpus(4, named(visible), found=0)
    require_gpus(4, named(""), found=0)
    require_gpus(0, named(visible), found=0)


def test_mig_devices_count_as_gpus():
    parts = named("MIG-a,MIG-b,MIG-c,MIG-d")
    require_gpus(4, parts, found=1)
    assert visible_devices([3], parts) == "MIG-d"


def test_run_without_gpus_is_refused_unless_cpu_is_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("stage2_cli.processes.gpu_count", lambda: 0)
    job = load_job(ROOT / "examples" / "job-3v1-tiny.yaml")
    with pytest.raises(ConfigError, match="--cpu"):
        run.prepare(job, MAPPED, tmp_path, "vllm")
    text = (ROOT / "examples" / "job-3v1-tiny.yaml").read_text()
    (tmp_path / "no-gpu.yaml").write_text(text.replace("gpuResource: nvidia.com/gpu", "gpuResource: ''"))
    with gpus_hidden(True):
        run.prepare(load_job(tmp_path / "no-gpu.yaml"), MAPPED, tmp_path, "vllm")
        assert "GPU" not in capsys.readouterr().out, "the job asks for none"
        local = run.prepare(job, MAPPED, tmp_path, "vllm")
        assert local.process(local.workload.learner, [3]).env["CUDA_VISIBLE_DEVICES"] == ""
    assert "on the CPU: none of the 4 GPUs of the job are used" in capsys.readouterr().out
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize(("cores", "threads"), [(2, "1"), (8, "2")])
def test_cpu_learner_shares_cores_with_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, threads: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    job = load_job(ROOT / "examples" / "job-3v1-tiny.yaml")
    with gpus_hidden(True):
        local = run.prepare(job, MAPPED, tmp_path, "vllm")
        assert local.process(local.workload.learner, [3]).env["OMP_NUM_THREADS"] == threads
        assert "OMP_NUM_THREADS" not in local.process(local.workload.servers[0], [0]).env, "it takes its own part"
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        assert local.process(local.workload.learner, [3]).env["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize("engine", ["vllm", "stub"])
def test_too_short_list_of_visible_gpus_is_refused_for_every_engine(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES: '0'"):
        run.prepare(load_job(ROOT / "examples" / "job-3v1-tiny.yaml"), MAPPED, tmp_path, engine)


def test_cpu_servers_are_refused_if_vllm_is_built_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage2_trainer.serve.launch.installed_platform", lambda: "cuda")
    with gpus_hidden(True), pytest.raises(ConfigError, match=r"the build for GPUs.*cpu\.txt"):
        run._check_servers()


def used(ports: LearnerPorts) -> set[int]:
    return {ports.progress, ports.metrics, *range(ports.group, ports.group + 3)}


def test_concurrent_runs_use_different_ports():
    with learner_ports(3) as first, learner_ports(3) as second:
        assert not used(first) & used(second)


def test_finished_run_frees_its_ports():
    with learner_ports(3) as first:
        pass
    with learner_ports(3) as second:
        assert first == second


def test_ports_in_use_are_skipped():
    with learner_ports(3) as ports:
        pass
    with socket.socket() as other:
        other.bind(("127.0.0.1", ports.group + 1))
        other.listen()
        with learner_ports(3) as found:
            assert ports.group + 1 not in used(found)


def test_error_inside_port_reservation_is_raised():
    with pytest.raises(OSError, match="No space left"), learner_ports(3):
        raise OSError("No space left on device")
