"""Every shipped job file is valid, by its JSON schema too, and has no idle settings."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from stage2_api.advice import idle_settings
from stage2_api.parsing import parse_job, parse_run_config, resolve_extends
from stage2_api.runconfig import RunConfig
from tests.unit.api.wrong_jobs import merge_patch

ROOT = Path(__file__).parents[3]
SHIPPED = sorted(ROOT.glob("examples/job-*.yaml"))
PRESETS = sorted(ROOT.glob("examples/summary_*.yaml"))


def test_examples_named_in_docs_exist() -> None:
    assert {"job-3v1.yaml", "job-3v1-tiny.yaml"} <= {path.name for path in SHIPPED}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_job_is_valid_without_idle_settings(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        job = parse_job(document)
        assert idle_settings(job.spec.config) == ()
        assert job.metadata.name == path.stem


def test_job_on_the_front_page_is_valid_and_names_a_recipe() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert shown.count("\n") <= 13, "a stranger reads it in a minute"
    config = parse_job(yaml.safe_load(shown)).spec.config
    assert idle_settings(config) == ()
    assert config.custom.extra.rollout_matching.recipe == "recommended"


def editor(path: Path) -> Draft202012Validator:
    """Return what an editor checks a file by: the schema that its first line names."""
    mark, _, name = path.read_text(encoding="utf-8").splitlines()[0].partition("=")
    assert mark == "# yaml-language-server: $schema"
    return validator(path.parent / name)


@functools.cache
def validator(path: Path) -> Draft202012Validator:
    schema = json.loads(path.read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@pytest.mark.parametrize("path", [*SHIPPED, *PRESETS], ids=lambda path: path.name)
def test_shipped_file_is_valid_by_schema_in_its_first_line(path: Path) -> None:
    problems = editor(path).iter_errors(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert [one.message for one in problems] == []


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"learner": {"gpu": 1}}},
        {"spec": {"config": {"training": {"max_steps": "5"}}}},
        {"spec": {"config": {"custom": {"extra": {"rollout_matching": {"recipe": "best"}}}}}},
        {"spec": {"config": {"model": None}}},
        {"kind": "Job"},
    ],
    ids=lambda change: str(change),
)
def test_json_schema_reports_mistake_in_editor(change: dict[str, Any]) -> None:
    path = ROOT / "examples" / "job-3v1.yaml"
    wrong = merge_patch(yaml.safe_load(path.read_text(encoding="utf-8")), change)
    assert len(list(editor(path).iter_errors(wrong))) == 1


def test_job_3v1_uses_three_rollout_gpus_single_learner_gpu_dora_and_packing() -> None:
    spec = parse_job(yaml.safe_load((ROOT / "examples" / "job-3v1.yaml").read_text(encoding="utf-8"))).spec
    assert spec.rollout.servers * spec.rollout.gpus_per_server == 3
    assert spec.learner.gpus == 1
    assert spec.config.tuner.use_dora
    assert spec.config.training.packing
    assert spec.config.rollout_matching.vllm.sync.mode == "full"


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.name)
def test_shipped_preset_is_valid_without_idle_settings(path: Path) -> None:
    assert idle_settings(preset(path.stem)) == ()


def test_presets_match_documented_summary_runs() -> None:
    base, attributes = preset("summary_1024"), preset("summary_1024_attr_key_recall")
    assert (len(base.rlhf.reward_funcs), len(attributes.rlhf.reward_funcs)) == (11, 12)
    assert (base.data_parallel_size, base.rollout_matching.vllm.tensor_parallel_size) == (6, 1)
    batches = attributes.grpo_batches(world_size=2)
    assert (batches.generation, batches.accumulation, batches.needs_old_logprobs) == (48, 4, False)


def test_job_grpo_6v2_is_summary_preset_with_six_server_gpus_and_two_learners() -> None:
    raw = yaml.safe_load((ROOT / "examples" / "job-grpo-6v2.yaml").read_text(encoding="utf-8"))
    spec = parse_job(raw).spec
    assert (spec.rollout.servers, spec.rollout.gpus_per_server, spec.rollout.port, spec.learner.gpus) == (1, 6, 8080, 2)
    same = {"training": {"output_dir": preset("summary_1024").training.output_dir}}
    assert parse_run_config(merge_patch(raw["spec"]["config"], same)) == preset("summary_1024")


def preset(name: str) -> RunConfig:
    def read(path: Path) -> dict[str, Any]:
        return dict(yaml.safe_load(path.read_text(encoding="utf-8")))

    return parse_run_config(resolve_extends(ROOT / "examples" / f"{name}.yaml", read))
