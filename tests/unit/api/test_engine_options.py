"""No allowed engine argument turns the guard off, runs code, listens elsewhere or reads other files."""

from __future__ import annotations

import pytest

from stage2_api.parsing import parse_job
from stage2_api.vllm import ENGINE_OPTIONS
from tests.unit.api.grpo_configs import GOOD_JOB, server
from tests.unit.api.wrong_jobs import merge_patch, problems_of

PATH = "spec.config.custom.extra.rollout_server.vllm_engine_kwargs"
HARMFUL = {
    "the guard": {"middleware": [], "api_key": ["mine"], "root_path": "/other", "disable_fastapi_docs": False},
    "where it listens": {"host": "0.0.0.0", "port": 80, "uds": "/tmp/s", "ssl_certfile": "", "allowed_origins": []},
    "code of the model": {"trust_remote_code": True, "hf_overrides": {"auto_map": {}}, "code_revision": "main"},
    "code of somebody": {
        "worker_cls": "a.B",
        "worker_extension_cls": "a.B",
        "scheduler_cls": "a.B",
        "distributed_executor_backend": "a.B",
        "logits_processors": ["a.B"],
        "tool_parser_plugin": "/tmp/a.py",
        "reasoning_parser_plugin": "/tmp/a.py",
        "io_processor_plugin": "a",
        "kv_transfer_config": {"kv_connector": "B", "kv_connector_module_path": "a"},
        "compilation_config": {"backend": "a.B"},
    },
    "pickles": {"load_format": "pt", "model_loader_extra_config": {}, "pt_load_map_location": "cpu"},
    "what is served": {
        "model": "/other", "tokenizer": "/other", "served_model_name": "x", "chat_template": "{{ 1 }}",
        "config_format": "mistral", "download_dir": "/tmp", "revision": "x", "speculative_config": {"model": "/other"},
    },
    "files of the server": {"allowed_local_media_path": "/", "allowed_media_domains": ["x"]},
    "how weights arrive": {"weight_transfer_config": {"backend": "nccl"}},
}  # fmt: skip
NAMED = [(why, name, value) for why, options in HARMFUL.items() for name, value in options.items()]


@pytest.mark.parametrize("spelt", [str, lambda name: name.replace("_", "-")], ids=["as a key", "as a flag"])
@pytest.mark.parametrize(("why", "name", "value"), NAMED, ids=[f"{why}: {name}" for why, name, _ in NAMED])
def test_an_engine_argument_that_is_not_of_speed_or_memory_is_refused(why, name, value, spelt):
    job = merge_patch(GOOD_JOB, {"spec": {"config": server(vllm_engine_kwargs={"seed": 3, spelt(name): value})}})
    (problem,) = problems_of(parse_job, job)
    assert problem.path == PATH
    assert "speed and memory only" in problem.rule


def test_none_of_them_is_among_those_of_speed_and_memory():
    assert not ENGINE_OPTIONS & {name for _, name, _ in NAMED}
