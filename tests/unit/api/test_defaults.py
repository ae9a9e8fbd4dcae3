"""The promised defaults: changing one changes what people's files mean."""

from stage2_api.parsing import parse_job, parse_run_config
from tests.unit.api.wrong_jobs import good_job

MINIMAL = {
    "model": {"model": "m"},
    "training": {"output_dir": "out"},
    "custom": {"train_jsonl": "t", "extra": {"rollout_matching": {"vllm": {"max_model_len": 4096}}}},
}


def test_defaults_of_rollout_matching() -> None:
    matching = parse_run_config(MINIMAL).rollout_matching
    assert matching.model_dump(exclude={"vllm", "monitor_dump", "desc_monitor"}) == {
        "rollout_backend": "vllm",
        "rollout_generate_batch_size": 1,
        "post_rollout_pack_scope": "micro",
        "post_rollout_overlong": None,
        "image_cache_gib": 4.0,
        "decode_mode": "greedy",
        "max_new_tokens": 512,
        "num_beams": 1,
        "num_return_sequences": None,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "repeat_terminate": {
            "enabled": False,
            "min_new_tokens": 256,
            "max_consecutive_token_repeats": 64,
            "ngram_size": 64,
            "ngram_repeats": 2,
            "max_object_keys": None,
        },
        "candidate_top_k": 10,
        "maskiou_gate": 0.3,
        "maskiou_resolution": 256,
        "maskiou_mode": "canvas",
        "maskiou_scales": [],
        "fp_cost": 1.0,
        "fn_cost": 1.0,
        "ot_cost": "l2",
        "ot_epsilon": 10.0,
        "ot_epsilon_mode": "bins",
        "ot_iters": 30,
        "ot_bbox_target": "barycentric",
        "runaway": {"enabled": False, "objects_per_truth": 3.0, "truncated_share": 0.3, "steps": 20},
        "supervised_share": 0.0,
        "missed_desc_weight": 0.0,
        "missed_place": "tail",
        "duplicate_iou": None,
        "unmatched_objects": "neutral",
        "unmatched_weight": 0.1,
        "recovery": {"rollouts": 1, "temperature": 0.7, "weight": 2.0},
        "target_sigma": 2.0,
        "target_truncate": None,
        "temperature_coord": 1.0,
        "soft_ce_weight": 1.0,
        "w1_weight": 1.0,
        "gate_weight": 1.0,
        "loss_normalizer": "micro",
        "rollout_buffer": {"enabled": False, "m_steps": 1},
        "pipeline": {"enabled": False},
        "offload": {"enabled": False, "offload_model": False, "offload_optimizer": False},
        "debug_dump_parse_failures": False,
        "debug_dump_max": 3,
    }


def test_defaults_of_monitors() -> None:
    matching = parse_run_config(MINIMAL).rollout_matching
    assert matching.model_dump(include={"monitor_dump", "desc_monitor"}) == {
        "monitor_dump": {
            "enabled": False,
            "only_world_process_zero": True,
            "every_steps": None,
            "dump_first_step": None,
            "max_events": 20,
            "max_samples": 1,
            "max_text_chars": 4000,
            "out_dir": None,
            "write_markdown": True,
        },
        "desc_monitor": {
            "enabled": False,
            "mode": "semantic",
            "every_steps": None,
            "max_pairs": 64,
            "semantic_model": "sentence-transformers/all-MiniLM-L6-v2",
            "semantic_threshold": 0.6,
            "semantic_device": "cpu",
            "semantic_batch_size": 64,
            "semantic_max_length": 64,
        },
    }


def test_defaults_of_vllm() -> None:
    vllm = parse_run_config(MINIMAL).rollout_matching.vllm.model_dump(exclude={"max_model_len"})
    given = {key: value for key, value in vllm.items() if value is not None}
    assert given == {
        "mode": "colocate",
        "gpu_memory_utilization": 0.45,
        "enable_lora": False,
        "enable_prefix_caching": True,
        "sleep_level": 0,
        "enforce_eager": False,
        "disable_custom_all_reduce": True,
        "max_num_seqs": 256,
        "server": {
            "servers": None,
            "base_url": None,
            "group_port": None,
            "protocol": "vllm",
            "timeout_s": 240.0,
            "infer_timeout_s": None,
        },
        "sync": {
            "mode": "full",
            "fallback_to_full": True,
            "merge": "auto",
            "rounding": "nearest",
            "changed_only": True,
            "one_group_from": 4,
            "verify_every": 20,
            "verify_tolerance": None,
            "transport": "auto",
        },
    }


def test_defaults_of_packing() -> None:
    training = parse_run_config(MINIMAL).training
    assert (training.packing, training.packing_buffer, training.packing_min_fill_ratio) == (False, 512, 0.65)
    assert training.packing_drop_last is True


def test_defaults_of_the_job() -> None:
    raw = good_job()
    raw["spec"] = {"config": raw["spec"]["config"], "rollout": {"servers": 1}}
    spec = parse_job(raw).spec
    assert spec.model_dump(by_alias=True, exclude={"config"}, exclude_none=True) == {
        "suspend": False,
        "imagePullPolicy": "IfNotPresent",
        "imagePullSecrets": [],
        "gpuResource": "nvidia.com/gpu",
        "rollout": {"servers": 1, "gpusPerServer": 1, "port": 8000, "template": {}},
        "learner": {"gpus": 1, "template": {}, "backoffLimit": 3, "startDeadlineSeconds": 3600},
        "placement": {"nodeSelector": {}, "tolerations": [], "priorityClassName": "", "mode": "Reserve"},
        "tls": {"enabled": True},
        "network": {"egress": "Auto"},
        "volumes": [],
    }
