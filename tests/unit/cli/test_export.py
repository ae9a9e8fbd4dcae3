"""`stage2 export`: its output and exit code."""

import json

import pytest
from typer.testing import CliRunner

from stage2_api.errors import ConfigError
from stage2_cli.main import app
from tests.http_server import QuietHandler, serving
from tests.unit.cli.test_light_start import stage2
from tests.unit.report.inspected import TINY_MODEL


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from tests.unit.trainer.export.trained import saved, trained

    return saved(trained(TINY_MODEL, "dora"), TINY_MODEL, tmp_path_factory.mktemp("run"))


def exported(*words):
    return CliRunner().invoke(app, ["export", *map(str, words)])


def test_a_checkpoint_becomes_a_model_and_is_compared(checkpoint, tmp_path):
    done = exported(checkpoint, "--output", tmp_path / "out", "--verify")
    assert done.exit_code == 0, done.output
    assert "verified" in done.output
    assert "log-probabilities differ by" in done.output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_adapter_that_vllm_cannot_serve_is_saved_with_a_note(checkpoint, tmp_path):
    done = exported(checkpoint, "--output", tmp_path / "out", "--adapter")
    assert done.exit_code == 0, done.output
    assert "vLLM cannot load DoRA adapters" in done.output
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--adapter", "--dtype", "float32"], "--dtype"),
        (["--adapter", "--verify"], "--verify"),
        (["--records", "data.jsonl"], "--records"),
    ],
)
def test_options_that_contradict_one_another_are_refused(checkpoint, tmp_path, words, shown):
    done = exported(checkpoint, "--output", tmp_path / "out", *words)
    assert isinstance(done.exception, ConfigError)
    assert done.exception.problems[0].path == shown
    assert not (tmp_path / "out").exists()


class Hub(QuietHandler):
    """A hub with one user, one repository, and no room for another."""

    def do_GET(self):
        known = self.headers["authorization"] == "Bearer hf_mine"
        if self.path == "/api/whoami-v2":
            self.answer(200 if known else 401)
        else:
            self.answer(200 if self.path == "/api/models/me/taken" else 404)

    def do_POST(self):
        self.answer(403)

    def answer(self, status):
        body = b'{"name": "me", "id": "me/taken", "error": "no"}'
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub():
    with serving(Hub) as server:
        yield server.url


@pytest.fixture
def pushed(checkpoint, tmp_path, hub):
    """A function that exports with --push, in a process whose hub is this one."""

    def push(repo, *, token="hf_mine", endpoint=hub):
        words = ["export", str(checkpoint), "--output", "out", "--push", repo]
        done, _ = stage2(tmp_path, *words, HF_ENDPOINT=endpoint, HF_TOKEN=token, HOME=str(tmp_path))
        return done, (tmp_path / "out").is_dir()

    return push


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"repo": "me/new", "endpoint": "http://127.0.0.1:9"}, "a hub that can be reached"),
        ({"repo": "me/new", "token": "hf_other"}, "hf auth login"),
        ({"repo": "me/taken"}, "must be a new repository"),
    ],
)
def test_what_a_hub_would_refuse_is_reported_before_anything_is_written(pushed, options, shown):
    done, made = pushed(**options)
    assert done.returncode == 64, done.stderr
    assert shown in done.stderr
    assert not made


def test_a_folder_that_a_hub_does_not_take_stays(pushed):
    done, made = pushed("me/new")
    assert done.returncode == 1, done.stderr
    assert "`hf upload me/new out` uploads it" in done.stderr
    assert made
