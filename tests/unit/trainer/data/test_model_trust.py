"""Folders of models with pickled weights alone, or with code, are refused by each command, unless a key asks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file

from stage2_api.errors import EXIT_CONFIG, ConfigError
from stage2_api.parsing import parse_run_config
from stage2_cli.validate import validate_files
from stage2_trainer import main
from stage2_trainer.checks.examination import Examination
from stage2_trainer.checks.resources import GIB, Machine
from stage2_trainer.data.model_files import with_local_model
from stage2_trainer.model.policy import load_model, load_processor
from stage2_trainer.prepare.coordinate_tokens import prepare
from stage2_trainer.serve.launch import serve
from tests.support.hostile_checkpoints import Command
from tests.unit.trainer.learner.configs import SERVER, write_box_records

pytestmark = pytest.mark.in_turns(3, apart=True)

WITH_CODE = "from pathlib import Path\nPath({trace!r}).mkdir()\nclass Config: pass\n"
KINDS = {"pickled": "model.allow_pickled_weights: true", "code": "model.allow_remote_code: true"}


@pytest.fixture
def trace(tmp_path):
    """A folder that the model makes where it gets to run something."""
    return tmp_path / "made"


@pytest.fixture
def pickled(tmp_path, model_path):
    """The tiny model with its weights in a pickle."""
    folder = tmp_path / "pickled"
    shutil.copytree(model_path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(load_file(model_path / "model.safetensors"), folder / "pytorch_model.bin")
    return folder


def with_code(folder, trace, name="config.json", within=()):
    """Have a JSON file of a model name code that makes a folder when it is imported."""
    (folder / "stranger.py").write_text(WITH_CODE.format(trace=str(trace)))
    document = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    place = document
    for key in within:
        place = place.setdefault(key, {})
    place["auto_map"] = {"AutoConfig": "stranger.Config", "AutoProcessor": "stranger.Config"}
    (folder / name).write_text(json.dumps(document))
    return folder


@pytest.fixture
def code(tmp_path, model_path, trace):
    folder = tmp_path / "code"
    shutil.copytree(model_path, folder)
    with_code(folder, trace)
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, "model_type": "stranger"}))
    return folder


@pytest.fixture(params=KINDS)
def bad(request):
    """A folder that is refused, and the way to have it all the same."""
    return request.getfixturevalue(request.param), KINDS[request.param]


def document(folder, tmp_path, image, **model):
    """A configuration of stage 2 with servers, whose records are right."""
    return {
        "model": {"model": str(folder), **model},
        "training": {"output_dir": str(tmp_path / "out")},
        "custom": {
            "train_jsonl": write_box_records(tmp_path / "train.jsonl", image),
            "extra": {"rollout_matching": {"vllm": {"mode": "server", "server": SERVER}}},
        },
    }


@pytest.fixture
def config(bad, tmp_path, image_paths):
    return parse_run_config(document(bad[0], tmp_path, image_paths[0]))


@pytest.mark.parametrize("start", [main.learn, lambda config: main.check(config, world_size=1)], ids=["learn", "check"])
def test_learner_refuses_untrusted_model_and_names_key_that_allows_it(
    bad, config, token, termination_log, trace, start
):
    folder, way_out = bad
    assert start(config) == EXIT_CONFIG
    message = json.loads(termination_log.read_text())["message"]
    assert message.startswith(f"model.model: '{str(folder)[:20]}")
    assert way_out in message
    assert not trace.exists()


def test_server_refuses_untrusted_model(bad, config, token, trace):
    with pytest.raises(ConfigError, match=bad[1]):
        serve(config, 0, engine="stub")
    assert not trace.exists()


def test_validate_refuses_untrusted_model(bad, tmp_path, image_paths, capsys, trace):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(document(bad[0], tmp_path, image_paths[0])))
    assert validate_files([tmp_path / "config.yaml"]) == EXIT_CONFIG
    assert bad[1] in " ".join(capsys.readouterr().err.split())
    assert not trace.exists()


def test_doctor_reports_untrusted_model(bad, config, trace):
    machine = Machine((), shared_memory=8 * GIB, memory=64 * GIB, driver="")
    (found,) = [one for one in Examination(config, machine).findings() if one.what == "model"]
    assert found.verdict == "missing"
    assert bad[1] in found.way_out
    assert not trace.exists()


def test_prepare_refuses_untrusted_model(bad, tmp_path, trace):
    with pytest.raises(ConfigError, match=r"^MODEL: .*(safetensors|without it)"):
        prepare(str(bad[0]), tmp_path / "prepared")
    assert not trace.exists()


def test_allowed_pickled_weights_load_tensors_only(pickled, tmp_path, image_paths, trace):
    allowed = document(pickled, tmp_path, image_paths[0], allow_pickled_weights=True)
    folder = with_local_model(parse_run_config(allowed)).model.model
    loaded = load_model(folder, dtype=None, attn_implementation="sdpa", pickled=True)
    assert loaded.lm_head.weight.abs().sum() > 0
    with pytest.raises(OSError, match=r"safetensors"):
        load_model(folder, dtype=None, attn_implementation="sdpa")
    torch.save({"lm_head.weight": Command(trace)}, pickled / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"posix\.mkdir"):
        load_model(folder, dtype=None, attn_implementation="sdpa", pickled=True)
    assert not trace.exists()


def test_allow_remote_code_key_accepts_model_with_code(code, tmp_path, image_paths):
    allowed = document(code, tmp_path, image_paths[0], allow_remote_code=True)
    assert with_local_model(parse_run_config(allowed)).model.model == str(code)


@pytest.mark.parametrize(
    ("name", "within"),
    [
        ("tokenizer_config.json", ()),
        ("preprocessor_config.json", ()),
        ("processor_config.json", ("image_processor",)),
        ("config.json", ("text_config",)),
    ],
)
def test_model_code_is_found_in_every_config_file(model_path, tmp_path, image_paths, trace, name, within):
    folder = tmp_path / "code"
    shutil.copytree(model_path, folder)
    with_code(folder, trace, name, within)
    with pytest.raises(ConfigError, match=rf"auto_map in {name}"):
        with_local_model(parse_run_config(document(folder, tmp_path, image_paths[0])))


def test_loading_model_with_code_fails_without_terminal_prompt(code, trace):
    """Without a setting, transformers asks and waits 15 s."""
    script = "import sys; from stage2_trainer.model.policy import load_model; "
    script += "load_model(sys.argv[1], dtype=None, attn_implementation=None)"
    done = subprocess.run(
        [sys.executable, "-c", script, str(code)], input="y\n" * 9, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "trust_remote_code" in done.stderr.splitlines()[-1]
    assert "[y/N]" not in done.stdout
    assert not trace.exists()


def test_safetensors_are_preferred_over_pickled_weights(pickled, model_path, tmp_path, image_paths):
    shutil.copy(model_path / "model.safetensors", pickled)
    torch.save({"lm_head.weight": Command(tmp_path / "made")}, pickled / "pytorch_model.bin")
    folder = with_local_model(parse_run_config(document(pickled, tmp_path, image_paths[0]))).model.model
    load_model(folder, dtype=None, attn_implementation="sdpa")
    load_processor(folder)
    assert not (tmp_path / "made").exists()
