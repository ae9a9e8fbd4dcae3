"""Fields that need a controller or a cluster are reported by commands that do not apply them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from stage2_api.errors import ConfigError
from stage2_api.parsing import parse_job
from stage2_cli.config_files import CLUSTER, set_fields
from stage2_cli.main import app
from stage2_cli.render import render_job
from stage2_controller.job import names
from tests.unit.api.wrong_jobs import merge_patch

EXAMPLES = Path(__file__).parents[3] / "examples"
JOB = EXAMPLES / "job-3v1-tiny.yaml"
JOBSET = EXAMPLES / "job-jobset.yaml"


def job(**spec: Any) -> dict[str, Any]:
    whole = yaml.safe_load(JOB.read_text())
    return dict(merge_patch(whole, {"spec": {"activeDeadlineSeconds": None, **spec}}))


@pytest.mark.parametrize(
    ("spec", "shown"),
    [
        ({"activeDeadlineSeconds": 60}, "spec.activeDeadlineSeconds"),
        ({"ttlSecondsAfterFinished": 60}, "spec.ttlSecondsAfterFinished"),
        ({"suspend": True}, "spec.suspend"),
        ({"learner": {"template": {"metadata": {"labels": {"a": "b"}}}}}, "spec.learner.template"),
        ({"rollout": {"template": {"metadata": {"labels": {"a": "b"}}}}}, "spec.rollout.template"),
        ({"network": {"egress": "Closed"}}, "spec.network.egress"),
    ],
)
def test_field_needing_controller_is_listed(spec: dict[str, Any], shown: str) -> None:
    assert set_fields(parse_job(job(**spec)), CLUSTER) == [shown]


def test_job_without_controller_fields_gets_no_list() -> None:
    assert set_fields(parse_job(job(suspend=False)), CLUSTER) == []


def test_rendered_yaml_lists_fields_without_effect(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job(activeDeadlineSeconds=60, suspend=True)))
    first, rest = render_job(file, namespace="team-a").split("\n", 1)
    assert (
        first == "# Not applied, because no controller watches these objects: spec.suspend, spec.activeDeadlineSeconds"
    )
    assert len(list(yaml.safe_load_all(rest))) == 6


def test_invalid_namespace_option_is_refused() -> None:
    assert "namespace: team-a" in render_job(JOB, namespace="team-a")
    with pytest.raises(ConfigError, match=r"metadata\.namespace") as refused:
        render_job(JOB, namespace="Team_A")
    assert refused.value.problems[0].value == "Team_A"


def test_trainjob_makes_jobset_of_same_name_and_template(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    whole = merge_patch(
        yaml.safe_load(JOBSET.read_text()),
        {"metadata": {"labels": {names.LABEL_QUEUE: "team"}}, "spec": {"suspend": True, "ttlSecondsAfterFinished": 60}},
    )
    file.write_text(yaml.safe_dump(whole))
    *_, jobset = yaml.safe_load_all(render_job(file, namespace="team-a"))
    *children, runtime, trainjob = yaml.safe_load_all(render_job(file, namespace="team-a", trainjob=True))
    assert [one["kind"] for one in (*children, runtime, trainjob)] == [
        *("Secret", "ConfigMap", "NetworkPolicy", "TrainingRuntime", "TrainJob")
    ]
    assert trainjob["metadata"] == jobset["metadata"]
    assert trainjob["spec"] == {
        "runtimeRef": {"kind": "TrainingRuntime", "name": runtime["metadata"]["name"]},
        "suspend": jobset["spec"].pop("suspend"),
    }
    template = runtime["spec"]["template"]
    assert template["spec"] == jobset["spec"]
    labels = jobset["metadata"]["labels"]
    assert labels.pop(names.LABEL_QUEUE) == "team"
    assert template["metadata"]["labels"] == runtime["metadata"]["labels"] == labels


def test_trainjob_needs_engine_jobset() -> None:
    with pytest.raises(ConfigError, match=r"spec\.engine: 'Node'; must be JobSet for --trainjob"):
        render_job(JOB, namespace=None, trainjob=True)


def test_options_that_contradict_each_other_are_refused() -> None:
    done = CliRunner().invoke(app, ["render", str(JOBSET), "--job", "--trainjob"])
    assert (done.exit_code, "prints the job" in done.output) == (2, True)
