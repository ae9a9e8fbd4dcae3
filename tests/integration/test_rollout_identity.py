"""Before the first step, a server that would read prompts differently is found out, real vLLM and the stub alike."""

import json
import shutil
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import numpy as np
import pytest
from transformers import AutoProcessor

from stage2_api.errors import ConfigError
from stage2_trainer.data.encode import Encoder
from stage2_trainer.rollouts.build import check_identity
from stage2_trainer.wire.client import ServerClient
from tests.integration.policies import image_chat
from tests.unit.trainer.data.odd_images import FILES


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("identity")
    return image_chat(folder / "image.png", np.full((48, 96, 3), 200, dtype=np.uint8))


@pytest.fixture(params=["stub", pytest.param("vllm", marks=pytest.mark.vllm)])
def client(request, servers, token):
    client = ServerClient(servers(request.param).base_url, token, timeout_s=60)
    client.post("/resume", "test")
    return client


def check(client, model, chat, **limits):
    processor = AutoProcessor.from_pretrained(model, **limits)
    check_identity([client], processor, chat, Encoder(processor).prompt(chat).input_ids.tolist())


def changed_model(model_path, folder, **files):
    """A copy of the model directory, each named JSON file changed by a function."""
    copied = folder / "model"
    shutil.copytree(model_path, copied)
    for name, change in files.items():
        file = copied / f"{name}.json"
        document = json.loads(file.read_text())
        change(document)
        file.write_text(json.dumps(document))
    return copied


def test_same_model_folder_passes_identity_check(client, model_path, chat):
    check(client, model_path, chat)


@pytest.mark.parametrize("name", FILES)
def test_server_sees_same_pixels_as_learner_for_any_image_file(client, model_path, tmp_path, name):
    """The check compares the processed pixels' hash and grid, as this server made them of what it was sent."""
    image, options = FILES[name]
    image.save(tmp_path / name, **options)
    check(client, model_path, image_chat(tmp_path / name))


def test_identity_check_passes_after_other_prompts(client, model_path, chat):
    processor = AutoProcessor.from_pretrained(model_path)
    processor.tokenizer(["a", "a much longer text"], padding=True, truncation=True, max_length=3)
    check_identity([client], processor, chat, Encoder(processor).prompt(chat).input_ids.tolist())


def test_identity_check_resumes_server_left_paused_by_dead_learner(client, model_path, chat):
    """A learner that is killed in a push has stopped generation and opened an update."""
    client.post("/pause?mode=abort&clear_cache=false", "test")
    client.post("/start_weight_update", "test")
    check(client, model_path, chat)
    assert client.get("/is_paused", "test") == {"is_paused": False}
    assert client.weight_version() == "unfinished"
    client.post("/start_weight_update", "test")  # the other one is closed
    client.post("/finish_weight_update", "test", body={"weight_version": "default"})


def test_different_pixel_limits_are_reported_with_both_values(client, model_path, chat):
    with pytest.raises(ConfigError) as caught:
        check(client, model_path, chat, min_pixels=9216, max_pixels=9216)
    paths = [problem.path for problem in caught.value.problems]
    assert paths == [f"server {client.base_url} {name}" for name in ("image_min_pixels", "prompt_token_ids")]
    assert caught.value.problems[0].value == 1024
    assert "9216" in caught.value.problems[0].rule


def test_different_vocabulary_is_found_even_if_prompt_does_not_use_it(client, model_path, chat, tmp_path):
    def rename(tokenizer):
        tokenizer["added_tokens"][-1]["content"] = "<|another|>"

    other = changed_model(model_path, tmp_path, tokenizer=rename)
    with pytest.raises(ConfigError) as caught:
        check(client, other, chat)
    assert [problem.path for problem in caught.value.problems] == [f"server {client.base_url} tokenizer_sha256"]


def test_different_image_normalization_is_found_despite_equal_token_ids(client, model_path, chat, tmp_path):
    def darken(processor):
        processor["image_processor"]["image_mean"] = [0.4, 0.5, 0.5]

    other = changed_model(model_path, tmp_path, processor_config=darken)
    with pytest.raises(ConfigError) as caught:
        check(client, other, chat)
    assert [problem.path for problem in caught.value.problems] == [f"server {client.base_url} image_pixels_sha256"]


def test_server_without_identity_route_is_refused_with_advice(token, model_path, chat):
    with HTTPServer(("127.0.0.1", 0), type("Silent", (BaseHTTPRequestHandler,), {"do_GET": _not_found})) as other:
        Thread(target=other.handle_request, daemon=True).start()
        client = ServerClient(f"http://127.0.0.1:{other.server_port}", token, timeout_s=10)
        with pytest.raises(ConfigError, match="stage2 serve"):
            check(client, model_path, chat)


def _not_found(handler):
    handler.send_error(404)
