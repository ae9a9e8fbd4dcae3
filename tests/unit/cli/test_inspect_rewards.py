"""`stage2 inspect --rewards`: a table of what each reward says to one answer."""

import json

import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from stage2_api.errors import ConfigError
from stage2_cli.main import app
from tests.unit.api.grpo_configs import GOOD
from tests.unit.api.wrong_jobs import merge_patch

ANSWER = '<DOMAIN=BBU>, <TASK=SUMMARY>\n{"items": []}'


@pytest.fixture
def files(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
    metadata = {"_fusion_template": "summary_bbu", "_fusion_mode": "summary", "summary_ref": '{"items": []}'}
    (tmp_path / "train.jsonl").write_text(json.dumps({"images": ["image.png"], "metadata": metadata}))
    (tmp_path / "answer.txt").write_text(ANSWER)
    run = merge_patch(GOOD, {"custom": {"train_jsonl": str(tmp_path / "train.jsonl")}})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    return tmp_path


def inspected(files, *options):
    command = ["inspect", str(files / "run.yaml"), "--rewards", "--response-file", str(files / "answer.txt"), *options]
    return CliRunner().invoke(app, command)


def test_every_reward_is_shown_with_its_weight_and_the_sum(files):
    lines = [line.split() for line in inspected(files).output.splitlines()]
    assert ["│", "summary.header", "│", "1.000", "│", "2", "│", "2.000", "│"] in lines
    assert ["│", "total", "│", "│", "│", "3.000", "│"] in lines


def test_machines_get_json(files):
    found = json.loads(inspected(files, "--json").output)
    assert found == {"sample": 0, "rewards": {"summary.format": 1.0, "summary.header": 1.0}, "total": 3.0}


def test_a_record_that_there_is_not_is_refused(files):
    error = inspected(files, "--sample", "1").exception
    assert isinstance(error, ConfigError)
    assert "--sample: 1; must lie in 0..0" in str(error)
