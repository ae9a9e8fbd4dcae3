"""`stage2 env`: what it says of this machine, and what it keeps to itself."""

import json
import platform
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from stage2_cli import environment
from stage2_cli.main import app


def ran(*options):
    done = CliRunner().invoke(app, ["env", *options])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_installed_versions_are_reported():
    found = json.loads(ran("--json"))
    assert found["python"] == platform.python_version()
    assert {name: found["packages"][name] for name in ("torch", "pydantic")} == {
        name: version(name) for name in ("torch", "pydantic")
    }
    assert found["stage2"] == version("stage2")


def test_missing_packages_are_named(monkeypatch):
    versions = {"stage2": "0.1.0", "torch": "2.13.0", "vllm": None}
    monkeypatch.setattr(environment, "versions_of_extras", lambda: dict(versions))
    lines = ran().splitlines()
    assert lines[-2:] == ["packages: torch 2.13.0", "not installed: vllm"]


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_environment_variables_that_may_hold_secrets_are_hidden(monkeypatch, form):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hf_secret" not in ran(*form)
    assert "CUDA_VISIBLE_DEVICES" in ran(*form)
