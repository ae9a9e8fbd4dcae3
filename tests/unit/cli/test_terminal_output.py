"""No text of a file controls the terminal or forges a line, whichever field of whichever reader has it."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.table import Table
from rich.text import Text

from stage2_cli import main
from stage2_cli.explain import show
from stage2_cli.jobs import jobs
from stage2_cli.processes import LocalProcess
from stage2_cli.run import Watcher, describe
from stage2_report.terminal import Terminal
from tests.unit.cli.job_api import api_server
from tests.unit.report.inspected import TINY_MODEL
from tests.unit.report.reported import write_grpo_run, write_run
from tests.unit.trainer.prepare.odd_sets import picture
from tests.unit.trainer.prepare.odd_sets import yolo as write_yolo

pytestmark = pytest.mark.in_turns(3, first=1)

HOSTILE = "\x1b[31m\x1b]0;title\x07\r\nforged \x9b2J\u202e\u2066\u200e\u2028[bold]:cat:"
"""Colour, a window's title, a line of its own, CSI as one character, bidi marks, a line separator, markup, an emoji."""
EXAMPLE = Path(__file__).parents[3] / "examples" / "job-3v1-tiny.yaml"

Document = Any


def stage2(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: object) -> str:
    """Run a command line; return what it printed, after a check that all of it is harmless."""
    capfd.readouterr()
    monkeypatch.setattr(sys, "argv", ["stage2", *map(str, words)])
    with pytest.raises(SystemExit):
        main.main()
    return require_harmless(*capfd.readouterr())


def require_harmless(*printed: str) -> str:
    """Return what was printed. Fails for a character that a terminal obeys, and for a line that a text has begun."""
    text = "".join(printed)
    assert [c for c in text if not (c.isprintable() or c == "\n")] == [], text
    assert [line for line in text.splitlines() if line.startswith("forged")] == []
    assert "Traceback" not in text, text
    assert "🐱" not in text
    return text


def variants(document: Document, *, keys: bool = True) -> Iterator[Document]:
    """Yield the document with each text made hostile, each number replaced by a hostile text, and each key renamed.

    keys: whether keys are renamed and numbers replaced.
    """
    if isinstance(document, dict):
        for key, value in document.items():
            rest = {other: one for other, one in document.items() if other != key}
            if keys:
                yield {**rest, f"{key}{HOSTILE}": value}
            yield from ({**document, key: one} for one in variants(value, keys=keys))
    elif isinstance(document, list):
        for place, value in enumerate(document):
            yield from ([*document[:place], one, *document[place + 1 :]] for one in variants(value, keys=keys))
    elif isinstance(document, str):
        yield f"{document}{HOSTILE}"
        yield HOSTILE
    elif keys:
        yield HOSTILE


RECORD = {
    "sample_id": "a",
    "images": ["a.png"],
    "width": 100,
    "height": 200,
    "units": "bins",
    "objects": [{"desc": "cat", "bbox_2d": [1, 2, 30, 40]}, {"desc": "dog", "poly": [1, 2, 30, 40, 50, 60]}],
}
TRAINING = {
    "model": {"model": "model"},
    "training": {"output_dir": "out", "eval_strategy": "no"},
    "custom": {"train_jsonl": "train.jsonl", "trainer_variant": "sft"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    picture(tmp_path / "a.png")
    return tmp_path


def test_validate_and_data_escape_each_field_of_a_record(folder, capfd, monkeypatch):
    cases = list(variants(RECORD))
    assert len(cases) > 30
    for number, record in enumerate(cases):
        # a second record whose description differs only in spaces, and one that is broken
        path = folder / f"{number}.jsonl"
        path.write_text(json.dumps(record) + "\n" + json.dumps(RECORD) + "\n{" + HOSTILE, encoding="utf-8")
        stage2(capfd, monkeypatch, "validate", path)
        stage2(capfd, monkeypatch, "data", path)
    for words in (["validate", "--json"], ["data", "--json"], ["data", "--sorted", "new.jsonl"]):
        stage2(capfd, monkeypatch, words[0], path, *words[1:])


@pytest.mark.parametrize("as_json", [False, True])
def test_data_escapes_record_names_and_descriptions(folder, capfd, monkeypatch, as_json):
    alike = [{"desc": desc, "bbox_2d": [1, 2, 30, 40]} for desc in (f"cat{HOSTILE}x", f"Cat{HOSTILE}x", "a", "A")]
    lines = [{**RECORD, "sample_id": f"a{HOSTILE}", "objects": [*alike, alike[0]]}, {**RECORD, "objects": []}]
    path = folder / f"x{HOSTILE.replace('/', '')}.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    printed = stage2(capfd, monkeypatch, "data", path, *(["--json"] if as_json else []))
    assert "suspicious" in printed
    if as_json:
        assert json.loads(printed)["classes"][f"cat{HOSTILE}x"] == 2, "escaped, not changed"


def test_validate_escapes_each_field_of_a_training_yaml(folder, capfd, monkeypatch):
    (folder / "train.jsonl").write_text(json.dumps(RECORD))
    for document in [*variants({"extends": "base.yaml", **TRAINING}), *variants(TRAINING)]:
        (folder / "run.yaml").write_text(yaml.safe_dump(document))
        stage2(capfd, monkeypatch, "validate", "run.yaml")
    stage2(capfd, monkeypatch, "validate", "run.yaml", "--json")
    stage2(capfd, monkeypatch, "validate", "run.yaml", "--set", f"training.{HOSTILE}=1")
    stage2(capfd, monkeypatch, "validate", folder / f"none{HOSTILE}.yaml")
    stage2(capfd, monkeypatch, "learn", "run.yaml")
    stage2(capfd, monkeypatch, "doctor", "run.yaml")


YAMLS = (
    "a: [",
    '"{0}": 1\n"{0}": 2\n',
    "a: *{0}\n",
    "? [a]\n: 1\n",
    "a: !x{0} 1\n",
    "{0}: {0}\n",
    "a: '\x1b'",
    "\ufeff{0}",
)


@pytest.mark.parametrize("text", YAMLS)
def test_validate_escapes_unreadable_yaml(folder, capfd, monkeypatch, text):
    for name in ("run.yaml", f"run{HOSTILE}.yaml"):
        escaped = json.dumps(HOSTILE)[1:-1] if '"{0}"' in text else "\u202e\x85forged"
        (folder / name).write_text(text.replace("{0}", escaped), encoding="utf-8")
        stage2(capfd, monkeypatch, "validate", folder / name)


def test_validate_run_and_render_escape_each_field_of_a_job(folder, capfd, monkeypatch):
    job = yaml.safe_load(EXAMPLE.read_text())
    cases = list(variants(job))
    assert len(cases) > 100
    for number, document in enumerate(cases[::3]):
        (folder / "job.yaml").write_text(yaml.safe_dump(document))
        stage2(capfd, monkeypatch, "validate" if number % 2 else "render", "job.yaml")


def coco() -> Document:
    return {
        "images": [{"id": 1, "file_name": "a.png", "width": 100, "height": 200, "neg_category_ids": [7]}],
        "categories": [{"id": 7, "name": "cat"}],
        "annotations": [
            {
                "id": 1,
                "image_id": 1,
                "category_id": 7,
                "bbox": [1, 2, 30, 40],
                "iscrowd": 0,
                "segmentation": {"size": [200, 100], "counts": [10, 20, 19970]},
                "attributes": {"rotation": 0},
                "keypoints": [1],
            },
            {"id": 2, "image_id": 1, "category_id": 7, "bbox": [1, 2, 30, 40], "segmentation": [[1, 2, 3, 4, 5, 60]]},
            {"id": 3, "image_id": 1, "category_id": 8, "bbox": [-5, 2, 300, 40]},
        ],
    }


@pytest.mark.parametrize("geometry", ["bbox", "poly"])
def test_import_escapes_each_field_of_coco(folder, capfd, monkeypatch, geometry):
    for number, document in enumerate(variants(coco())):
        (folder / "x.json").write_text(json.dumps(document))
        given = ["--annotations", "x.json", "--images", folder, "--geometry", geometry]
        stage2(capfd, monkeypatch, "import", "coco", *given, "--output", folder / f"{number}.jsonl")


def test_import_escapes_text_that_is_not_coco(folder, capfd, monkeypatch):
    for text in (HOSTILE, f'{{"{json.dumps(HOSTILE)[1:-1]}": 1}}', f'["{HOSTILE}"', "[1]\n" + HOSTILE):
        (folder / f"x{HOSTILE}.json").write_text(text)
        stage2(
            capfd, monkeypatch, "import", "coco", "--annotations", f"x{HOSTILE}.json", "--images", ".", "--output", "y"
        )


VOC = {
    "filename": "a.png",
    "size/width": "100",
    "size/height": "200",
    "object/name": "cat",
    "object/difficult": "0",
    "object/bndbox/xmin": "1",
    "object/bndbox/ymax": "50",
    "object/polygon/x1": "5",
    "object/attributes/attribute/name": "rotation",
    "object/attributes/attribute/value": "0",
    "object/robndbox/cx": "5",
}


def voc_text(fields: dict[str, str]) -> str:
    """Return an annotation file; what XML cannot hold is left out of its texts."""
    open_tags: list[str] = []
    text = "<annotation>"
    for path, value in fields.items():
        *tags, leaf = path.split("/")
        while open_tags and open_tags != tags[: len(open_tags)]:
            text += f"</{open_tags.pop()}>"
        for tag in tags[len(open_tags) :]:
            text, open_tags = f"{text}<{tag}>", [*open_tags, tag]
        text += f"<{leaf}>{''.join(c for c in value if c >= ' ' or c in chr(10))}</{leaf}>"
    return text + "".join(f"</{tag}>" for tag in reversed(open_tags)) + "</annotation>"


@pytest.mark.parametrize("field", [*VOC, "root", "file", "rotated"])
def test_import_escapes_each_field_of_voc(folder, capfd, monkeypatch, field):
    fields = {key: f"{value}{HOSTILE}" if key == field else value for key, value in VOC.items()}
    if field not in ("rotated", "object/robndbox/cx"):
        del fields["object/robndbox/cx"]
    text = "<annotation\u202eforged/>" if field == "root" else voc_text(fields)
    (folder / "Annotations").mkdir()
    (folder / "Annotations" / (f"a{HOSTILE}.xml" if field == "file" else "a.xml")).write_text(text, encoding="utf-8")
    below = folder / "Annotations" / HOSTILE
    below.mkdir()
    (below / "b.xml").write_text(text, encoding="utf-8")
    picture(folder / "JPEGImages" / f"c{HOSTILE}.png")
    (folder / "ImageSets" / "Main").mkdir(parents=True)
    (folder / "ImageSets" / "Main" / f"train{HOSTILE}.txt").write_text(f"a\nb{HOSTILE}\nb{HOSTILE} 1\n")
    stage2(capfd, monkeypatch, "import", "voc", folder, "--output", "out.jsonl")
    stage2(capfd, monkeypatch, "import", "voc", folder, "--output", "2.jsonl", "--split", f"train{HOSTILE}")
    stage2(capfd, monkeypatch, "import", "voc", folder, "--output", "3.jsonl", "--split", "none")


def test_import_escapes_each_field_of_yolo(folder, capfd, monkeypatch):
    write_yolo(folder, {"a.png": "0 0.5 0.5 0.2 0.2\n", f"b{HOSTILE}.png": "9 0.5 0.5 0.2 0.2"})
    labels = folder / "labels" / "train"
    (labels / f"c{HOSTILE}.txt").write_text("0 0.5 0.5 0.2 0.2")
    document = {"path": ".", "train": "images/train", "names": ["cat", "dog", "cat"], "nc": 3, "kpt_shape": [1, 2]}
    for number, changed in enumerate(variants(document)):
        (folder / "data.yaml").write_text(yaml.safe_dump(changed))
        stage2(capfd, monkeypatch, "import", "yolo", folder, "--output", f"{number}.jsonl")
    (folder / "data.yaml").write_text(yaml.safe_dump(document))
    for number, line in enumerate((HOSTILE, f"0 {HOSTILE} 1 1 1", f"0 0.5 0.5 0.2 0.2 0.9{HOSTILE}", f"0{HOSTILE}")):
        (labels / "a.txt").write_text(line)
        stage2(capfd, monkeypatch, "import", "yolo", folder, "--output", f"l{number}.jsonl")


def test_import_escapes_fields_of_hugging_face_dataset(folder, capfd, monkeypatch):
    from tests.unit.trainer.prepare.test_hugging_face import datasets, encoded, features, row, saved

    kind = datasets.ClassLabel(names=[f"cat{HOSTILE}", f"cat{HOSTILE} "])
    rows = [row(sample_id=f"a{HOSTILE}"), row(((1, 2, -3, 4),), sample_id=f"b{HOSTILE}")]
    rows.append(row(image={"bytes": b"x", "path": None}, sample_id=f"c{HOSTILE}"))
    assert encoded()
    source = saved(folder, *rows, form=features(kind, sample_id=datasets.Value("string")))
    stage2(capfd, monkeypatch, "import", "hf", source, "--boxes", "coco", "--output", "x.jsonl")
    stage2(capfd, monkeypatch, "import", "hf", source, "--boxes", "coco", "--image", HOSTILE, "--output", "y.jsonl")


def test_evaluate_escapes_each_field_of_answers(folder, capfd, monkeypatch):
    (folder / "data.jsonl").write_text(json.dumps(RECORD))
    line = {"sample_id": "a", "text": '{"object_1": {"desc": "cat", "bbox_2d": [1, 2, 3, 4]}}', "finish_reason": "stop"}
    scored = {**line, "logprobs": [{"token": "a", "logprob": -1.0}]}
    own = {**line, "event": "rollout", "part": "held-out", "step": 1, "ground_truth": []}
    for document in [*variants(line), *variants(scored), *variants(own, keys=False)]:
        (folder / f"answers{HOSTILE}.jsonl").write_text(json.dumps(document))
        stage2(capfd, monkeypatch, "evaluate", "--rollouts", f"answers{HOSTILE}.jsonl", "--records", "data.jsonl")
    for document in variants([{"image_id": "a", "category_id": 7, "bbox": [1, 2, 3, 4], "score": 0.5}]):
        (folder / "answers.json").write_text(json.dumps(document))
        (folder / "x.json").write_text(json.dumps(coco()))
        given = ["--rollouts", "answers.json", "--records", "data.jsonl", "--annotations", "x.json"]
        stage2(capfd, monkeypatch, "evaluate", *given)


@pytest.mark.parametrize("as_json", [False, True])
def test_evaluate_escapes_printed_parts_of_valid_answers(folder, capfd, monkeypatch, as_json):
    (folder / "data.jsonl").write_text(json.dumps({**RECORD, "sample_id": f"a{HOSTILE}"}))
    answer = {"sample_id": f"a{HOSTILE}", "text": '[{"label": "x", "bbox_2d": [1, 2, 1000, 1000]}]'}
    names = [f"answers{place}{HOSTILE}.jsonl" for place in range(2)]
    for name in names:
        (folder / name).write_text(json.dumps(answer))
    given = [word for name in names for word in ("--rollouts", name)]
    option = ["--json"] if as_json else []
    printed = stage2(
        capfd, monkeypatch, "evaluate", *given, "--records", "data.jsonl", "--answer-units", "bins", *option
    )
    assert "f1" in printed


@pytest.mark.parametrize("write", [write_run, write_grpo_run])
def test_report_escapes_each_field_of_a_log(folder, capfd, monkeypatch, write):
    run = write(folder / "run")
    log = run / "stage2_log.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    bad = {"event": "bad_sample", "step": 1, "sample_id": "a", "reason": "lost"}
    busy = [{"server": "http://a", "busy_share": 0.5, "in_flight": 1.0}]
    timed = {**events[0], "step/wall_s": 3.0, "step/cpu_s": 1.0, "step/learner_idle_share": 0.1, "servers": busy}
    for event in (timed, bad, *events[-1:]):
        rest = [one for one in events if one is not event]
        for changed in variants(event, keys=False):
            log.write_text("".join(json.dumps(one) + "\n" for one in [changed, *rest]))
            stage2(capfd, monkeypatch, "report", run)
            stage2(capfd, monkeypatch, "report", run, "--json")
    log.write_text(HOSTILE)
    stage2(capfd, monkeypatch, "report", run)


def test_inspect_escapes_each_field_of_record_and_answer(folder, capfd, monkeypatch):
    tokens = [f"<|coord_{k}|>" for k in (1, 2, 30, 40)]
    record = {**RECORD, "objects": [{"desc": "cat", "bbox_2d": tokens}]}
    answer = {"object_1": {"desc": "cat", "bbox_2d": tokens}, "object_2": {"desc": "odd", "bbox_2d": tokens[:3]}}
    documents = [(one, answer) for one in variants(record)] + [(record, one) for one in variants(answer)]
    for number, (shown, answered) in enumerate(documents):
        (folder / "x.jsonl").write_text(json.dumps(shown))
        (folder / "answer.txt").write_text(json.dumps(answered, ensure_ascii=number % 2 == 0))
        given = ["--record", "x.jsonl", "--tokenizer", TINY_MODEL, "--response-file", "answer.txt"]
        stage2(capfd, monkeypatch, "inspect", *given, *(["--json"] if number % 3 == 0 else []))
    (folder / "answer.txt").write_text(HOSTILE)
    stage2(capfd, monkeypatch, "inspect", *given)


EVENTS = {
    "bad_sample": {"event": "bad_sample", "sample_id": "a", "reason": "lost"},
    "start": {"event": "start", "step": 3, "max_steps": 9},
    "reward": {"event": "evaluation", "step": 3, "eval_reward": 0.5},
}


@pytest.mark.parametrize("event", EVENTS)
def test_run_escapes_each_field_of_learner_log(folder, capfd, event):
    log = folder / "learner.log"
    log.touch()
    for changed in variants(EVENTS[event], keys=False):
        watcher = Watcher(log, lambda: json.dumps({"phase": "loading", "message": f"x{HOSTILE}"}).encode())
        with log.open("a") as file:
            file.write(json.dumps(changed) + "\n")
        watcher.refresh()
        watcher.show(f"text{HOSTILE}")
        watcher.close()
    assert describe(EVENTS["bad_sample"]) == "sample a is set aside: lost"
    require_harmless(*capfd.readouterr())


def test_run_escapes_last_lines_of_failed_process(folder, capfd):
    log = folder / f"server{HOSTILE}.log"
    log.write_bytes(f"\x1b[36m(Engine)\x1b[0m one\n{HOSTILE}\ntwo\xff\n".encode("latin-1", errors="replace"))
    process = LocalProcess("server-0", ["true"], {}, log)
    watcher = Watcher()
    watcher.failure(process, f"ended{HOSTILE}")
    watcher.close()
    printed = capfd.readouterr().out
    assert [c for c in printed if not (c.isprintable() or c == "\n")] == []
    assert "\n(Engine) one\n" in printed, "colours are dropped, lines are kept"


@pytest.mark.parametrize("words", [[], ["--servers"], ["--follow"]])
def test_logs_escape_each_line(folder, capfd, monkeypatch, words):
    (folder / "logs").mkdir()
    log = f"\x1b[36mone\x1b[0m\n{HOSTILE}\nt\u00fcwo".encode() + b"\xff\x9b"
    for name in ("learner", "server-0", "server-1"):
        (folder / "logs" / f"{name}.log").write_bytes(log)
    capfd.readouterr()
    started = [{"name": one, "state": {"running": {}}, "restartCount": 0} for one in ("server-0", "learner")]
    spec, status = {"containers": [{"name": "server-0"}]}, {"containerStatuses": started}
    pod = {"metadata": {"name": "pod"}, "spec": spec, "status": status}
    with api_server(folder) as api:
        monkeypatch.setenv("KUBECONFIG", api.kubeconfig)
        api.pods, api.logs = [pod], {("pod", one): [log] for one in ("server-0", "learner")}
        api.released.set()
        commands: list[tuple[list[str], Any]] = [(["logs", "job", *words], jobs)]
        commands += [(["logs", f"{folder}/", *words], main.app)] if words != ["--follow"] else []
        for line, program in commands:
            monkeypatch.setattr(sys, "argv", ["stage2", *line])
            with pytest.raises(SystemExit):
                main.call(program)
            printed = "".join(capfd.readouterr())
            assert [c for c in printed if not (c.isprintable() or c == "\n")] == [], line
            assert "tüwo" in printed
            assert "one\n" in printed


def test_refusals_of_a_cluster_are_escaped(folder, capfd, monkeypatch):
    with api_server(folder) as api:
        monkeypatch.setenv("KUBECONFIG", api.kubeconfig)
        api.sentence = HOSTILE
        for verb in ("list", "status job", "logs job", "delete job"):
            api.failures = [403]
            assert "title" in stage2(capfd, monkeypatch, "job", *verb.split())


def test_explain_escapes_each_field_of_a_job(capfd):
    condition = {"type": "Placed", "status": "False", "reason": "NoSingleNodeFits", "message": "needs 4"}
    accepted = {"type": "Accepted", "status": "True", "reason": "Valid", "message": "valid"}
    job = {
        "metadata": {"name": "job", "namespace": "a"},
        "status": {"conditions": [accepted, condition], "step": 3, "maxSteps": 9, "phase": "Training"},
    }
    for as_json in (False, True):
        for changed in variants(job, keys=False):
            show(changed, as_json=as_json)
            require_harmless(*capfd.readouterr())


def test_replay_escapes_its_file(folder, capfd, monkeypatch):
    line = {"event": "rollout", "part": "train", "step": 0, "micro_step": 0, "index": 0, "options": {HOSTILE: 1}}
    for text in (json.dumps(line), HOSTILE):
        (folder / f"rollouts{HOSTILE}.jsonl").write_text(text)
        stage2(capfd, monkeypatch, "replay", f"rollouts{HOSTILE}.jsonl", "--step", "1")


def test_prepare_init_and_export_escape_model_files(folder, capfd, monkeypatch):
    model = folder / f"model{HOSTILE}"
    model.mkdir()
    (folder / "train.jsonl").write_text(json.dumps(RECORD))
    for text in (HOSTILE, json.dumps({"model_type": HOSTILE}), json.dumps({"auto_map": HOSTILE, "model_type": "a"})):
        (model / "config.json").write_text(text)
        (model / f"{HOSTILE}_config.json").write_text(text)
        stage2(capfd, monkeypatch, "prepare", model, "--output", "new")
        stage2(capfd, monkeypatch, "init", "--data", "train.jsonl", "--model", model, "--output", "project")
        stage2(capfd, monkeypatch, "data", "train.jsonl", "--model", model)
        (model / "trainer_state.json").write_text(text)
        stage2(capfd, monkeypatch, "export", model, "--output", "exported")


def test_library_log_records_are_escaped(capfd, monkeypatch):
    import logging

    def program() -> None:
        logging.getLogger("some.library").warning("sample %s", HOSTILE)

    main.call(program)  # type: ignore[arg-type]
    require_harmless(*capfd.readouterr())


def test_unexpected_error_is_escaped(tmp_path):
    import subprocess

    script = f"from stage2_cli import main\ndef end(): raise OSError({HOSTILE!r})\nmain.call(end)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "OSError" in done.stderr
    assert [c for c in done.stderr if not (c.isprintable() or c == "\n")] == []


PRINTED: dict[str, Callable[[Terminal], None]] = {
    "a line": lambda terminal: terminal.print(f"a{HOSTILE}b"),
    "a styled line": lambda terminal: terminal.print(f"a{HOSTILE}b", style="bold red"),
    "a text": lambda terminal: terminal.print(Text(f"a{HOSTILE}b", style="red")),
    "a table": lambda terminal: terminal.print(table(f"a{HOSTILE}b")),
}


def table(text: str) -> Table:
    found = Table(text, title=text)
    found.add_row(text)
    found.add_row(Text(text, "red"))
    return found


@pytest.mark.parametrize("what", PRINTED)
def test_terminal_receives_only_own_control_codes(what, capsys, monkeypatch):
    import re

    monkeypatch.setenv("FORCE_COLOR", "1")  # rich prints styles where there is no terminal
    PRINTED[what](Terminal())
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert [c for c in printed if not (c.isprintable() or c == "\n")] == []
    assert "31m" in printed, "escaped, so that it can be seen"
    assert ":cat:" in printed
    assert "[bold]" in printed
