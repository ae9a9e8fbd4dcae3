"""GRPO's keys: an example that breaks each rule, engine arguments that are refused, and the settings that follow."""

from typing import Any

import pytest

from stage2_api.advice import idle_settings
from stage2_api.parsing import parse_job, parse_run_config
from stage2_api.rules.grpo import GRPO_RULES
from stage2_api.rules.grpo_batches import batch_problems
from stage2_api.runconfig import RunConfig
from stage2_api.vllm import ENGINE_OPTIONS, ServerAddress
from tests.unit.api.grpo_configs import GOOD, GOOD_JOB, PLAN, job_problems, planned, run_problems, server
from tests.unit.api.wrong_jobs import merge_patch, patched, problems_of

SERVER = "custom.extra.rollout_server"
PLANNED = "custom.grpo.batch_plan"
CHORD = {
    "enabled": True,
    "sft_per_device_train_batch_size": 1,
    "mu_warmup_steps": 0,
    "mu_decay_steps": 10,
    "mu_peak": 0.9,
    "mu_valley": 0.1,
    "enable_phi_function": False,
}


def rlhf(**changes: object) -> dict[str, Any]:
    return {"rlhf": changes}


def chord(**changes: object) -> dict[str, Any]:
    return {"custom": {"grpo": {"chord": {**CHORD, **changes}}}}


NO_GRPO = {
    "grpo": None,
    "use_summary": None,
    "extra": {"rollout_server": None, "rollout_matching": {"rollout_backend": "hf"}},
}

Row = tuple[dict[str, Any], str, str]  # changes, key below the section, phrase of the problem

WRONG_RLHF: list[Row] = [
    ({"rlhf_type": "dpo"}, "rlhf_type", "must be 'grpo'"),
    ({"use_vllm": False}, "use_vllm", "set it to true"),
    ({"vllm_mode": None}, "vllm_mode", "set it to server"),
    ({"vllm_mode": "colocate"}, "vllm_mode", "set it to server"),
    ({"vllm_server_host": ["10.0.0.1"]}, "vllm_server_host[0]", "127.0.0.1"),
    ({"vllm_server_host": ["localhost"] * 2}, "vllm_server_host", "at most 1 items long"),
    ({"vllm_server_host": []}, "vllm_server_host", "at least 1 items long"),
    ({"vllm_server_host": "127.0.0.1"}, "vllm_server_host", "a list"),
    ({"vllm_server_port": [8080, 8081]}, "vllm_server_port", "at most 1 items long"),
    ({"vllm_server_port": [0]}, "vllm_server_port[0]", "at least 1"),
    ({"vllm_server_port": [65536]}, "vllm_server_port[0]", "at most 65535"),
    ({"vllm_server_timeout": 0}, "vllm_server_timeout", "above 0"),
    ({"reward_funcs": [], "reward_weights": None}, "reward_funcs", "at least 1 items long"),
    ({"reward_funcs": None}, "reward_funcs", "is required"),
    ({"reward_funcs": ["summary_format", "summary.header"]}, "reward_funcs[0]", "of the form"),
    ({"reward_weights": [1.0]}, "reward_weights", "as long as rlhf.reward_funcs"),
    ({"reward_funcs": ["summary.format"] * 2}, "reward_funcs", "only once"),
    ({"reward_funcs": ["summary.format", "mine.py:f"]}, "reward_files", "the text of each file"),
    ({"reward_files": {"mine.py": ""}}, "reward_files", "no file that rlhf.reward_funcs does not name"),
    ({"num_generations": 1}, "num_generations", "at least 2"),
    ({"num_generations": 5}, "generation_batch_size", "num_generations, which is 5"),
    ({"temperature": -1.0}, "temperature", "above 0"),
    ({"beta": -0.1}, "beta", "at least 0"),
    ({"advantage_estimator": "gae"}, "advantage_estimator", "one of"),
    ({"scale_rewards": "all"}, "scale_rewards", "one of"),
    ({"truncation_strategy": "right"}, "truncation_strategy", "one of"),
    ({"vllm_max_model_len": 8192}, "vllm_max_model_len", f"did you mean {SERVER}.vllm_max_model_len?"),
    ({"steps_per_generation": 2}, "steps_per_generation", "both cannot be set"),
]
WRONG_SERVER: list[Row] = [
    ({"vllm_server_port": [8080]}, "vllm_server_port", "did you mean rlhf.vllm_server_port?"),
    ({"vllm_foo": 1}, "vllm_foo", "vllm_max_model_len, vllm_gpu"),
    ({"vllm_engine_kwargs": {"worker-cls": "a.B"}}, "vllm_engine_kwargs", "speed and memory only"),
    ({"vllm_tensor_parallel_size": None}, "vllm_tensor_parallel_size", "required"),
    ({"vllm_data_parallel_size": None}, "vllm_data_parallel_size", "is required"),
    ({"vllm_max_model_len": None}, "vllm_max_model_len", "is required"),
    ({"vllm_tensor_parallel_size": 0}, "vllm_tensor_parallel_size", "at least 1"),
    ({"vllm_data_parallel_size": True}, "vllm_data_parallel_size", "an integer"),
    ({"vllm_data_parallel_size": 1.5}, "vllm_data_parallel_size", "an integer"),
    ({"vllm_data_parallel_size": "six"}, "vllm_data_parallel_size", "an integer"),
    ({"vllm_gpu_memory_utilization": 1.1}, "vllm_gpu_memory_utilization", "at most 1"),
    ({"vllm_quantization": "awq"}, "vllm_quantization", "weights that a push brings"),
    ({"vllm_enable_lora": True}, "vllm_enable_lora", "sends merged weights"),
    ({"vllm_max_lora_rank": 8}, "vllm_max_lora_rank", "remove it"),
    ({"vllm_limit_mm_per_prompt": "image"}, "vllm_limit_mm_per_prompt", "mapping"),
]
WRONG_PLAN: list[Row] = [
    ({"unified_batch_size": None}, "unified_batch_size", "needs it"),
    ({"per_device_train_batch_size": None}, "per_device_train_batch_size", "needs it"),
    ({"per_device_eval_batch_size": 8}, "per_device_eval_batch_size", "must equal"),
    ({"unified_batch_size": 52}, "unified_batch_size", "which is 6"),
    (
        {"rollout_server": {"force_vllm_data_parallel_size": 5}},
        "rollout_server.force_vllm_data_parallel_size",
        "differs from",
    ),
    (
        {"rollout_server": {"force_vllm_tensor_parallel_size": 2}},
        "rollout_server.force_vllm_tensor_parallel_size",
        "differs from",
    ),
]
# Settings that contradict a valid plan: key, value, path of the problem.
AGAINST_PLAN = [
    ("training.effective_batch_size", 24, f"{PLANNED}.unified_batch_size"),
    ("rlhf.generation_batch_size", 24, f"{PLANNED}.unified_batch_size"),
    ("rlhf.generation_batch_size", 96, f"{PLANNED}.unified_batch_size"),
    ("training.per_device_train_batch_size", 2, f"{PLANNED}.per_device_train_batch_size"),
    ("training.per_device_eval_batch_size", 2, f"{PLANNED}.per_device_train_batch_size"),
    ("training.gradient_accumulation_steps", 2, "training.gradient_accumulation_steps"),
    ("rlhf.steps_per_generation", 2, "rlhf.steps_per_generation"),
]


def against_plan(path: str, value: int) -> dict[str, Any]:
    section, key = path.split(".")
    return merge_patch(planned(), {section: {key: value}})


# Patch of the good run, path of the problem, phrase of the problem.
WRONG: list[Row] = [
    *((rlhf(**changes), f"rlhf.{key}", words) for changes, key, words in WRONG_RLHF),
    *((server(**changes), f"{SERVER}.{key}", words) for changes, key, words in WRONG_SERVER),
    *((planned(**changes), f"{PLANNED}.{key}", words) for changes, key, words in WRONG_PLAN),
    *((against_plan(key, value), path, "follows from" if key == path else key) for key, value, path in AGAINST_PLAN),
    ({"rlhf": None, "custom": NO_GRPO}, "rlhf", "needs it"),
    ({"custom": {"trainer_variant": "rollout_matching_sft"}}, "custom.trainer_variant", "trainer_variant to grpo"),
    ({"custom": {"extra": {"rollout_server": None}}}, SERVER, "arguments of its server"),
    ({"global_max_length": 12000}, f"{SERVER}.vllm_max_model_len", "at least global_max_length"),
    (rlhf(max_completion_length=8192), f"{SERVER}.vllm_max_model_len", "room for a prompt"),
    ({"model": {"model": ""}}, "model.model", "at least 1 characters"),
    (
        {"custom": {"extra": {"rollout_matching": {"temperature": 0.5}}}},
        "custom.extra.rollout_matching",
        "uses only its sections vllm.server and vllm.sync",
    ),
    ({"training": {"packing": True}}, "training.packing", "does not pack"),
    ({"training": {"per_device_train_batch_size": 5}}, "rlhf.generation_batch_size", "which is 5"),
    ({"custom": {"grpo": None}}, "custom.grpo.summary", "write the section"),
    ({"custom": {"use_summary": None}}, "custom.use_summary", "set it to true"),
    (rlhf(reward_funcs=["objects.f1", "summary.format"]), "custom.use_summary", "set it to false"),
    ({"custom": {"assistant_prefix_format": None}}, "custom.assistant_prefix_format", "header line"),
    *((chord(**{key: None}), "custom.grpo.chord", key) for key in CHORD if key != "enabled"),
    (chord(mu_peak=1.5), "custom.grpo.chord.mu_peak", "at most 1"),
    (chord(sft_per_device_train_batch_size=0), "custom.grpo.chord", "at least 1"),
]
WRONG_ALONE: list[tuple[str, dict[str, Any], str]] = [
    ("the server of a GRPO run", {"extra": {"rollout_server": {"vllm_max_model_len": 64}}}, SERVER),
    ("CHORD", {"grpo": {"chord": CHORD}}, "custom.grpo"),
    ("summaries", {"use_summary": True}, "custom.grpo"),
]
WRONG_JOBS: list[tuple[str, dict[str, Any], str, str]] = [
    ("two servers", {"rollout": {"servers": 2}}, "spec.rollout.servers", "a GRPO run has one server"),
    ("no server", {"rollout": {"servers": 0}}, "spec.rollout.servers", "needs rollout servers"),
    ("five GPUs for six copies", {"rollout": {"gpusPerServer": 5}}, "spec.rollout.gpusPerServer", "times"),
    ("a port of its own", {"rollout": {"port": 8000}}, "spec.rollout.port", "vllm_server_port"),
    ("five learner GPUs for 48 answers", {"learner": {"gpus": 5}}, "spec.config.rlhf", "learner processes"),
    (
        "a GPU on each of five nodes for 48 answers",
        {"engine": "JobSet", "learner": {"gpus": 1, "nodes": 5}},
        "spec.config.rlhf",
        "learner processes",
    ),
]


def good(*patches: dict[str, Any]) -> RunConfig:
    return parse_run_config(patched(GOOD, *patches))


def test_valid_run_and_job_are_accepted() -> None:
    assert run_problems() == ()
    assert job_problems() == ()


@pytest.mark.parametrize(("patch", "path", "words"), WRONG, ids=[f"{path}: {words}" for _, path, words in WRONG])
def test_invalid_run_is_refused_with_key_and_advice(patch: dict[str, Any], path: str, words: str) -> None:
    (problem,) = run_problems(patch)
    assert problem.path.startswith(path)
    assert words in str(problem)
    assert problem.way_out


@pytest.mark.parametrize(("patch", "path"), [pytest.param(*rest, id=name) for name, *rest in WRONG_ALONE])
def test_grpo_keys_are_refused_without_rlhf(patch: dict[str, Any], path: str) -> None:
    (problem,) = run_problems({"rlhf": None, "custom": {"trainer_variant": None, **NO_GRPO}}, {"custom": patch})
    assert problem.path == path
    assert "rlhf turns on" in problem.rule


@pytest.mark.parametrize(("patch", "path", "words"), [pytest.param(*rest, id=name) for name, *rest in WRONG_JOBS])
def test_invalid_job_is_refused_with_key_and_advice(patch: dict[str, Any], path: str, words: str) -> None:
    (problem,) = job_problems(patch)
    assert problem.path == path
    assert words in str(problem)


def test_every_rule_has_breaking_example() -> None:
    broken = {problem.rule for patch, *_ in WRONG for problem in run_problems(patch)}
    alone = {rule.rule for rule in GRPO_RULES if "rlhf turns on" in rule.rule}
    assert {rule.rule for rule in GRPO_RULES} - broken == alone


@pytest.mark.parametrize("number", [6, 6.0, "6"])
def test_server_numbers_are_accepted_as_written_for_ms_swift(number: object) -> None:
    assert good(server(vllm_data_parallel_size=number)).data_parallel_size == 6


def test_server_mappings_are_accepted_as_json_text() -> None:
    config = good(server(vllm_limit_mm_per_prompt='{"image": 1}', vllm_engine_kwargs='{"seed": 3}'))
    assert config.rollout_matching.vllm.limit_mm_per_prompt == {"image": 1}
    assert config.custom.extra.rollout_server is not None
    assert config.custom.extra.rollout_server.passed_through() == {"seed": 3}


def test_server_settings_translate_to_common_vllm_settings() -> None:
    matching = good(rlhf(temperature=0.7, max_completion_length=2048, vllm_server_timeout=300.0)).rollout_matching
    vllm = matching.vllm
    assert vllm.server.resolved_servers() == (ServerAddress("http://127.0.0.1:8080", 51216),)
    assert (vllm.mode, vllm.server.timeout_s, vllm.max_model_len) == ("server", 300.0, 8192)
    assert (vllm.tensor_parallel_size, vllm.enable_lora, vllm.gpu_memory_utilization) == (1, False, 0.6)
    assert (matching.max_new_tokens, matching.temperature, matching.repetition_penalty) == (2048, 0.7, 1.0)


def test_server_addresses_from_controller_override_rlhf() -> None:
    servers = [{"base_url": "http://rollout.ns.svc:8080", "group_port": 5000}]
    filled = {"custom": {"extra": {"rollout_matching": {"vllm": {"server": {"servers": servers}}}}}}
    found = good(filled).rollout_matching.vllm.server.resolved_servers()
    assert found == (ServerAddress("http://rollout.ns.svc:8080", 5000),)


def test_batch_plan_example_gives_six_prompts_with_eight_answers() -> None:
    batches = good(planned()).grpo_batches(world_size=2)
    assert (batches.per_device, batches.accumulation, batches.generation) == (6, 4, 48)
    assert (batches.steps_per_generation, batches.prompts) == (4, 12)
    assert good(planned()).gradient_accumulation_steps(8) == 1
    assert not batches.needs_old_logprobs


def test_batch_plan_overrides_server_parallelism() -> None:
    forced = {"force_vllm_data_parallel_size": 3, "force_vllm_tensor_parallel_size": 2, "max_num_seqs_per_gpu": 16}
    config = good(planned(rollout_server=forced), server(vllm_data_parallel_size=None, vllm_tensor_parallel_size=None))
    vllm = config.rollout_matching.vllm
    assert (config.data_parallel_size, vllm.tensor_parallel_size, vllm.max_num_seqs) == (3, 2, 32)


def test_disabled_batch_plan_changes_nothing() -> None:
    config = good({"custom": {"grpo": {"batch_plan": {**PLAN, "enabled": False}}}})
    assert config.grpo_batches(world_size=2).per_device == 4
    forced = {"rollout_server": {"force_vllm_tensor_parallel_size": 7}, "enabled": False}
    assert good({"custom": {"grpo": {"batch_plan": {**PLAN, **forced}}}}).grpo_batches(world_size=2).per_device == 4


@pytest.mark.parametrize(
    ("patch", "needed"),
    [
        ({}, False),
        ({"training": {"effective_batch_size": 96}}, False),
        ({"training": {"effective_batch_size": 24}}, True),
        ({"training": {"effective_batch_size": 72}}, True),
        (rlhf(num_iterations=2), True),
    ],
)
def test_old_logprobs_are_needed_when_weights_change_within_round(patch: dict[str, Any], *, needed: bool) -> None:
    assert good(patch).grpo_batches(world_size=2).needs_old_logprobs is needed


def test_generation_batch_not_divisible_by_world_size_is_reported() -> None:
    assert batch_problems(good(), 2) == []
    (problem,) = batch_problems(good(), 7)
    assert (problem.path, problem.value) == ("rlhf.generation_batch_size", 48)
    assert "set it to 56" in problem.way_out


def test_reward_scale_defaults_by_advantage_estimator() -> None:
    def scale(**changes: object) -> str:
        found = good(rlhf(**changes)).rlhf
        assert found is not None
        return found.resolved_scale

    assert scale() == "group"
    assert scale(advantage_estimator="rloo") == "none"
    assert scale(advantage_estimator="reinforce_plus_plus") == "batch"
    assert scale(advantage_estimator="rloo", scale_rewards="batch") == "batch"


@pytest.mark.parametrize(
    ("patch", "path"),
    [
        (rlhf(truncation_strategy="delete"), "rlhf.truncation_strategy"),
        (server(vllm_use_async_engine=True), f"{SERVER}.vllm_use_async_engine"),
        ({"tuner": {"lora_dropout": 0.1}}, "tuner.lora_dropout"),
    ],
)
def test_settings_ignored_by_grpo_get_advice(patch: dict[str, Any], path: str) -> None:
    assert [problem.path for problem in idle_settings(good(patch))] == [path]


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
def test_engine_argument_beyond_speed_and_memory_is_refused(why, name, value, spelt):
    job = merge_patch(GOOD_JOB, {"spec": {"config": server(vllm_engine_kwargs={"seed": 3, spelt(name): value})}})
    (problem,) = problems_of(parse_job, job)
    assert problem.path == f"spec.config.{SERVER}.vllm_engine_kwargs"
    assert "speed and memory only" in problem.rule


def test_refused_engine_arguments_are_not_in_allowed_list():
    assert not ENGINE_OPTIONS & {name for _, name, _ in NAMED}
