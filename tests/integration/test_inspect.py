"""`stage2 inspect CONFIG` against a real server: the answer comes from there, and the whole E-step follows."""

from __future__ import annotations

import json
import os

import pytest
import yaml
from PIL import Image

from tests.integration.conftest import run_config
from tests.support import forked
from tests.support.ports import free_port

ANSWER_TOKENS = 24


def inspect(folder, *options, token_file):
    command = [forked.STAGE2, "inspect", folder / "train.yaml", *options]
    environment = {**os.environ, "STAGE2_TOKEN_FILE": str(token_file)}
    return forked.run(command, imports=(*forked.LEARNER, "stage2_cli.inspect_sample"), env=environment)


def write_config(folder, base_url, model):
    record = {
        "images": ["scene.png"],
        "width": 96,
        "height": 96,
        "units": "bins",
        "objects": [{"desc": "box", "bbox_2d": [9, 9, 60, 60]}],
    }
    Image.new("RGB", (96, 96), "#dddddd").save(folder / "scene.png")
    (folder / "train.jsonl").write_text(json.dumps(record))
    config = run_config(base_url, free_port(), model=model, dtype="float32")
    config["custom"]["train_jsonl"] = str(folder / "train.jsonl")
    config["custom"]["extra"]["rollout_matching"]["max_new_tokens"] = ANSWER_TOKENS
    (folder / "train.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.parametrize("engine", ["stub", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_inspect_gets_answer_from_configured_server(engine, servers, tmp_path, model_path, token_file):
    write_config(tmp_path, servers(engine).base_url, model_path)
    done = inspect(tmp_path, "--sample", "0", "--json", "--picture", str(tmp_path / "drawn.png"), token_file=token_file)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["prefix_ids"]) <= ANSWER_TOKENS
    assert found["y_train_text"] == found["prefix_text"] + found["append_text"]
    assert len(found["ground_truth"]) == len(found["matches"]) + len(found["false_negatives"]) == 1
    assert len(found["labels"]) == len(found["y_train_ids"])
    with Image.open(tmp_path / "drawn.png") as drawn:
        assert drawn.format == "PNG"


def test_inspect_without_server_exits_with_retryable_code(tmp_path, model_path, token_file):
    url = f"http://127.0.0.1:{free_port()}"
    write_config(tmp_path, url, model_path)
    done = inspect(tmp_path, token_file=token_file)
    assert done.returncode == 75
    assert done.stdout == ""
    assert url in done.stderr
