"""YAML files: malformed ones are refused with the file's name; `--set` changes their values."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from stage2_api.errors import EXIT_CONFIG, ConfigError
from stage2_cli.config_files import changed, load_addressed, load_config, load_job, load_yaml
from stage2_cli.main import app
from stage2_cli.validate import validate_files
from tests.unit.api.wrong_jobs import merge_patch
from tests.unit.cli.test_light_start import MATCHING

ROOT = Path(__file__).parents[3]


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_yaml(tmp_path / "nowhere.yaml")


def test_yaml_merge_keys_work(tmp_path: Path) -> None:
    path = tmp_path / "merge.yaml"
    path.write_text("base: &b {x: 1}\nother:\n  <<: *b\n  y: 2\n")
    assert load_yaml(path)["other"] == {"x": 1, "y": 2}


@pytest.mark.parametrize(
    "number",
    [
        *("12:30:45", "12:30", "-190:20:30.15", "1_000", "1_0.5", "0x_f", "!!int 1_000", "1.0e+400"),
        *("9" * 5000, "0x" + "f" * 5000),
    ],
    ids=lambda number: number[:20],
)
def test_number_only_yaml_would_convert_stays_text(tmp_path: Path, number: str) -> None:
    """Other readers of the same file, such as kubectl, read another value, or none."""
    path = tmp_path / "odd.yaml"
    path.write_text(f"a: {number}\n")
    assert load_yaml(path) == {"a": number.removeprefix("!!int ")}


@pytest.mark.parametrize(
    ("key", "number", "way_out"),
    [
        ("spec.rollout.servers", "12:30:45", "write plain digits: YAML reads 12:30:45 as text"),
        ("spec.rollout.servers", "1_0", "write plain digits: YAML reads 1_0 as text"),
        ("spec.config.training.max_steps", "1_000", "write plain digits: YAML reads 1_000 as text"),
        ("spec.config.training.learning_rate", "1e400", "write a smaller number"),
        ("spec.config.training.learning_rate", "1.0e+400", "write a smaller number"),
        ("spec.config.training.learning_rate", "9" * 5000, "write a smaller number"),
        ("spec.config.training.max_steps", "0x" + "f" * 5000, "change it"),
    ],
    ids=lambda value: value[:40],
)
def test_ambiguous_yaml_number_is_refused_with_field_and_correct_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, number: str, way_out: str
) -> None:
    keys = key.split(".")
    value: object = number
    for part in reversed(keys):
        value = {part: value}
    job = merge_patch(yaml.safe_load((ROOT / "examples" / "job-3v1.yaml").read_text(encoding="utf-8")), value)
    written = yaml.safe_dump(job, width=10**6).replace(f"'{number}'", number)
    (tmp_path / "job.yaml").write_text(written)
    assert validate_files([tmp_path / "job.yaml"]) == EXIT_CONFIG
    shown = " ".join(capsys.readouterr().err.split())
    assert f"{key}: '{number[:10]}" in shown
    assert way_out in shown


ALIASES = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghij"))


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        pytest.param("a: 1\nb: 2\na: 3\n", r"given twice", id="a key given twice"),
        pytest.param("- 1\n", r"must be a mapping", id="a list at the top"),
        pytest.param(ALIASES, r"must not hold more than 200000 values", id="aliases of aliases"),
        pytest.param(
            "a: " + "[" * 5000 + "]" * 5000, r"exceeded maximum nesting depth|deeper than 64", id="lists in lists"
        ),
        pytest.param("\n".join(" " * i + "a:" for i in range(300)), r"line 6\d.*deeper than 64", id="deep mappings"),
        pytest.param("a: &a [*a]", r"an alias must name what ends before it", id="a list in itself"),
        pytest.param("a: *nowhere", r"an alias must name", id="an alias of nothing"),
        pytest.param("a: \0b", r"must be YAML", id="a zero byte"),
        pytest.param(bytes(range(256)), r"byte 0x80 at offset 128.*in UTF-8.*save it as UTF-8", id="no text"),
        pytest.param("a: 2026-13-45", r"must be YAML", id="a day that is none"),
        pytest.param("a: !!bool foo", r"must be YAML", id="a truth value that is none"),
        pytest.param("[1]: 2", r"cannot be a key", id="a list as key"),
        pytest.param("{a: 1}: 2", r"cannot be a key", id="a mapping as key"),
        pytest.param("a: !!python/object/apply:os.system ['true']", r"must be YAML", id="an object"),
        pytest.param("a: " + "x" * (2 << 20), r"larger than 2097152 bytes", id="too large"),
        pytest.param("a: 1\nb: 'x", r"end of stream at line 2, column 6 while scanning .*YAML", id="half a text"),
        pytest.param("a: [1,\n2\nb: 3", r"at line 3, column 2 while .* that began at line 1", id="half a list"),
        pytest.param("\ufeff- 1", r"must be a mapping", id="a mark of byte order"),
    ],
)
def test_hostile_yaml_is_refused_in_single_sentence(tmp_path: Path, content: str | bytes, shown: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=shown) as refused:
        load_yaml(path)
    assert len(str(refused.value)) < 1000
    assert "\n" not in str(refused.value)


def test_device_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="a device"):
        load_yaml(Path("/dev/zero"))


def calls_for(path: Path, keys: int) -> int:
    """Return how many calls it takes to validate a file with so many unknown keys."""
    path.write_text("".join(f"k{number}: {number}\n" for number in range(keys)))
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        assert validate_files([path]) == EXIT_CONFIG
    finally:
        sys.setprofile(None)
    return calls


def test_validation_cost_grows_linearly_with_mistakes(tmp_path: Path) -> None:
    """Ten times as many keys are ten times as many calls: each that is compared with all others is a hundred times."""
    calls_for(tmp_path / "keys.yaml", 10)  # what is made once
    few, many = (calls_for(tmp_path / "keys.yaml", keys) for keys in (1_000, 10_000))
    assert few > 1_000
    assert many <= 11 * few


def test_twenty_thousand_mistakes_are_cut_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("".join(f"k{number}: {number}\n" for number in range(20_000)))
    assert validate_files([path]) == EXIT_CONFIG
    shown = capsys.readouterr().err
    assert shown.startswith(f"{path}: 20003 configuration errors")
    assert shown.endswith("  and 19903 more\n")


JOB = Path(__file__).parents[3] / "examples" / "job-3v1-tiny.yaml"


def test_set_option_replaces_value_of_file(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(merge_patch(MATCHING, {"custom": {"train_jsonl": "x.jsonl"}})))
    (tmp_path / "run.yaml").write_text("extends: base.yaml\ntraining: {max_steps: 3}\n")
    changes = ["training.max_steps=5", "training.learning_rate=1.0e-6", "training.report_to=[tensorboard]"]
    training = load_config(tmp_path / "run.yaml", changes).training
    assert (training.max_steps, training.learning_rate, training.report_to) == (5, 1e-6, ["tensorboard"])
    assert training.output_dir == "out", "what no --set names stays"
    assert load_config(tmp_path / "run.yaml", [*changes, "training.max_steps=6"]).training.max_steps == 6
    assert load_job(JOB, ["training.seed=77"]).spec.config.training.seed == 77
    assert load_job(JOB, ["training.eval_strategy=no"]).spec.config.training.eval_strategy == "no"
    assert changed({"a": {"b": 1}}, ["a.b=true"]) == {"a": {"b": True}}
    assert changed({"a": {"b": 1}}, ['a.b=""']) == {"a": {"b": ""}}
    assert changed({"a": {"b": 1}}, ["a.b=null"]) == changed({"a": {"b": 1}}, ["a.b="]) == {"a": {"b": None}}


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ("training.seed", "--set: 'training.seed'; must read KEY=VALUE"),
        ("training..seed=1", "must read KEY=VALUE"),
        ("=1", "must read KEY=VALUE"),
        ("training.seed=[1", "--set training.seed: .*must be YAML"),
        ("training.seed=a\n--- \nb", "--set training.seed: '2 documents'; must be one value"),
        ("training.sed=1", "spec.config.training.sed: 1; .*seed"),
        ("training.seed.more=1", "spec.config.training.seed: "),
    ],
)
def test_set_option_that_breaks_rule_is_refused(change: str, shown: str) -> None:
    with pytest.raises(ConfigError, match=shown):
        load_job(JOB, [change])


def test_every_command_that_reads_config_accepts_set_option(tmp_path: Path) -> None:
    for command in ("run", "learn", "validate", "render", "doctor"):
        words = [command, str(JOB), "--set", "training.sed=1"]
        if command == "validate":
            assert CliRunner().invoke(app, words).exit_code == EXIT_CONFIG
            continue
        with pytest.raises(ConfigError, match=r"training\.sed"):
            CliRunner().invoke(app, words, catch_exceptions=False)


@pytest.mark.parametrize("words", [["learn"], ["serve", "--server", "0"], ["wait"]])
def test_job_with_servers_is_refused_with_hint_at_stage2_run(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"spec\.rollout\.servers: 3; .*stage2 run"):
        CliRunner().invoke(app, [*words, str(JOB)], catch_exceptions=False)


def test_job_file_without_servers_configures_learner() -> None:
    job = JOB.with_name("job-colocate-tiny.yaml")
    assert load_addressed(job).training == load_config(job).training
