"""The first hour on a GPU: its stages fit, and what they found is kept as it goes, whatever becomes of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from hack import gpu_carry, gpu_hour
from hack.gpu_hour import STAGES, Hour, Stage

from tests.support.patience import crowding

SUMMARY = "rehearsal/summary.md"
ROOT = Path(__file__).parents[3]


def stage(name: str, command: str, limit_s: float = 60.0) -> Stage:
    return Stage(name, "nothing", "nothing", limit_s, "exit 9", command)


def hour(stages: Sequence[Stage], folder: Path) -> Hour:
    return Hour(stages, folder / "rehearsal", rehearses=True)


def verdicts(folder: Path) -> dict[str, str]:
    found = json.loads((folder / "rehearsal/results.json").read_text())
    return {name: one["verdict"] for name, one in found.items()}


def test_stages_have_unique_names_and_fit_time_budget():
    assert len({one.name for one in STAGES}) == len(STAGES)
    assert sum(one.limit_s + gpu_hour.GRACE_S for one in STAGES) <= gpu_hour.BUDGET_S
    without = [one.limit_s + gpu_hour.GRACE_S for one in STAGES if not one.needs_vllm]
    assert sum(without) <= gpu_hour.WITHOUT_VLLM_S
    assert max(one.limit_s for one in STAGES) <= gpu_hour.LONGEST_S


def test_failed_or_timed_out_stage_does_not_stop_others(tmp_path):
    stages = [
        stage("fails", "echo why; exit 3"),
        stage("hangs", f"sleep 321 & echo $! > {tmp_path}/pid; wait", limit_s=2.0 * crowding()),
        stage("looks", f"cat {tmp_path / SUMMARY}; echo '## Speed'; echo '| fast | 7 |'; echo done"),
    ]
    assert hour(stages, tmp_path).run() == 1
    assert verdicts(tmp_path) == {"fails": "failed with exit code 3", "hangs": "timed out", "looks": "passed"}
    seen = (tmp_path / "rehearsal/log.txt").read_text()
    assert "| fails | nothing | failed with exit code 3 |" in seen
    assert "| looks | nothing | runs |" in seen
    summary = (tmp_path / SUMMARY).read_text()
    assert "why\n```" in summary, "the last lines of what failed"
    assert "### Speed\n\n| fast | 7 |" in summary, "the tables of what passed"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_summary_cuts_long_last_lines_of_failed_stage(tmp_path):
    assert hour([stage("fails", "printf 'because %09999d\\nof that' 0; exit 3")], tmp_path).run() == 1
    last = (tmp_path / SUMMARY).read_text().partition("```\n")[2].partition("\n```")[0].splitlines()
    assert last[-1] == "of that"
    assert last[-2].startswith("because 000")
    assert last[-2].endswith("…")
    assert len(last[-2]) == gpu_hour.LONGEST_LINE


HOUR = """
import sys
from pathlib import Path
sys.path.insert(0, "hack")
import gpu_hour
command = "echo '| step | 7 |'; echo $$ > {folder}/pid; touch {folder}/there; sleep 321"
stages = [gpu_hour.Stage("long", "nothing", "nothing", 300, "exit 9", command)]
gpu_hour.signal.signal(gpu_hour.signal.SIGTERM, gpu_hour.signal.default_int_handler)
gpu_hour.Hour(stages, Path("{folder}/rehearsal"), rehearses=True).run()
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=lambda one: one.name)
def test_stage_that_is_cut_off_keeps_its_figures(tmp_path, how):
    with subprocess.Popen([sys.executable, "-c", HOUR.format(folder=tmp_path)], cwd=ROOT) as process:
        while not (tmp_path / "there").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(how)
    if how is signal.SIGKILL:  # nobody ended the stage
        os.killpg(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert "| step | 7 |" in (tmp_path / "rehearsal/log.txt").read_text()
    assert hour([stage("long", "true")], tmp_path).run(until_s=0) == gpu_hour.EXIT_LEFT
    summary = (tmp_path / SUMMARY).read_text()
    assert "| long | nothing | cut off |" in summary
    assert "## long\n\n| step | 7 |" in summary


def test_folder_that_is_too_large_is_not_published(tmp_path, capsys):
    whole, folder = tmp_path / "whole", tmp_path / "carried"
    whole.mkdir()
    (whole / "run").write_bytes(b"12345678")
    assert gpu_carry.publish(whole, folder, most=7) == 1
    assert "is more than" in capsys.readouterr().err
    assert not folder.exists()
    assert gpu_carry.publish(whole, folder, most=8) == 0
    assert [one.name for one in folder.iterdir()] == ["run"]


def test_folder_is_not_there_before_it_is_whole(tmp_path, monkeypatch):
    def interrupted(folder: Path, files: Sequence[tuple[str, Path]]) -> None:
        (folder / gpu_carry.ARCHIVE).touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_carry, "install", lambda uv, site: site.mkdir())
    monkeypatch.setattr(gpu_carry, "stand_in", lambda folder, vllm: None)
    monkeypatch.setattr(gpu_carry, "write", interrupted)
    monkeypatch.setattr(gpu_carry.shutil, "which", lambda name: name)
    monkeypatch.setattr(gpu_carry.importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin="/vllm/x"))
    with pytest.raises(KeyboardInterrupt):
        gpu_carry.carry(tmp_path / "there" / "carried")
    assert not [*(tmp_path / "there").iterdir()]


def test_folder_that_exists_is_not_written(tmp_path, capsys):
    (tmp_path / "there").touch()
    assert gpu_hour.main(["--carry", str(tmp_path)]) == 1
    assert f"{tmp_path} exists: name another folder" in capsys.readouterr().err
    assert (tmp_path / "there").exists()


needs_filters = pytest.mark.skipif(not hasattr(tarfile, "tar_filter"), reason="Python 3.12 runs such a folder")


@needs_filters
def test_archive_runs_with_its_own_sources_and_packages(tmp_path, monkeypatch):
    """With a stage that looks at the archive's sources and packages, and an archive of two files."""
    monkeypatch.setattr(gpu_carry, "COMPRESSED", None)
    folder, package, hour_there = tmp_path / "carried", tmp_path / "carried_package.py", tmp_path / "gpu_hour.py"
    folder.mkdir()
    package.write_text("FOUND = 'packages and sources'")
    shown = "print(carried_package.FOUND, sys.argv[1:], shutil.which('python'))"
    hour_there.write_text(f"import sys, shutil, carried_package\n{shown}")
    gpu_carry.write(folder, [("site/carried_package.py", package), ("src/hack/gpu_hour.py", hour_there)])
    environment = {**os.environ, "STAGE2_UNPACKED": str(tmp_path / "unpacked"), "PYTHON": sys.executable}
    for _ in range(2):
        done = subprocess.run(
            ["sh", folder / "run", "look"], env=environment, check=True, capture_output=True, text=True
        )
        (unpacked,) = (tmp_path / "unpacked").iterdir()
        assert done.stdout == f"packages and sources ['--without-vllm', 'look'] {unpacked / 'bin/python'}\n"


@needs_filters
def test_newer_archive_runs_instead_of_older_one_and_other_files_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_carry, "COMPRESSED", None)
    folder, script, mine = tmp_path / "carried", tmp_path / "gpu_hour.py", tmp_path / "unpacked/mine"
    folder.mkdir()
    mine.parent.mkdir()
    mine.touch()
    environment = {**os.environ, "STAGE2_UNPACKED": str(mine.parent), "PYTHON": sys.executable}
    for version in ("older", "newer"):
        script.write_text(f"print('{version}')")
        gpu_carry.write(folder, [("src/hack/gpu_hour.py", script)])
        done = subprocess.run(["sh", folder / "run"], env=environment, check=True, capture_output=True, text=True)
        assert done.stdout == f"{version}\n"
    assert mine.exists()


@needs_filters
def test_archive_runs_where_there_is_no_home(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_carry, "COMPRESSED", None)
    folder, script = tmp_path / "carried", tmp_path / "gpu_hour.py"
    folder.mkdir()
    script.write_text("print('ran')")
    gpu_carry.write(folder, [("src/hack/gpu_hour.py", script)])
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "STAGE2_UNPACKED")}
    environment |= {"TMPDIR": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(["sh", folder / "run"], env=environment, check=False, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("ran\n", "")
    assert (tmp_path / ".cache/stage2").is_dir()


def test_archive_omits_sources_that_no_stage_reads():
    names = {name for name, _ in gpu_carry.sources()}
    assert {
        "src/hack/gpu_hour.py",
        "src/bench/learner_step.py",
        "src/examples/tiny-qwen3-vl/model.safetensors",
    } <= names
    assert not [one for one in names if one.startswith(("src/docs/", "src/examples/tiny-unordered/"))]


def test_wrapper_of_nccl_loads_with_stand_ins_and_older_library(tmp_path):
    """PyTorch 2.11 brings NCCL 2.28, which can suspend no group."""
    wrapper = pytest.importorskip("vllm.distributed.device_communicators.pynccl_wrapper")
    gpu_carry.stand_in(tmp_path / "vllm", Path(wrapper.__file__).parents[2])
    names = {one.name for one in wrapper.NCCLLibrary.exported_functions} - {"ncclCommSuspend", "ncclCommResume"}
    (tmp_path / "nccl.c").write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in names))
    library = tmp_path / "libnccl.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "nccl.c"], check=True)
    command = (
        "from vllm.distributed.device_communicators import pynccl_wrapper as w;"
        f"library = w.NCCLLibrary({str(library)!r}); print(w.__file__, library.has_symbol('ncclCommSuspend'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", command], env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.startswith(f"{tmp_path}/vllm/")
    assert done.stdout.endswith(" False\n")


def test_carried_sources_have_version(tmp_path):
    gpu_carry.name_itself(tmp_path)
    (found,) = metadata.distributions(path=[str(tmp_path)])
    assert (found.name, found.version) == ("stage2", metadata.version("stage2"))


def test_next_run_continues_with_stages_not_yet_passed(tmp_path):
    counted = [
        stage("good", f"echo >> {tmp_path}/good"),
        stage("mended", f"echo >> {tmp_path}/mended; test -e {tmp_path}/there"),
        stage("late", f"echo >> {tmp_path}/late"),
    ]

    def counts() -> list[int]:
        files = [tmp_path / one.name for one in counted]
        return [file.read_text().count("\n") if file.exists() else 0 for file in files]

    assert hour(counted, tmp_path).run(until_s=1.0) == gpu_hour.EXIT_LEFT, "no limit fits"
    assert hour(counted, tmp_path).run(["good", "mended"]) == 1
    (tmp_path / "there").touch()
    assert hour(counted, tmp_path).run() == 0
    assert counts() == [1, 2, 1]
    assert hour(counted, tmp_path).run(again=True) == 0
    assert counts() == [2, 3, 2]


def test_unknown_stage_is_refused_with_known_names(capsys):
    with pytest.raises(SystemExit):
        gpu_hour.main(["speed"])
    assert ", ".join(one.name for one in STAGES) in capsys.readouterr().err
