"""A configuration becomes a command line and an environment, and nothing is lost on the way."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stage2_api.errors import EXIT_RETRYABLE, ConfigError
from stage2_api.parsing import parse_job, parse_run_config
from stage2_api.vllm import ENGINE_OPTIONS, Vllm
from stage2_trainer.serve import launch
from stage2_trainer.serve.launch import server_process
from stage2_trainer.serve.server_command import VLLM_MODULE, Endpoint, environment, stub_command, vllm_command
from stage2_trainer.sync.vllm import vllm_compat
from stage2_trainer.wire.credentials import Certificate

EXAMPLES = Path(__file__).parents[4] / "examples"
ENDPOINT = Endpoint("127.0.0.1", 8000)
CUDA_GRAPH_TOKENS = 512  # vLLM's default on H100 and H200 (vllm/config/vllm.py)


def config(vllm=None, **sections):
    server = {"servers": [{"base_url": "http://127.0.0.1:8000", "group_port": 51216}]}
    rollout_matching = {"vllm": {"mode": "server", "server": server, **(vllm or {})}}
    return parse_run_config(
        {
            "model": {"model": "/models/m", **sections.pop("model", {})},
            "training": {"output_dir": "out"},
            "custom": {"train_jsonl": "train.jsonl", "extra": {"rollout_matching": rollout_matching}},
            **sections,
        }
    )


def options(command):
    """The flags of a command line, with their values (None for switches)."""
    found, words = {}, command[3:]
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word[2:]] = None if following.startswith("--") else following
    return found


def test_vllm_server_command_has_token_guard_and_weight_transfer():
    found = options(vllm_command(config(), ENDPOINT, "cpu"))
    assert found["middleware"] == "stage2_trainer.serve.guard.TokenGuard"  # the last one is the outermost
    assert json.loads(found["weight-transfer-config"]) == {"backend": "tcp"}
    assert (found["model"], found["host"], found["port"]) == ("/models/m", "127.0.0.1", "8000")


@pytest.mark.parametrize(
    "command", [lambda made, at: vllm_command(made, at, "cpu"), stub_command], ids=["vllm", "stub"]
)
def test_server_command_with_certificate_uses_tls(command):
    found = options(command(config(), Endpoint("0.0.0.0", 8000, Certificate("/tls.crt", "/tls.key"))))
    assert (found["ssl-certfile"], found["ssl-keyfile"]) == ("/tls.crt", "/tls.key")
    assert not {"ssl-certfile", "ssl-keyfile"} & set(options(command(config(), ENDPOINT)))


def test_gpu_server_command_uses_nccl_and_configured_memory_share():
    found = options(vllm_command(config({"gpu_memory_utilization": 0.9}), ENDPOINT, "cuda"))
    assert json.loads(found["weight-transfer-config"]) == {"backend": "stage2-nccl"}
    assert found["gpu-memory-utilization"] == "0.9"


def test_nccl_transport_is_refused_for_cpu_vllm(monkeypatch):
    monkeypatch.setattr(launch, "installed_platform", lambda: "cpu")
    with pytest.raises(ConfigError, match=r"sync\.transport.*NCCL needs servers on GPUs"):
        server_process(config({"sync": {"transport": "nccl"}}), 0, ENDPOINT, "vllm")


def test_transport_can_be_chosen():
    found = options(vllm_command(config({"sync": {"transport": "tcp"}}), ENDPOINT, "cuda"))
    assert json.loads(found["weight-transfer-config"]) == {"backend": "tcp"}
    assert options(stub_command(config(), ENDPOINT))["transport"] == "tcp"
    assert options(stub_command(config({"sync": {"transport": "nccl"}}), ENDPOINT))["transport"] == "nccl"


@pytest.mark.parametrize(
    ("key", "value", "flag", "written"),
    [
        ("max_model_len", 4096, "max-model-len", "4096"),
        ("max_num_seqs", 8, "max-num-seqs", "8"),
        ("enforce_eager", True, "enforce-eager", None),
        ("enable_prefix_caching", False, "no-enable-prefix-caching", None),
        ("load_format", "auto", "load-format", "auto"),
        ("tensor_parallel_size", 2, "tensor-parallel-size", "2"),
        ("engine", {"limit_mm_per_prompt": {"image": 1}}, "limit-mm-per-prompt", '{"image": 1}'),
        ("limit_mm_per_prompt", {"image": 1}, "limit-mm-per-prompt", '{"image": 1}'),
        ("kv_cache_dtype", "fp8", "kv-cache-dtype", "fp8"),
        ("max_num_batched_tokens", 2048, "max-num-batched-tokens", "2048"),
        ("enable_chunked_prefill", False, "no-enable-chunked-prefill", None),
    ],
)
def test_engine_keys_become_flags(key, value, flag, written):
    found = options(vllm_command(config({key: value}), ENDPOINT, "cpu"))
    assert flag in found
    assert found[flag] == written


def test_engine_arguments_become_flags_in_either_spelling():
    engine = {"quantization": "fp8", "async-scheduling": False, "cudagraph_capture_sizes": [1, 8]}
    command = vllm_command(config({"engine": engine}), ENDPOINT, "cuda")
    found = options(command)
    assert found["quantization"] == "fp8"
    assert command[command.index("--cudagraph-capture-sizes") + 1 :][:2] == ["1", "8"]
    assert {"no-async-scheduling", "cudagraph-capture-sizes"} <= found.keys()


def test_engine_arguments_are_validated_by_installed_vllm():
    pytest.importorskip("vllm")
    launch.require_engine_options(config({"engine": {"quantization": "fp8", "seed": 3, "async-scheduling": True}}))
    with pytest.raises(ConfigError) as caught:
        launch.require_engine_options(config({"engine": {"seed": "three", "ubatch_size": 2, "block_size": [1, 2]}}))
    assert [problem.path.rpartition(".")[2] for problem in caught.value.problems] == ["seed", "block_size"]
    assert "invalid int value: 'three'" in str(caught.value)


def test_every_allowed_engine_argument_exists_in_installed_vllm():
    pytest.importorskip("vllm")
    values = {name: ["--" + name.replace("_", "-")] for name in ENGINE_OPTIONS}
    unknown = {name for name, reason in vllm_compat.refused_by_vllm(values).items() if "unrecognized" in reason}
    assert unknown == set(vllm_compat.REMOVED_OPTIONS)


def test_server_starts_with_dummy_weights_by_default():
    assert options(vllm_command(config(), ENDPOINT, "cpu"))["load-format"] == "dummy"
    assert options(stub_command(config(), ENDPOINT))["load-format"] == "dummy"


def test_server_with_dummy_weights_normalizes_images_in_processor():
    assert "no-mm-device-do-normalize" in options(vllm_command(config(), ENDPOINT, "cpu"))
    loaded = vllm_command(config({"load_format": "auto"}), ENDPOINT, "cpu")
    assert "no-mm-device-do-normalize" not in options(loaded)


def test_server_uses_pixel_limits_of_learner():
    limited = config(template={"min_pixels": 1024, "max_pixels": 9216})
    for command in (vllm_command(limited, ENDPOINT, "cpu"), stub_command(limited, ENDPOINT)):
        assert json.loads(options(command)["mm-processor-kwargs"]) == {"min_pixels": 1024, "max_pixels": 9216}
    assert "mm-processor-kwargs" not in options(vllm_command(config(), ENDPOINT, "cpu"))


def test_key_removed_from_vllm_is_ignored_with_warning(caplog):
    with caplog.at_level(logging.WARNING):
        found = options(vllm_command(config({"swap_space": 4.0}), ENDPOINT, "cuda"))
    assert "swap-space" not in found
    assert "swap_space is ignored" in caplog.text


def test_servers_on_same_machine_share_its_cores():
    assert environment({}, "cpu", cores=8, servers_here=3)["OMP_NUM_THREADS"] == "2"
    assert environment({}, "cpu", cores=2, servers_here=3)["OMP_NUM_THREADS"] == "1"


def test_workers_of_same_server_share_its_cores():
    assert environment({}, "cpu", cores=8, servers_here=2, workers=2)["OMP_NUM_THREADS"] == "2"
    assert environment({}, "cpu", cores=2, servers_here=1, workers=6)["OMP_NUM_THREADS"] == "1"


def test_eager_cpu_server_disables_compilation():
    assert environment({}, "cpu", cores=2, servers_here=1, eager=True)["TORCHDYNAMO_DISABLE"] == "1"
    for platform, eager in (("cpu", False), ("cuda", True)):
        assert "TORCHDYNAMO_DISABLE" not in environment({}, platform, cores=2, servers_here=1, eager=eager)


def test_cpu_server_with_single_worker_runs_it_in_same_process():
    one = environment({}, "cpu", cores=2, servers_here=1)
    two = environment({}, "cpu", cores=2, servers_here=1, workers=2)
    assert one["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in two


def test_gpu_server_disables_flashinfer_unless_environment_enables_it():
    compiled = ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ALLREDUCE_USE_FLASHINFER")
    gpu, cpu = (environment({}, platform, cores=2, servers_here=1) for platform in ("cuda", "cpu"))
    assert [gpu[name] for name in compiled] == ["0", "0"]
    assert not set(compiled) & set(cpu)
    chosen = {"VLLM_USE_FLASHINFER_SAMPLER": "1"}
    assert environment(chosen, "cuda", cores=2, servers_here=1)["VLLM_USE_FLASHINFER_SAMPLER"] == "1"


def test_environment_variables_set_by_user_are_kept():
    env = environment({"OMP_NUM_THREADS": "5", "PATH": "/bin"}, "cpu", cores=2, servers_here=1)
    assert (env["OMP_NUM_THREADS"], env["PATH"]) == ("5", "/bin")
    assert env["VLLM_SERVER_DEV_MODE"] == "1"


@pytest.mark.parametrize(
    ("platform", "vllm", "drafts"),
    [
        ("cpu", {"max_num_seqs": 8}, True),
        ("cpu", {"max_num_seqs": 9}, False),
        ("cpu", {"max_num_seqs": 9, "speculation": "frame"}, True),
        ("cuda", {"max_num_seqs": 256}, True),
        ("cuda", {"engine": {"async_scheduling": True}}, True),
        ("cuda", {"speculation": "none"}, False),
    ],
)
def test_frame_speculation_is_on_for_gpus_and_small_cpu_batches_or_when_configured(platform, vllm, drafts):
    written = options(vllm_command(config(vllm), ENDPOINT, platform))
    found = written.get("speculative-config")
    assert bool(found) is drafts
    assert written.get("per-request-spec-decode-metrics") == ("summary" if drafts else None)  # vLLM refuses it alone
    if found and platform == "cpu":
        most = json.loads(found)["num_speculative_tokens"]
        assert most == 24
        assert (most + 1) * vllm["max_num_seqs"] <= 2048


@pytest.mark.parametrize(("method", "lookup"), [("ngram", (2, 8)), ("frame", (2, 48))])
def test_gpu_server_drafts_fewer_tokens_in_larger_batches(method, lookup):
    dynamic = pytest.importorskip("vllm.v1.spec_decode.dynamic.utils")
    found = options(vllm_command(config({"speculation": method}), ENDPOINT, "cuda"))["speculative-config"]
    drafts = json.loads(found)
    assert (drafts["method"], drafts["prompt_lookup_min"], drafts["prompt_lookup_max"]) == ("ngram_gpu", *lookup)
    table = dynamic.build_dynamic_sd_schedule_lookup(
        drafts["num_speculative_tokens_per_batch_size"], 300, drafts["num_speculative_tokens"]
    )
    assert [table[at] for at in (1, 16, 17, 48, 49, 64, 65, 256, 300)] == [11, 11, 7, 7, 5, 5, 2, 2, 2]
    assert all(batch * (1 + table[batch]) <= CUDA_GRAPH_TOKENS for batch in range(1, 171))


def test_data_parallel_copies_draft_fixed_number_of_tokens():
    found = [
        Vllm(max_num_seqs=most).speculative_config(on_cpu=False, objects=True, copies=2) for most in (16, 48, 64, 257)
    ]
    assert [one["num_speculative_tokens"] for one in found] == [11, 7, 5, 2]
    assert not any("num_speculative_tokens_per_batch_size" in one for one in found)


def test_grpo_example_generates_whole_batch_with_drafts_of_seven_tokens():
    config = parse_job(yaml.safe_load((EXAMPLES / "job-grpo-objects.yaml").read_text())).spec.config
    found = options(vllm_command(config, ENDPOINT, "cuda"))
    copies, most = int(found["data-parallel-size"]), int(found["max-num-seqs"])
    drafted = json.loads(found["speculative-config"])["num_speculative_tokens"]
    assert copies * most >= config.grpo_batches(world_size=1).generation
    assert (drafted, most * (1 + drafted) <= CUDA_GRAPH_TOKENS) == (7, True)


def test_cpu_server_uses_cpu_method_for_ngrams():
    found = options(vllm_command(config({"speculation": "ngram", "max_num_seqs": 80}), ENDPOINT, "cpu"))
    drafts = json.loads(found["speculative-config"])
    assert (drafts["method"], drafts["num_speculative_tokens"]) == ("ngram", 24)


@pytest.mark.parametrize("changed", ["signature", "runner"])
def test_server_logs_that_it_drafts_nothing_if_vllm_supports_no_frames(changed, monkeypatch, caplog):
    if changed == "runner":
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    else:
        pytest.importorskip("vllm")
        ((place, parameters), *_) = vllm_compat.SIGNATURES.items()
        monkeypatch.setitem(vllm_compat.SIGNATURES, place, (*parameters, "other"))
    assert "speculative-config" not in options(vllm_command(config({}), ENDPOINT, "cuda"))
    assert "Nothing is drafted" in caplog.text
    assert "speculative-config" in options(vllm_command(config({"speculation": "ngram"}), ENDPOINT, "cuda"))


def test_pod_finds_its_first_server_in_server_list() -> None:
    urls = [f"https://pod-{pod}.x:{port}" for pod in (0, 1, 2) for port in (8000, 8001)]
    servers = [{"base_url": url, "group_port": 51216 + index} for index, url in enumerate(urls)]
    found = config(vllm={"server": {"servers": servers}})
    assert [launch.first_of_pod(found, pod) for pod in range(4)] == [0, 2, 4, None]


@pytest.mark.parametrize(("end", "code"), [("", EXIT_RETRYABLE), ("raise SystemExit(3)", 3)])
def test_vllm_server_never_exits_with_success_code(end, code, tmp_path):
    fakes = {
        "vllm.__init__": "",
        vllm_compat.SERVER_MODULE: f"assert __name__ == '__main__'\n{end}\n",
        vllm_compat.ENTRY_MODULE: "",
        vllm_compat.ENGINE_MODULE: "",
        "vllm.v1.engine.utils": "",
        "vllm.envs": "",
        "vllm.platforms": "class current_platform:\n    is_cpu = staticmethod(lambda: False)\n",
    }
    for name, code_of_fake in fakes.items():
        module = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(code_of_fake, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    ended = subprocess.run([sys.executable, "-m", VLLM_MODULE], env={**os.environ, "PYTHONPATH": path}, check=False)
    assert ended.returncode == code
