"""`stage2 export`: its output and exit code."""

import json

import pytest
from typer.testing import CliRunner

from stage2_api.errors import ConfigError
from stage2_cli.main import app
from tests.unit.report.inspected import TINY_MODEL


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from tests.unit.trainer.export.trained import saved, trained

    return saved(trained(TINY_MODEL, "dora"), TINY_MODEL, tmp_path_factory.mktemp("run"))


def exported(*words):
    return CliRunner().invoke(app, ["export", *map(str, words)])


def test_checkpoint_is_exported_as_model(checkpoint, tmp_path):
    done = exported(checkpoint, "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "verified" in done.output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_adapter_vllm_cannot_serve_is_exported_with_note(checkpoint, tmp_path):
    done = exported(checkpoint, "--output", tmp_path / "out", "--adapter")
    assert done.exit_code == 0, done.output
    assert "vLLM cannot load DoRA adapters" in done.output
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_contradictory_options_are_refused(checkpoint, tmp_path):
    done = exported(checkpoint, "--output", tmp_path / "out", "--adapter", "--dtype", "float32")
    assert isinstance(done.exception, ConfigError)
    assert done.exception.problems[0].path == "--dtype"
    assert not (tmp_path / "out").exists()
