"""Every job file that ships is right, and no setting in it is idle."""

from pathlib import Path

import pytest
import yaml

from stage2_api.advice import idle_settings
from stage2_api.job import parse_job

ROOT = Path(__file__).parents[3]
SHIPPED = sorted(ROOT.glob("examples/*.yaml"))


def test_the_examples_that_the_readme_names_ship() -> None:
    assert {"job-3v1.yaml", "job-3v1-tiny.yaml"} <= {path.name for path in SHIPPED}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_job_is_right_and_says_nothing_idle(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        job = parse_job(document)
        assert idle_settings(job.spec.config) == ()
        assert job.metadata.name == path.stem


def test_job_3v1_is_three_rollout_gpus_and_one_learner_gpu_with_dora_and_packing() -> None:
    spec = parse_job(yaml.safe_load((ROOT / "examples" / "job-3v1.yaml").read_text(encoding="utf-8"))).spec
    assert spec.rollout.servers * spec.rollout.gpus_per_server == 3
    assert spec.learner.gpus == 1
    assert spec.config.tuner.use_dora
    assert spec.config.training.packing
    assert spec.config.rollout_matching.vllm.sync.mode == "full"
