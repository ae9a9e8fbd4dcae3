"""Rewards from a file beside a job or a training YAML: how the file is found, carried, checked and run."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from stage2_api.errors import ConfigError
from stage2_api.grpo import LARGEST_REWARD_FILE
from stage2_api.parsing import parse_job
from stage2_cli.config_files import load_config, load_job
from stage2_cli.render import render_itself, render_job
from stage2_cli.validate import validate_files
from stage2_trainer.checks.preflight import check_rewards
from tests.unit.api.wrong_jobs import merge_patch

ROOT = Path(__file__).parents[3]
STAGE2 = str(Path(sys.executable).with_name("stage2"))
CODE = "def small(sample):\n    return 1.0\n"


def write_job(folder: Path, *rewards: str, files: Mapping[str, str] | None = None, **code: str) -> Path:
    """A job with these rewards, beside files of `code` by their stems."""
    job = yaml.safe_load((ROOT / "examples" / "job-grpo-objects-tiny.yaml").read_text())
    rlhf = {"reward_funcs": list(rewards), "reward_weights": None, "reward_files": files}
    written = merge_patch(job, {"spec": {"config": {"rlhf": rlhf}}})
    (folder / "job.yaml").write_text(yaml.safe_dump(written))
    (folder / "run.yaml").write_text(yaml.safe_dump(written["spec"]["config"]))
    for stem, text in code.items():
        (folder / f"{stem}.py").write_text(text)
    return folder / "job.yaml"


def problems_of(path: Path) -> list[tuple[str, Any, str, str]]:
    with pytest.raises(ConfigError) as refused:
        load_job(path)
    return [(one.path, one.value, one.rule, one.way_out) for one in refused.value.problems]


def test_job_and_training_yaml_embed_reward_files_beside_them(tmp_path: Path) -> None:
    job = write_job(tmp_path, "mine.py:small", "mine.py:large", "theirs.py:f", mine=CODE, theirs="f = len\n")
    carried = {"mine.py": CODE, "theirs.py": "f = len\n"}
    for config in (load_job(job).spec.config, load_config(tmp_path / "run.yaml")):
        assert config.rlhf is not None
        assert config.rlhf.reward_files == carried


def test_job_with_embedded_reward_files_needs_none_beside_it(tmp_path: Path) -> None:
    path = write_job(tmp_path, "mine.py:small", files={"mine.py": CODE}, mine="other = 1\n")
    (reward,) = check_rewards(load_job(path).spec.config)
    assert (reward.name, reward.source) == ("mine.py:small", "mine.py:small")


def test_render_embeds_reward_files_in_job_and_config_map(tmp_path: Path) -> None:
    path = write_job(tmp_path, "mine.py:small", mine=CODE)
    text = render_itself(path, namespace="team")
    assert "        mine.py: |\n          def small(sample):\n              return 1.0\n" in text
    job = parse_job(yaml.safe_load(text))
    assert (job.metadata.namespace, job.spec) == ("team", load_job(path).spec)
    (config_map,) = [one for one in yaml.safe_load_all(render_job(path, namespace=None)) if one["kind"] == "ConfigMap"]
    (config,) = config_map["data"].values()
    assert yaml.safe_load(config)["rlhf"]["reward_files"] == {"mine.py": CODE}


def test_control_characters_are_escaped_in_rendered_job(tmp_path: Path) -> None:
    text = render_itself(write_job(tmp_path, "mine.py:small", mine="# \u202e\x1b[31m\n" + CODE), namespace=None)
    assert text.replace("\n", "").isprintable()
    assert parse_job(yaml.safe_load(text)).spec.config.rlhf.reward_files["mine.py"].startswith("# \u202e\x1b[31m\n")


@pytest.mark.parametrize("name", ["../mine.py:small", "/tmp/mine.py:small", "a/mine.py:small", "mine.py:"])
def test_reward_file_with_path_in_its_name_is_refused(tmp_path: Path, name: str) -> None:
    ((path, value, rule, way_out),) = problems_of(write_job(tmp_path, name, mine=CODE))
    assert (path, value) == ("spec.config.rlhf.reward_funcs[0]", name)
    assert "must be text of the form" in rule
    assert "a Python file beside this one and a function in it" in way_out


def test_missing_reward_file_is_reported_with_its_path(tmp_path: Path) -> None:
    ((path, value, rule, _),) = problems_of(write_job(tmp_path, "objects.f1", "mine.py:small"))
    assert (path, value) == ("spec.config.rlhf.reward_funcs[1]", "mine.py:small")
    assert rule == f"the file of a reward must be beside job.yaml, and there is no {tmp_path / 'mine.py'}"


def test_reward_file_linked_from_outside_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    secret = tmp_path / "secret.py"
    secret.write_text("password = 1\n")
    (tmp_path / "job" / "mine.py").symlink_to(secret)
    ((_, _, rule, way_out),) = problems_of(write_job(tmp_path / "job", "mine.py:small"))
    assert "is a link to" in rule
    assert "password" not in rule
    assert way_out == "replace the link by the file"


def test_links_within_the_folder_are_followed(tmp_path: Path) -> None:
    path = write_job(tmp_path, "mine.py:small", theirs=CODE)
    (tmp_path / "mine.py").symlink_to("theirs.py")
    assert check_rewards(load_job(path).spec.config)


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "bytes", "long"])
def test_reward_file_that_is_not_text_is_refused(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "mine.py"
    rules = {
        "folder": (file.mkdir, "must be a readable file"),
        "pipe": (lambda: os.mkfifo(file), "must be a readable file"),
        "loop": (lambda: file.symlink_to(file), "must be a readable file"),
        "bytes": (lambda: file.write_bytes(b"\xff"), "must be UTF-8"),
        "long": (lambda: file.write_text("#" * (LARGEST_REWARD_FILE + 1)), "at most 32,768 characters, and has 32,769"),
    }
    make, rule = rules[kind]
    make()
    ((path, _, found, _),) = problems_of(write_job(tmp_path, "mine.py:small"))
    assert path == "spec.config.rlhf.reward_funcs[0]"
    assert rule in found


def test_embedded_file_that_no_reward_names_is_refused(tmp_path: Path) -> None:
    ((path, _, rule, _),) = problems_of(write_job(tmp_path, "objects.f1", files={"mine.py": CODE}))
    assert (path, rule) == (
        "spec.config.rlhf.reward_files",
        "must have no file that rlhf.reward_funcs does not name",
    )


@pytest.mark.parametrize(
    ("code", "rule", "way_out"),
    [
        ("def small(sample)\n", "mine.py:1 is no valid Python", "correct it"),
        ("def smal(sample): ...\n", "mine.py has no `small`", "did you mean `smal`?"),
        ("", "mine.py has no `small`", "define `def small(sample: Sample) -> float` in mine.py"),
        ("print(small)\n", "mine.py has no `small`", "define"),
    ],
)
def test_validate_reads_reward_file_and_names_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, rule: str, way_out: str
) -> None:
    for path in (write_job(tmp_path, "mine.py:small", mine=code), tmp_path / "run.yaml"):
        assert validate_files([path]) == 64
        shown = capsys.readouterr().err
        assert "rlhf.reward_funcs[0]: 'mine.py:small'" in shown
        assert rule in shown
        assert way_out in shown


def test_validate_never_runs_reward_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n{CODE}"
    path = write_job(tmp_path, "mine.py:small", mine=code)
    assert validate_files([path, tmp_path / "run.yaml"]) == 0
    assert not (tmp_path / "ran").exists()
    assert "mine.py:small: its file was read, and not run: `stage2 inspect CONFIG --rewards" in capsys.readouterr().out
    assert check_rewards(load_job(path).spec.config)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("import nowhere_at_all\n" + CODE, "mine.py:1 needs nowhere_at_all, which is not installed"),
        ("1 / 0\n" + CODE, "importing mine.py failed at mine.py:1: ZeroDivisionError"),
        ("raise SystemExit\n" + CODE, "importing mine.py failed at mine.py:1: SystemExit"),
        ("def small(): return 1.0\n", "mine.py:small (mine.py:1) takes ()"),
        ("async def small(sample): return 1.0\n", "mine.py:small (mine.py:1) is an `async def`"),
        ("class small: ...\n", "mine.py:small (mine.py:1) is a class"),
    ],
)
def test_invalid_reward_file_is_refused_before_model_is_loaded(tmp_path: Path, code: str, rule: str) -> None:
    path = write_job(tmp_path, "mine.py:small", mine=code)
    with pytest.raises(ConfigError) as refused:
        check_rewards(load_job(path).spec.config, root="spec.config.")
    (problem,) = refused.value.problems
    assert (problem.path, problem.value) == ("spec.config.rlhf.reward_funcs[0]", "mine.py:small")
    assert rule in problem.rule


def test_two_rewards_share_one_import_of_their_file_and_hide_no_module(tmp_path: Path) -> None:
    code = "import dataclasses\n\n\n@dataclasses.dataclass\nclass Seen:\n    count: int = 0\n\n\nseen = Seen()\n"
    code += "def first(sample):\n    seen.count += 1\n    return seen.count\n\n\nsecond = first\n"
    path = write_job(tmp_path, "json.py:first", "json.py:second", json=code)
    first, second = check_rewards(load_job(path).spec.config)
    assert first.function.__globals__ is second.function.__globals__
    assert sys.modules["json"] is json


def test_inspect_names_failing_line_of_reward_file(tmp_path: Path) -> None:
    record = {"images": ["a.png"], "width": 96, "height": 96, "units": "pixels", "objects": []}
    (tmp_path / "train.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "answer.txt").write_text("{}")
    write_job(tmp_path, "mine.py:small", mine="def small(sample):\n    return 1 / 0\n")
    words = ["inspect", "run.yaml", "--rewards", "--sample", "0", "--response-file", "answer.txt"]
    raw = yaml.safe_load((tmp_path / "run.yaml").read_text())
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(merge_patch(raw, {"custom": {"train_jsonl": "train.jsonl"}})))
    done = subprocess.run([STAGE2, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 64, done.stderr
    assert "failed at mine.py:2" in done.stderr
