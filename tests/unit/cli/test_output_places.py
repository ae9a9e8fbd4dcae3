"""An output that cannot be written is reported before anything is read: exit code 64, no traceback."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stage2_api.errors import ConfigError
from stage2_cli.main import app
from stage2_trainer.data.files import check_file, check_folder, new_file, new_folder
from tests.unit.report.reported import write_run

NOBODY = 65534
HF = ["import", "hf", "lost", "--boxes", "coco"]
COCO = ["import", "coco", "--annotations", "lost.json", "--images", "."]
INSPECT = ["inspect", "--record", "lost.jsonl", "--tokenizer", "lost", "--response-ids", "lost.json"]
REPORT = ["report", "lost"]

# Command lines whose inputs are lost: of the output is spoken first. True: of a folder.
COMMANDS = {
    "report --html": ([*REPORT, "--html"], False),
    "report --picture": ([*REPORT, "--picture"], False),
    "replay --output": (["replay", "lost.jsonl", "--step", "1", "--output"], False),
    "inspect --picture": ([*INSPECT, "--picture"], False),
    "data --pictures": (["data", "lost.jsonl", "--pictures"], False),
    "import coco --output": ([*COCO, "--output"], False),
    "import yolo --output": (["import", "yolo", "lost.yaml", "--output"], False),
    "import voc --output": (["import", "voc", ".", "--output"], False),
    "import labelme --output": (["import", "labelme", ".", "--output"], False),
    "import labelstudio --output": (["import", "labelstudio", "lost.json", "--images", ".", "--output"], False),
    "import chat --output": (["import", "chat", "lost.jsonl", "--images", ".", "--output"], False),
    "import hf --output": ([*HF, "--output"], False),
    "prepare --output": (["prepare", "lost", "--output"], True),
    "export --output": (["export", "lost", "--output"], True),
    "export --adapter --output": (["export", "lost", "--adapter", "--output"], True),
}
PLACES = ["file/x.png", "/proc/x.png", "link/x.png", "x" * 300 + ".png", "x" * 245 + ".png"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("link").symlink_to("lost-target")
    Path("there.png").mkdir()
    Path("empty").mkdir()
    Path("to-empty").symlink_to("empty")
    Path("there.png", "more").write_text("")
    return tmp_path


def refused(*words):
    """Return what the command says that a person must change."""
    with pytest.raises(ConfigError) as error:
        CliRunner().invoke(app, words, catch_exceptions=False)
    (problem,) = error.value.problems
    return problem


@pytest.mark.parametrize("place", [*PLACES, "there.png"])
@pytest.mark.parametrize("command", COMMANDS)
def test_unwritable_output_is_reported_before_anything_is_read(folder, command, place):
    words, _ = COMMANDS[command]
    before = sorted(folder.rglob("*"))
    found = refused(*words, place)
    assert (found.path, found.value) == (command.split()[-1], place)
    assert found.way_out
    assert sorted(folder.rglob("*")) == before, "a check leaves nothing behind"


@pytest.mark.parametrize("command", [name for name, (_, is_folder) in COMMANDS.items() if is_folder])
def test_current_folder_is_refused_as_output_folder(folder, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "empty")
    for place in (".", str(tmp_path / "empty")):
        assert "this command runs in, nor a mount point" in refused(*COMMANDS[command][0], place).rule
    assert refused(*COMMANDS[command][0], str(tmp_path / "to-empty")).path == "--output"


@pytest.mark.parametrize("place", PLACES)
def test_init_output_is_checked_before_model(folder, place):
    Path("x.jsonl").write_text("{}")
    words = ["init", "--data", "x.jsonl", "--model", "lost", "--output", place]
    assert refused(*words).path == "--output"


@pytest.mark.parametrize("place", [".", "", "/", "new/..", "new/../"])
@pytest.mark.parametrize("case", [name for name in COMMANDS if name.startswith(("import", "prepare", "data"))])
def test_output_without_file_name_is_refused(folder, case, place):
    words, _ = COMMANDS[case]
    assert refused(*words, place).path == words[-1]


def test_picture_output_must_end_in_png(folder):
    run = write_run(folder / "run")
    found = refused("report", str(run), "--picture", "x.jpeg2")
    assert (found.path, found.rule) == ("--picture", "must end in .png")


@pytest.mark.parametrize("place", ["file", "/proc/x"])
def test_unwritable_work_dir_of_run_is_reported(folder, place):
    job = Path(__file__).parents[3] / "examples" / "job-3v1-tiny.yaml"
    assert refused("run", str(job), "--work-dir", place).path == "--work-dir"


@pytest.mark.parametrize("maker", [new_file, new_folder])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
    ids=["Python", "Rust"],
)
def test_full_disk_is_reported_for_output(folder, maker, error):
    shown = r"--output: 'new'; .*disk is full.*free some space"
    with pytest.raises(ConfigError, match=shown) as refused, maker("--output", Path("new")):
        raise error
    assert refused.value.__cause__ is error
    assert not [path for path in folder.iterdir() if "new" in path.name]


def test_folder_without_write_permission_is_reported(folder):
    closed = folder / "closed"
    closed.mkdir(mode=0o755)
    kept = closed / "kept.txt"
    kept.write_text("")
    script = f"""
import os
from pathlib import Path
from stage2_api.errors import ConfigError
from stage2_trainer.data.files import check_file, check_folder
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
for check, path in ((check_file, "new"), (check_file, "kept.txt"), (check_folder, "new/below")):
    try:
        check("--output", Path({str(closed)!r}) / path)
    except ConfigError as error:
        print(error.problems[0].rule)
"""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    os.chmod(folder, 0o755)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd="/")
    assert ended.stdout.count("(Permission denied)") == 3


def test_a_writable_output_is_accepted(folder):
    check_file("--output", folder / "new" / "x.png")
    check_file("--output", Path("file"))
    check_file("--output", Path("/dev/null"))
    check_folder("--output", Path("new/below"))
    check_folder("--output", Path("empty"))
    assert not Path("new").exists()
