"""GRPO's keys: each rule with an example that breaks it, and what the keys become."""

from typing import Any

import pytest

from stage2_api.advice import idle_settings
from stage2_api.parsing import parse_run_config
from stage2_api.rules.grpo import GRPO_RULES
from stage2_api.rules.grpo_batches import batch_problems
from stage2_api.runconfig import RunConfig
from stage2_api.vllm import ServerAddress
from tests.unit.api.grpo_configs import GOOD, PLAN, job_problems, planned, run_problems, server
from tests.unit.api.wrong_jobs import merge_patch

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

# sentence, patch over the good run, path, phrase of the rule or the way out
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("another algorithm", rlhf(rlhf_type="dpo"), "rlhf.rlhf_type", "must be 'grpo'"),
    ("the variant without its section", {"rlhf": None, "custom": NO_GRPO}, "rlhf", "needs it"),
    (
        "the section of another variant",
        {"custom": {"trainer_variant": "rollout_matching_sft"}},
        "custom.trainer_variant",
        "set custom.trainer_variant to grpo",
    ),
    ("no vLLM", rlhf(use_vllm=False), "rlhf.use_vllm", "set it to true"),
    ("no mode", rlhf(vllm_mode=None), "rlhf.vllm_mode", "set it to server"),
    ("colocate", rlhf(vllm_mode="colocate"), "rlhf.vllm_mode", "set it to server"),
    ("a host of another machine", rlhf(vllm_server_host=["10.0.0.1"]), "rlhf.vllm_server_host[0]", "127.0.0.1"),
    ("two hosts", rlhf(vllm_server_host=["localhost"] * 2), "rlhf.vllm_server_host", "at most 1 items long"),
    ("no host", rlhf(vllm_server_host=[]), "rlhf.vllm_server_host", "at least 1 items long"),
    ("a host that is no list", rlhf(vllm_server_host="127.0.0.1"), "rlhf.vllm_server_host", "a list"),
    ("two ports", rlhf(vllm_server_port=[8080, 8081]), "rlhf.vllm_server_port", "at most 1 items long"),
    ("port 0", rlhf(vllm_server_port=[0]), "rlhf.vllm_server_port[0]", "at least 1"),
    ("a port too large", rlhf(vllm_server_port=[65536]), "rlhf.vllm_server_port[0]", "at most 65535"),
    ("no patience", rlhf(vllm_server_timeout=0), "rlhf.vllm_server_timeout", "above 0"),
    ("no rewards", rlhf(reward_funcs=[], reward_weights=None), "rlhf.reward_funcs", "at least 1 items long"),
    ("rewards left out", rlhf(reward_funcs=None), "rlhf.reward_funcs", "is required"),
    (
        "a legacy reward name",
        rlhf(reward_funcs=["summary_format", "summary.header"]),
        "rlhf.reward_funcs[0]",
        "of the form",
    ),
    ("too few weights", rlhf(reward_weights=[1.0]), "rlhf.reward_weights", "as long as rlhf.reward_funcs"),
    ("a reward twice", rlhf(reward_funcs=["summary.format"] * 2), "rlhf.reward_funcs", "counts once"),
    ("a group of one", rlhf(num_generations=1), "rlhf.num_generations", "at least 2"),
    ("a negative temperature", rlhf(temperature=-1.0), "rlhf.temperature", "above 0"),
    ("a negative KL weight", rlhf(beta=-0.1), "rlhf.beta", "at least 0"),
    ("an unknown estimator", rlhf(advantage_estimator="gae"), "rlhf.advantage_estimator", "one of"),
    ("an unknown scale", rlhf(scale_rewards="all"), "rlhf.scale_rewards", "one of"),
    ("an unknown truncation", rlhf(truncation_strategy="right"), "rlhf.truncation_strategy", "one of"),
    (
        "a key of the server beside the learner's",
        rlhf(vllm_max_model_len=8192),
        "rlhf.vllm_max_model_len",
        "did you mean custom.extra.rollout_server.vllm_max_model_len?",
    ),
    (
        "a key of the learner beside the server's",
        server(vllm_server_port=[8080]),
        f"{SERVER}.vllm_server_port",
        "did you mean rlhf.vllm_server_port?",
    ),
    ("an unknown key of the server", server(vllm_foo=1), f"{SERVER}.vllm_foo", "vllm_max_model_len, vllm_gpu"),
    (
        "an engine without the guard",
        server(vllm_engine_kwargs={"seed": 3, "middleware": []}),
        f"{SERVER}.vllm_engine_kwargs",
        "speed and memory only",
    ),
    (
        "an engine with somebody's code, in vLLM's own spelling",
        server(vllm_engine_kwargs={"worker-cls": "a.B"}),
        f"{SERVER}.vllm_engine_kwargs",
        "speed and memory only",
    ),
    ("no server", {"custom": {"extra": {"rollout_server": None}}}, SERVER, "how its server is started"),
    (
        "no tensor parallelism",
        server(vllm_tensor_parallel_size=None),
        f"{SERVER}.vllm_tensor_parallel_size",
        "required",
    ),
    ("no data parallelism", server(vllm_data_parallel_size=None), f"{SERVER}.vllm_data_parallel_size", "is required"),
    ("no length", server(vllm_max_model_len=None), f"{SERVER}.vllm_max_model_len", "is required"),
    ("no GPUs", server(vllm_tensor_parallel_size=0), f"{SERVER}.vllm_tensor_parallel_size", "at least 1"),
    ("true for a number", server(vllm_data_parallel_size=True), f"{SERVER}.vllm_data_parallel_size", "an integer"),
    ("a broken number", server(vllm_data_parallel_size=1.5), f"{SERVER}.vllm_data_parallel_size", "an integer"),
    ("a word for a number", server(vllm_data_parallel_size="six"), f"{SERVER}.vllm_data_parallel_size", "an integer"),
    ("a server too short", {"global_max_length": 12000}, f"{SERVER}.vllm_max_model_len", "at least global_max_length"),
    ("an answer too long", rlhf(max_completion_length=8192), f"{SERVER}.vllm_max_model_len", "hold a prompt"),
    (
        "all memory and more",
        server(vllm_gpu_memory_utilization=1.1),
        f"{SERVER}.vllm_gpu_memory_utilization",
        "at most 1",
    ),
    ("adapters", server(vllm_enable_lora=True), f"{SERVER}.vllm_enable_lora", "weights travel merged"),
    ("a rank of adapters", server(vllm_max_lora_rank=8), f"{SERVER}.vllm_max_lora_rank", "remove it"),
    ("text that is no JSON", server(vllm_limit_mm_per_prompt="image"), f"{SERVER}.vllm_limit_mm_per_prompt", "mapping"),
    ("no model", {"model": {"model": ""}}, "model.model", "at least 1 characters"),
    (
        "sampling of rollout matching",
        {"custom": {"extra": {"rollout_matching": {"temperature": 0.5}}}},
        "custom.extra.rollout_matching",
        "takes only its sections vllm.server and vllm.sync",
    ),
    ("packing", {"training": {"packing": True}}, "training.packing", "does not pack"),
    ("steps beside the batch", rlhf(steps_per_generation=2), "rlhf.steps_per_generation", "both cannot be set"),
    ("groups that do not fit", rlhf(num_generations=5), "rlhf.generation_batch_size", "num_generations, which is 5"),
    (
        "micro-batches that do not fit",
        {"training": {"per_device_train_batch_size": 5}},
        "rlhf.generation_batch_size",
        "a multiple of 5",
    ),
    ("no contract", {"custom": {"grpo": None}}, "custom.grpo.summary", "write the section"),
    ("no summaries", {"custom": {"use_summary": None}}, "custom.use_summary", "set it to true"),
    ("no header", {"custom": {"assistant_prefix_format": None}}, "custom.assistant_prefix_format", "header line"),
    *(
        (f"CHORD without {key}", chord(**{key: None}), "custom.grpo.chord", key)
        for key in CHORD
        if key not in ("enabled",)
    ),
    ("CHORD of more than everything", chord(mu_peak=1.5), "custom.grpo.chord.mu_peak", "at most 1"),
    ("CHORD without a batch", chord(sft_per_device_train_batch_size=0), *("custom.grpo.chord", "at least 1")),
    ("a plan without a total", planned(unified_batch_size=None), f"{PLANNED}.unified_batch_size", "needs it"),
    (
        "a plan without a micro-batch",
        planned(per_device_train_batch_size=None),
        f"{PLANNED}.per_device_train_batch_size",
        "needs it",
    ),
    (
        "a plan with other evaluation batches",
        planned(per_device_eval_batch_size=8),
        f"{PLANNED}.per_device_eval_batch_size",
        "must equal",
    ),
    (
        "a plan against an effective batch",
        merge_patch(planned(), {"training": {"effective_batch_size": 24}}),
        f"{PLANNED}.unified_batch_size",
        "training.effective_batch_size",
    ),
    (
        "a plan against a generation batch",
        merge_patch(planned(), {"rlhf": {"generation_batch_size": 24}}),
        f"{PLANNED}.unified_batch_size",
        "rlhf.generation_batch_size",
    ),
    (
        "a plan against a micro-batch",
        merge_patch(planned(), {"training": {"per_device_train_batch_size": 2}}),
        f"{PLANNED}.per_device_train_batch_size",
        "training.per_device_train_batch_size",
    ),
    (
        "a plan against evaluation batches",
        merge_patch(planned(), {"training": {"per_device_eval_batch_size": 2}}),
        f"{PLANNED}.per_device_train_batch_size",
        "training.per_device_eval_batch_size",
    ),
    (
        "a plan against accumulation",
        merge_patch(planned(), {"training": {"gradient_accumulation_steps": 2}}),
        "training.gradient_accumulation_steps",
        "follows from",
    ),
    (
        "a plan against steps of a round",
        merge_patch(planned(), rlhf(steps_per_generation=2)),
        "rlhf.steps_per_generation",
        "follows from",
    ),
    (
        "a plan whose total does not fit",
        planned(unified_batch_size=52),
        f"{PLANNED}.unified_batch_size",
        "a multiple of 6",
    ),
    (
        "a plan against the server's copies",
        planned(rollout_server={"force_vllm_data_parallel_size": 5}),
        f"{PLANNED}.rollout_server.force_vllm_data_parallel_size",
        "differs from",
    ),
    (
        "a plan against the server's shares",
        planned(rollout_server={"force_vllm_tensor_parallel_size": 2}),
        f"{PLANNED}.rollout_server.force_vllm_tensor_parallel_size",
        "differs from",
    ),
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
]


def good(*patches: dict[str, Any]) -> RunConfig:
    raw = GOOD
    for patch in patches:
        raw = merge_patch(raw, patch)
    return parse_run_config(raw)


def test_the_run_and_the_job_without_mistakes_are_taken() -> None:
    assert run_problems() == ()
    assert job_problems() == ()


@pytest.mark.parametrize(("patch", "path", "words"), [pytest.param(*rest, id=name) for name, *rest in WRONG])
def test_a_wrong_run_is_refused_with_the_key_and_the_way_out(patch: dict[str, Any], path: str, words: str) -> None:
    (problem,) = run_problems(patch)
    assert problem.path.startswith(path)
    assert words in str(problem)
    assert problem.way_out


@pytest.mark.parametrize(("patch", "path"), [pytest.param(*rest, id=name) for name, *rest in WRONG_ALONE])
def test_keys_of_grpo_are_refused_where_nothing_turns_it_on(patch: dict[str, Any], path: str) -> None:
    (problem,) = run_problems({"rlhf": None, "custom": {"trainer_variant": None, **NO_GRPO}}, {"custom": patch})
    assert problem.path == path
    assert "rlhf turns on" in problem.rule


@pytest.mark.parametrize(("patch", "path", "words"), [pytest.param(*rest, id=name) for name, *rest in WRONG_JOBS])
def test_a_wrong_job_is_refused_with_the_key_and_the_way_out(patch: dict[str, Any], path: str, words: str) -> None:
    (problem,) = job_problems(patch)
    assert problem.path == path
    assert words in str(problem)


def test_every_rule_has_an_example_that_breaks_it() -> None:
    told = {problem.rule for _, patch, *_ in WRONG for problem in run_problems(patch)}
    alone = {rule.rule for rule in GRPO_RULES if "rlhf turns on" in rule.rule}
    assert {rule.rule for rule in GRPO_RULES} - told == alone


@pytest.mark.parametrize("number", [6, 6.0, "6"])
def test_numbers_of_the_server_may_be_written_as_ms_swift_writes_them(number: object) -> None:
    assert good(server(vllm_data_parallel_size=number)).data_parallel_size == 6


def test_mappings_of_the_server_may_be_written_as_json() -> None:
    config = good(server(vllm_limit_mm_per_prompt='{"image": 1}', vllm_engine_kwargs='{"seed": 3}'))
    assert config.rollout_matching.vllm.limit_mm_per_prompt == {"image": 1}
    assert config.custom.extra.rollout_server is not None
    assert config.custom.extra.rollout_server.passed_through() == {"seed": 3}


def test_the_server_is_described_in_the_terms_that_all_runs_share() -> None:
    matching = good(rlhf(temperature=0.7, max_completion_length=2048, vllm_server_timeout=300.0)).rollout_matching
    vllm = matching.vllm
    assert vllm.server.resolved_servers() == (ServerAddress("http://127.0.0.1:8080", 51216),)
    assert (vllm.mode, vllm.server.timeout_s, vllm.max_model_len) == ("server", 300.0, 8192)
    assert (vllm.tensor_parallel_size, vllm.enable_lora, vllm.gpu_memory_utilization) == (1, False, 0.6)
    assert (matching.max_new_tokens, matching.temperature, matching.repetition_penalty) == (2048, 0.7, 1.0)


def test_addresses_that_a_controller_fills_in_come_before_those_of_rlhf() -> None:
    servers = [{"base_url": "http://rollout.ns.svc:8080", "group_port": 5000}]
    filled = {"custom": {"extra": {"rollout_matching": {"vllm": {"server": {"servers": servers}}}}}}
    found = good(filled).rollout_matching.vllm.server.resolved_servers()
    assert found == (ServerAddress("http://rollout.ns.svc:8080", 5000),)


def test_the_example_of_the_batch_plan_is_six_answers_eight_times() -> None:
    batches = good(planned()).grpo_batches(world_size=2)
    assert (batches.per_device, batches.accumulation, batches.generation) == (6, 4, 48)
    assert (batches.steps_per_generation, batches.prompts) == (4, 12)
    assert good(planned()).gradient_accumulation_steps(8) == 1
    assert not batches.needs_old_logprobs


def test_a_plan_forces_the_server() -> None:
    forced = {"force_vllm_data_parallel_size": 3, "force_vllm_tensor_parallel_size": 2, "max_num_seqs_per_gpu": 16}
    config = good(planned(rollout_server=forced), server(vllm_data_parallel_size=None, vllm_tensor_parallel_size=None))
    vllm = config.rollout_matching.vllm
    assert (config.data_parallel_size, vllm.tensor_parallel_size, vllm.max_num_seqs) == (3, 2, 32)


def test_a_plan_that_is_off_changes_nothing() -> None:
    config = good({"custom": {"grpo": {"batch_plan": {**PLAN, "enabled": False}}}})
    assert config.grpo_batches(world_size=2).per_device == 4


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
def test_old_log_probabilities_are_needed_when_weights_move_within_a_round(
    patch: dict[str, Any], *, needed: bool
) -> None:
    assert good(patch).grpo_batches(world_size=2).needs_old_logprobs is needed


def test_a_batch_that_fits_one_process_may_not_fit_seven() -> None:
    assert batch_problems(good(), 2) == []
    (problem,) = batch_problems(good(), 7, root="x.")
    assert (problem.path, problem.value) == ("x.rlhf.generation_batch_size", 48)
    assert "set it to 56" in problem.way_out


def test_the_spread_of_each_estimator_is_its_own_unless_it_is_said() -> None:
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
    ],
)
def test_settings_that_ms_swift_needs_and_we_do_not_are_told(patch: dict[str, Any], path: str) -> None:
    assert [problem.path for problem in idle_settings(good(patch))] == [path]
