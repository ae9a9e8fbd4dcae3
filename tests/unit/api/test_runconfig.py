"""The training YAML: `extends`, rules between keys, and derived values."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from stage2_api.advice import idle_settings
from stage2_api.errors import ConfigError, Problem
from stage2_api.parsing import parse_job, parse_run_config, resolve_extends
from stage2_api.runconfig import RunConfig
from stage2_api.vllm import OLDER_OPTIONS, ServerAddress, Vllm
from tests.unit.api.wrong_jobs import good_job, patched, problems_of

Files = dict[str, dict[str, Any]]


def reader(root: Path, files: Files) -> Callable[[Path], Mapping[str, Any]]:
    by_path = {(root / name).resolve(): content for name, content in files.items()}
    return lambda path: by_path[path.resolve()]


def resolved(root: Path, files: Files, name: str = "run.yaml") -> dict[str, Any]:
    return resolve_extends(root / name, reader(root, files))


def test_extended_mappings_merge_and_other_values_are_replaced(tmp_path: Path) -> None:
    base = {"training": {"seed": 1, "report_to": ["a", "b"]}, "model": {"model": "m"}}
    own = {"extends": "base.yaml", "training": {"seed": 2, "report_to": ["c"]}, "model": None}
    assert resolved(tmp_path, {"base.yaml": base, "run.yaml": own}) == {
        "training": {"seed": 2, "report_to": ["c"]},
        "model": None,
    }


def test_later_base_config_overrides_earlier_one(tmp_path: Path) -> None:
    files: Files = {"a.yaml": {"x": "a", "y": "a"}, "b.yaml": {"x": "b"}, "run.yaml": {"extends": ["a.yaml", "b.yaml"]}}
    assert resolved(tmp_path, files) == {"x": "b", "y": "a"}


def test_extends_paths_are_relative_to_their_file(tmp_path: Path) -> None:
    files: Files = {
        "base.yaml": {"x": 1},
        "sub/middle.yaml": {"extends": "../base.yaml", "y": 2},
        "run.yaml": {"extends": "sub/middle.yaml"},
    }
    assert resolved(tmp_path, files) == {"x": 1, "y": 2}


def test_extends_cycle_is_reported_with_its_path(tmp_path: Path) -> None:
    files: Files = {"a.yaml": {"extends": "b.yaml"}, "b.yaml": {"extends": "a.yaml"}}
    with pytest.raises(ConfigError, match=r"a\.yaml → b\.yaml → a\.yaml"):
        resolved(tmp_path, files, "a.yaml")


def test_base_config_shared_by_two_files_is_not_a_cycle(tmp_path: Path) -> None:
    files: Files = {
        "base.yaml": {"x": 1},
        "a.yaml": {"extends": "base.yaml", "a": 1},
        "b.yaml": {"extends": "base.yaml", "b": 1},
        "run.yaml": {"extends": ["a.yaml", "b.yaml"]},
    }
    assert resolved(tmp_path, files) == {"x": 1, "a": 1, "b": 1}


@pytest.mark.parametrize("extends", [5, {"a": 1}, ["a.yaml", 5], [""]])
def test_extends_value_that_is_no_path_is_refused(tmp_path: Path, extends: object) -> None:
    with pytest.raises(ConfigError, match="relative to this file"):
        resolved(tmp_path, {"run.yaml": {"extends": extends}})


@pytest.mark.parametrize("base", ["../base.yaml", "/etc/shadow", "shadow", "sub/../../base.yaml", "outside.yaml"])
def test_base_config_outside_folder_is_refused_unread(tmp_path: Path, base: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "outside.yaml").symlink_to(tmp_path / "base.yaml")
    files: Files = {"run/run.yaml": {"extends": base}}
    with pytest.raises(ConfigError, match=r"extends: '.*'; must be a YAML file .* in the folder of the first file"):
        resolved(tmp_path, files, "run/run.yaml")


def test_base_config_used_many_times_is_read_once(tmp_path: Path) -> None:
    files: Files = {f"{level}.yaml": {"extends": [f"{level + 1}.yaml"] * 10, "y": level} for level in range(40)}
    files["40.yaml"] = {"x": 1}
    read: list[Path] = []

    def reading(path: Path) -> Mapping[str, Any]:
        read.append(path)
        return reader(tmp_path, files)(path)

    assert resolve_extends(tmp_path / "0.yaml", reading) == {"x": 1, "y": 0}
    assert len(read) == 41


MATCHING = "custom.extra.rollout_matching"
MINIMAL: dict[str, Any] = {
    "model": {"model": "m"},
    "training": {"output_dir": "out"},
    "custom": {"train_jsonl": "train.jsonl", "extra": {"rollout_matching": {"rollout_backend": "hf"}}},
}


def matching(patch: dict[str, Any]) -> dict[str, Any]:
    return {"custom": {"extra": {"rollout_matching": patch}}}


def server(addresses: dict[str, Any]) -> dict[str, Any]:
    return matching({"rollout_backend": "vllm", "vllm": {"mode": "server", "server": addresses}})


def parse(*patches: dict[str, Any]) -> RunConfig:
    return parse_run_config(patched(MINIMAL, *patches))


def problems(*patches: dict[str, Any]) -> tuple[Problem, ...]:
    return problems_of(parse_run_config, patched(MINIMAL, *patches))


def test_required_keys_are_model_output_dir_and_records() -> None:
    found = problems_of(parse_run_config, matching({"rollout_backend": "hf"}))
    assert {problem.path for problem in found} == {"model", "training", "custom.train_jsonl"}
    assert any("training.output_dir" in problem.way_out for problem in found)


def test_problem_names_path_value_rule_and_way_out() -> None:
    (problem,) = problems({"training": {"seed": -1}})
    assert str(problem) == "training.seed: -1; must be at least 0; change it, or remove the key (default 42)"


@pytest.mark.parametrize(
    ("unknown", "suggested"),
    [
        ({"training": {"learning_rat": 1.0}}, "training.learning_rate"),
        ({"training": {"max_length": 5}}, "template.max_length"),
        ({"custom": {"rollout_matching": {}}}, "custom.extra.rollout_matching"),
        ({"data": {"dataloader_num_workers": 8}}, "training.dataloader_num_workers"),
    ],
)
def test_unknown_key_is_refused_with_suggestion(unknown: dict[str, Any], suggested: str) -> None:
    (problem,) = problems(unknown)
    assert suggested in problem.way_out


@pytest.mark.parametrize(
    ("patch", "hint"),
    [
        ({"training": {"learning_rate": "2e-5"}}, "write 2.0e-5"),
        ({"training": {"save_steps": "80"}}, "write 80 without quotes"),
        ({"training": {"save_steps": True}}, "write a value instead of true"),
        ({"training": {"save_steps": 80.0}}, "default 500"),
        ({"training": {"weight_decay": float("nan")}}, "default 0.0"),
    ],
)
def test_value_of_wrong_type_is_refused_with_correct_form(patch: dict[str, Any], hint: str) -> None:
    (problem,) = problems(patch)
    assert hint in problem.way_out


def test_integer_is_accepted_as_float() -> None:
    assert parse(matching({"ot_epsilon": 10})).rollout_matching.ot_epsilon == 10


def test_both_address_forms_give_same_servers() -> None:
    preferred = {
        "servers": [{"base_url": "http://a:1/", "group_port": 51216}, {"base_url": "http://b:2", "group_port": 51217}]
    }
    expected = (ServerAddress("http://a:1", 51216), ServerAddress("http://b:2", 51217))
    for addresses in (
        preferred,
        {"base_url": ["http://a:1", "http://b:2/"], "group_port": [51216, 51217]},
        {"base_url": ["http://a:1", "http://b:2"], "group_port": 51216},
    ):
        assert parse(server(addresses)).rollout_matching.vllm.server.resolved_servers() == expected
    single = parse(server({"base_url": "http://a:1", "group_port": 51216}))
    assert single.rollout_matching.vllm.server.resolved_servers() == expected[:1]


@pytest.mark.parametrize(
    ("addresses", "rule"),
    [
        ({}, "server mode needs the addresses"),
        (
            {"servers": [{"base_url": "http://a:1", "group_port": 1}], "base_url": "http://a:1", "group_port": 1},
            "two forms",
        ),
        ({"servers": []}, "at least 1 items long"),
        ({"servers": [{"base_url": "", "group_port": 1}]}, "text of"),
        ({"servers": [{"base_url": "http://a:1", "group_port": 0}]}, "must be at least 1"),
        ({"base_url": "http://a:1"}, "must pair"),
        ({"base_url": "http://a:1", "group_port": [1]}, "must pair"),
        ({"base_url": ["http://a:1", "http://b:1"], "group_port": [1]}, "must pair"),
        ({"base_url": ["http://a:1", "http://a:1"], "group_port": 1}, "unique"),
        ({"base_url": ["http://a:1", "http://b:1"], "group_port": [7, 7]}, "unique"),
    ],
)
def test_inconsistent_server_addresses_are_refused(addresses: dict[str, Any], rule: str) -> None:
    (problem,) = problems(server(addresses))
    assert rule in problem.rule
    assert problem.path.startswith("custom.extra.rollout_matching.vllm.server")


NARROW = {"torch_dtype": "bfloat16"}
ADAPTER = {"enable_lora": True, "sync": {"mode": "adapter"}}


@pytest.mark.parametrize(
    ("patch", "path"),
    [
        ({"tuner": {"train_type": "full"}, **matching({"vllm": ADAPTER})}, f"{MATCHING}.vllm.sync.mode"),
        (matching({"vllm": {**ADAPTER, "load_format": "dummy"}}), f"{MATCHING}.vllm.load_format"),
        (
            matching({"decode_mode": "beam", "num_beams": 2, "num_return_sequences": 3}),
            f"{MATCHING}.num_return_sequences",
        ),
        ({"tuner": {"freeze_llm": True}}, "tuner"),
        ({"training": {"bf16": True, "fp16": True}}, "training.fp16"),
        ({"training": {"save_strategy": "best", "metric_for_best_model": "eval_rollout_f1"}}, "training.eval_strategy"),
        ({"template": {"min_pixels": 2, "max_pixels": 1}}, "template.min_pixels"),
        ({"training": {"dataloader_prefetch_factor": 2}}, "training.dataloader_prefetch_factor"),
        ({"training": {"packing": True}}, "global_max_length"),
        ({"model": NARROW, "tuner": {"train_type": "full"}}, "model.torch_dtype"),
        ({"model": NARROW, "tuner": {"modules_to_save": ["merger"]}}, "model.torch_dtype"),
        ({"training": {"dataloader_persistent_workers": True}}, "training.dataloader_persistent_workers"),
        ({"tuner": {"train_coord_rows": True, "modules_to_save": ["model.lm_head"]}}, "tuner.train_coord_rows"),
    ],
)
def test_contradictory_keys_are_refused(patch: dict[str, Any], path: str) -> None:
    (problem,) = problems(patch)
    assert problem.path == path


def test_full_training_of_bfloat16_weights_is_accepted_with_deepspeed() -> None:
    assert not problems({"model": NARROW, "tuner": {"train_type": "full"}, "deepspeed": "zero2.json"})


def test_hf_backend_accepts_beam_search() -> None:
    assert parse(matching({"decode_mode": "beam", "num_beams": 4})).rollout_matching.num_beams == 4


@pytest.mark.parametrize(("batch", "world_size", "expected"), [(32, 1, 16), (32, 4, 4), (33, 1, 17), (1, 8, 1)])
def test_gradient_accumulation_follows_effective_batch_size(batch: int, world_size: int, expected: int) -> None:
    config = parse({"training": {"effective_batch_size": batch, "per_device_train_batch_size": 2}})
    assert config.gradient_accumulation_steps(world_size) == expected


def test_gradient_accumulation_without_effective_batch_size_is_as_written_or_one() -> None:
    assert parse().gradient_accumulation_steps() == 1
    assert parse({"training": {"gradient_accumulation_steps": 3}}).gradient_accumulation_steps(4) == 3


def test_packing_length_comes_from_first_length_set() -> None:
    lengths = {"template": {"max_length": 20}, "training": {"packing_length": 30}}
    assert parse(lengths, {"global_max_length": 10}).packing_length == 10
    assert parse(lengths).packing_length == 20
    assert parse({"training": {"packing_length": 30}}).packing_length == 30
    with pytest.raises(ConfigError, match="global_max_length"):
        _ = parse().packing_length


def test_stage_1_coordinate_loss_settings_apply_unless_rollout_matching_sets_them() -> None:
    stage1 = {"custom": {"coord_soft_ce_w1": {"w1_weight": 0.5, "temperature": 2.0, "target_sigma": 3.0}}}
    config = parse(stage1, matching({"target_sigma": 4.0})).rollout_matching
    assert (config.w1_weight, config.temperature_coord, config.target_sigma) == (0.5, 2.0, 4.0)
    assert config.gate_weight == 1.0


@pytest.mark.parametrize(
    ("deepspeed", "used"),
    [(None, False), ("zero2.json", True), ({"enabled": True, "config": "zero2"}, True), ({"enabled": False}, False)],
)
def test_deepspeed_accepts_file_mapping_or_null(deepspeed: object, used: bool) -> None:
    assert parse_run_config({**MINIMAL, "deepspeed": deepspeed}).uses_deepspeed is used


def test_vllm_defaults_depend_on_related_settings() -> None:
    vllm = parse().rollout_matching.vllm
    assert vllm.resolved_load_format == "dummy"
    assert (vllm.resolved_tensor_parallel_size(4), vllm.resolved_tensor_parallel_size(2)) == (4, 1)
    assert parse(matching({"vllm": {"enable_lora": True}})).rollout_matching.vllm.resolved_load_format == "auto"
    assert vllm.passed_through() == {}
    assert parse(matching({"vllm": {"swap_space": 4}})).rollout_matching.vllm.passed_through() == {"swap_space": 4}


OLDER = {
    "max_num_batched_tokens": 2048, "enable_chunked_prefill": True, "disable_chunked_mm_input": True,
    "skip_mm_profiling": True, "kv_cache_dtype": "fp8", "cpu_offload_gb": 1.5, "swap_space": 4.0,
    "limit_mm_per_prompt": {"image": 1}, "mm_encoder_tp_mode": "data",
}  # fmt: skip


@pytest.mark.parametrize("key", OLDER_OPTIONS)
def test_key_of_original_stack_sets_engine_argument(key: str) -> None:
    option = {key: OLDER[key]}
    older, engine = parse(matching({"vllm": option})), parse(matching({"vllm": {"engine": option}}))
    passed = [config.rollout_matching.vllm.passed_through() for config in (older, engine)]
    assert passed == [option] * 2
    (advice,) = [problem for problem in idle_settings(older) if problem.path.endswith(f"vllm.{key}")]
    assert advice.way_out == f"write it as vllm.engine.{key}"
    assert not [problem for problem in idle_settings(engine) if ".vllm." in problem.path]
    description = Vllm.model_fields[key].description
    assert description == f"Older place of `engine.{key}`."


def test_engine_argument_set_by_old_and_new_key_is_refused() -> None:
    vllm = {"kv_cache_dtype": "auto", "engine": {"kv-cache-dtype": "fp8"}}
    (problem,) = problems_of(parse, matching({"vllm": vllm}))
    assert problem.path.endswith("vllm.engine")
    assert "older place" in problem.rule


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"max-num-seqs": 3}, "key of its own"),
        ({"disable_custom_all_reduce": False}, "key of its own"),
        ({"worker_cls": "a.B"}, "speed and memory only"),
        ({"speculative_config": {}}, "speed and memory only"),
        ({"quantization": "awq"}, "computed from the weights that a push brings"),
    ],
)
def test_engine_argument_that_breaks_sync_or_has_own_key_is_refused(engine: object, words: str) -> None:
    (problem,) = problems_of(parse, matching({"vllm": {"engine": engine}}))
    assert words in problem.rule
    assert problem.path.endswith("vllm.engine")


@pytest.mark.parametrize("speculation", ["frame", "ngram"])
def test_async_scheduling_is_refused_with_speculation(speculation: str) -> None:
    for engine in ({"async-scheduling": True}, {"async_scheduling": "true"}, {"async_scheduling": 1}):
        (problem,) = problems_of(parse, matching({"vllm": {"speculation": speculation, "engine": engine}}))
        assert problem.path.endswith("vllm.engine")
        assert "set vllm.speculation to none" in problem.way_out
    assert parse(matching({"vllm": {"speculation": speculation, "engine": {"async_scheduling": False}}}))


def test_auto_speculation_is_off_with_async_scheduling() -> None:
    drafts = {"max_num_seqs": 8}
    for engine, drafted in (({}, True), ({"async_scheduling": True}, False)):
        vllm = parse(matching({"vllm": {**drafts, "engine": engine}})).rollout_matching.vllm
        assert (vllm.speculative_config(on_cpu=True, objects=True) is not None) is drafted


@pytest.mark.parametrize(
    ("key", "value"), [("optim", "schedule_free_adamw"), ("lr_scheduler_type", "reduce_lr_on_plateau")]
)
def test_unsupported_optimizer_or_scheduler_is_refused(key: str, value: str) -> None:
    (problem,) = problems_of(parse, {"training": {key: value}})
    assert (problem.path, problem.value) == (f"training.{key}", value)


def test_eight_bit_engine_settings_are_detected() -> None:
    for vllm in ({"engine": {"quantization": "fp8"}}, {"kv_cache_dtype": "fp8_e5m2"}):
        assert parse(matching({"vllm": vllm})).rollout_matching.vllm.rounds_to_8_bits
    assert not parse(matching({"vllm": {"kv_cache_dtype": "auto"}})).rollout_matching.vllm.rounds_to_8_bits


def test_pasted_config_is_accepted_unchanged() -> None:
    pasted = yaml.safe_load(Path(__file__).with_name("pasted.yaml").read_text(encoding="utf-8"))
    config = parse_run_config(pasted)
    assert config.rollout_matching.target_truncate == 16
    assert config.gradient_accumulation_steps() == 32
    assert config.rollout_matching.vllm.server.resolved_servers() == (ServerAddress("http://127.0.0.1:8000", 51216),)


def test_pasted_config_in_job_needs_only_its_addresses_removed() -> None:
    pasted = yaml.safe_load(Path(__file__).with_name("pasted.yaml").read_text(encoding="utf-8"))
    job = good_job()
    job["spec"]["config"] = pasted
    (problem,) = problems_of(parse_job, job)
    assert "the job starts the servers itself" in problem.rule
    del pasted["custom"]["extra"]["rollout_matching"]["vllm"]["server"]["servers"]
    assert parse_job(job).spec.config.rollout_matching.rollout_buffer.m_steps == 4
