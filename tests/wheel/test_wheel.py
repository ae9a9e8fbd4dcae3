"""The wheel in clean virtual environments: every command without any extra, and what the extras resolve to.

It needs pytest and uv alone, so that CI can run it with any Python: STAGE2_PYTHON is the version that installs it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.in_turns(2, first=1)
ROOT = Path(__file__).parents[2]
MODEL, JOB = ROOT / "examples" / "tiny-qwen3-vl", ROOT / "examples" / "job-3v1-tiny.yaml"
PYTHON = os.environ.get("STAGE2_PYTHON", f"{sys.version_info.major}.{sys.version_info.minor}")
UV = shutil.which("uv")
TRAINER = "pip install 'stage2[trainer]'"
SIZE = 2_000_000  # bytes of a distribution: far above code, far below the tiny models
HELD_OUT = "shapes/held-out.jsonl"
RUN = f"""
model: {{model: {MODEL}}}
training: {{output_dir: out}}
custom:
  train_jsonl: shapes/train.jsonl
  extra:
    rollout_matching:
      vllm: {{mode: server, server: {{servers: [{{base_url: "http://127.0.0.1:9", group_port: 9}}]}}}}
"""
XML = """<annotation><filename>train-00000.png</filename><size><width>96</width><height>96</height></size>
<object><name>shape</name><bndbox><xmin>10</xmin><ymin>10</ymin><xmax>50</xmax><ymax>60</ymax></bndbox></object>
</annotation>"""

# Of each command: its words, its exit code, and a part of what it prints.
WALK = [
    ("--version", 0, "stage2 "),
    ("--help", 0, "validate"),
    ("env", 0, "commit: *python: *gpus: none*not installed: *torch"),
    (f"validate {JOB} run.yaml {HELD_OUT}", 0, "valid training configuration"),
    ("validate lost.yaml", 64, "fix:"),
    (f"render {JOB}", 0, "kind: Deployment"),
    ("doctor run.yaml", 64, f"not installed: accelerate, datasets*{TRAINER}*images"),
    (f"data {HELD_OUT} --pictures page.png", 0, "descriptions"),
    (f"data {HELD_OUT} --json", 0, '"classes"'),
    (f"data {HELD_OUT} --model {MODEL}", 69, f"needs tokenizers, which is not installed: {TRAINER}"),
    ("import coco --annotations coco.json --images shapes/images --output coco.jsonl", 0, "1 record, 1 object"),
    ("import yolo yolo --output yolo.jsonl", 0, "1 record, 1 object"),
    ("import voc voc --output voc.jsonl --geometry poly", 0, "1 record, 1 object"),
    ("import labelme labelme --output labelme.jsonl", 0, "1 record, 1 object"),
    ("import labelstudio studio.json --images shapes/images --output studio.jsonl", 0, "1 record, 1 object"),
    ("import chat chat.jsonl --images shapes/images --output chat-records.jsonl", 0, "1 record, 1 object"),
    ("import hf shapes --boxes coco --output hf.jsonl", 69, f"needs datasets, which is not installed: {TRAINER}"),
    (f"init --data lost.jsonl --model {MODEL} --output new", 64, "must be a data file"),
    (f"init --data {HELD_OUT} --model {MODEL} --gpus 0 --output new", 69, TRAINER),
    (f"train --data {HELD_OUT} --model {MODEL} --gpus 0", 69, TRAINER),
    (f"prepare {MODEL} --output new", 69, TRAINER),
    (f"run {JOB} --engine stub", 69, TRAINER),
    ("serve run.yaml --server 0", 69, TRAINER),
    ("learn run.yaml", 69, TRAINER),
    ("learn run.yaml --restarts 3", 69, TRAINER),
    ("wait lost.yaml", 64, "fix:"),
    (f"evaluate --rollouts run/rollouts.jsonl --records {HELD_OUT}", 0, "f1@0.5"),
    ("evaluate run.yaml --checkpoint lost", 64, "fix:"),
    (f"export {MODEL} --output new", 64, "must be a whole checkpoint"),
    (f"infer {MODEL} lost.jpg", 64, "fix:"),
    ("report run", 0, "Held-out records"),
    ("report run --html page.html --picture picture.png", 0, ""),
    ("replay run/rollouts.jsonl --step 1", 69, TRAINER),
    ("inspect run.yaml --sample 0 --response-file answer.txt", 69, f"needs tokenizers*{TRAINER}"),
    ("schema training", 0, "json-schema.org"),
    ("job explain mine", 69, "no cluster is configured"),
    ("job submit lost.yaml", 64, "fix:"),
    ("logs lost", 64, "fix:"),
]
KUBECTL = [
    ("list", 69, "no cluster is configured"),
    ("logs mine", 69, "no cluster is configured"),
    ("report mine", 69, "no cluster is configured"),
]


def uv(*words: str, cwd: Path) -> str:
    """Run uv where no pyproject.toml can help it."""
    assert UV, "uv must be on PATH: pip install 'uv>=0.9,<1'"
    done = subprocess.run([UV, *words], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    uv("build", "--quiet", "--out-dir", str(folder), str(ROOT), cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands of a virtual environment with the wheel alone."""
    folder = tmp_path_factory.mktemp("venv")
    uv("venv", "--quiet", "--python", PYTHON, str(folder / "venv"), cwd=folder)
    uv("pip", "install", "--quiet", "--python", str(folder / "venv/bin/python"), str(wheel), cwd=folder)
    return folder / "venv" / "bin"


@pytest.fixture(scope="module")
def place(commands: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shapes as records, COCO, YOLO and VOC, a training YAML, and the log of a run."""
    folder = tmp_path_factory.mktemp("place")
    shapes = [str(commands / "python"), str(ROOT / "examples/make_shapes.py"), "shapes", "--train=2", "--held-out=2"]
    subprocess.run(shapes, cwd=folder, check=True, capture_output=True)
    first = {"id": 1, "file_name": "train-00000.png", "width": 96, "height": 96}
    box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [10, 10, 40, 50], "iscrowd": 0}
    document = {"images": [first], "annotations": [box], "categories": [{"id": 1, "name": "shape"}]}
    shape = {"label": "shape", "shape_type": "rectangle", "points": [[10, 10], [50, 60]]}
    region = {"value": {"x": 10, "y": 10, "width": 40, "height": 50, "rectanglelabels": ["shape"]}}
    boxes = {"ref": ["shape"], "bbox": [[10, 10, 50, 60]]}
    asked = {"event": "rollout", "part": "held-out", "step": 0, "width": 96, "height": 96, "ground_truth": []}
    answer = asked | {"image": "shapes/images/held-out-00000.png", "text": "{}", "finish_reason": "stop"}
    answers = [answer | {"sample_id": f"held-out.jsonl:{line}", "record_index": line - 1} for line in (1, 2)]
    log = [
        {"event": "evaluation", "step": 0, "eval_rollout_f1": 0.5, "eval_rollout_f1_iou50": 0.5},
        {"event": "step", "step": 1, "loss": 2.0, "step/forward_s": 1.0},
    ]
    files = {
        "run.yaml": RUN,
        "answer.txt": "{}",
        "coco.json": json.dumps(document),
        "yolo/data.yaml": "path: .\ntrain: images\nnames: [shape]\n",
        "yolo/labels/train-00000.txt": "0 0.5 0.5 0.25 0.25\n",
        "voc/Annotations/train-00000.xml": XML,
        "labelme/train-00000.json": json.dumps({"imagePath": "train-00000.png", "shapes": [shape]}),
        "studio.json": json.dumps(
            [{"id": 1, "data": {"image": "train-00000.png"}, "annotations": [{"result": [region]}]}]
        ),
        "chat.jsonl": json.dumps({"messages": [], "images": ["train-00000.png"], "objects": boxes}) + "\n",
        "run/stage2_log.jsonl": "".join(json.dumps(line) + "\n" for line in log),
        "run/rollouts.jsonl": "".join(json.dumps(line) + "\n" for line in answers),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in ("yolo/images", "voc/JPEGImages", "labelme"):
        (folder / name).mkdir(exist_ok=True)
        shutil.copy(folder / "shapes/images/train-00000.png", folder / name)
    (folder / "token").write_text("secret")
    return folder


def run(program: Path, words: str, folder: Path) -> tuple[int, str]:
    """Return the exit code of a command, and all that it prints, in one line."""
    environment = {"PATH": str(program.parent), "STAGE2_TOKEN_FILE": str(folder / "token"), "COLUMNS": "300"}
    done = subprocess.run(
        [str(program), *words.split()],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize(
    ("program", "words", "code", "shown"),
    [("stage2", *row) for row in WALK] + [("kubectl-stage2", *row) for row in KUBECTL],
)
def test_command_works_or_names_missing_extra(
    commands: Path, place: Path, program: str, words: str, code: int, shown: str
) -> None:
    found, printed = run(commands / program, words, place)
    assert "Traceback" not in printed, printed
    assert found == code, printed
    assert re.search(".*".join(map(re.escape, shown.split("*"))), printed), printed


def test_all_commands_are_covered(commands: Path, place: Path) -> None:
    list_all = "import typer.main, stage2_cli.main as m; print(*typer.main.get_command(m.app).commands)"
    done = subprocess.run([str(commands / "python"), "-c", list_all], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {words.split()[0] for words, *_ in WALK if not words.startswith("-")}


def test_version_option_names_commit(commands: Path, place: Path) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert f"(commit {commit.stdout.strip()}" in run(commands / "stage2", "--version", place)[1]


@pytest.mark.parametrize("extras", ["controller", "trainer,examples,wandb,trackio,deepspeed", "trainer,gpu"])
def test_extras_resolve_from_wheel_alone(wheel: Path, tmp_path: Path, extras: str) -> None:
    (tmp_path / "in.txt").write_text(f"stage2[{extras}] @ {wheel.as_uri()}\n")
    found = uv("pip", "compile", "--quiet", "--python-version", PYTHON, "--no-header", "in.txt", cwd=tmp_path)
    assert ("torch==" in found) == ("trainer" in extras)


def test_sdist_has_no_models_and_ships_cpu_requirements(built: Path, wheel: Path) -> None:
    sdist = next(built.glob("*.tar.gz"))
    assert max(sdist.stat().st_size, wheel.stat().st_size) < SIZE
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"README.md", "LICENSE", "CHANGELOG.md", "images/requirements/cpu.txt"} <= set(names)
    assert not [name for name in names if name.endswith((".safetensors", ".png")) or name.startswith("tests/")]


@pytest.mark.parametrize("home", ["", "https://forge.example/team/stage2"])
def test_package_index_page_has_no_relative_links(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGE2_HOME", home)
    uv("build", "--quiet", "--wheel", "--out-dir", str(tmp_path), str(ROOT), cwd=tmp_path)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        page = archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))).decode()
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert [link for link in links if not re.match("https?:|#", link)] == []
    assert any(link.startswith(f"{home}/raw/v") for link in links) == bool(home)
    assert (f"Project-URL: Source, {home}" in page) == bool(home)
