"""The course of a run: keys that change the weights count; place, speed and logs do not."""

import pytest

from stage2_api.course import COMPARED_BY_CONTENT, FREE, LENGTH, RECORDS_OF_A_STEP, course_of, to_train_on
from stage2_api.runconfig import RunConfig
from stage2_api.training import Training
from stage2_api.validation.key_paths import leaves

BASE = {
    "model": {"model": "/m"},
    "training": {"output_dir": "/o"},
    "custom": {"train_jsonl": "/d.jsonl", "extra": {"rollout_matching": {"rollout_backend": "hf"}}},
}


def course(world_size=1, **changes):
    config = {name: dict(section) for name, section in BASE.items()}
    for path, value in changes.items():
        *parts, key = path.split("__")
        section = config
        for part in parts:
            section[part] = dict(section.get(part, {}))
            section = section[part]
        section[key] = value
    return course_of(RunConfig.model_validate(config), world_size=world_size)


def differing(**changes):
    before, after = course(), course(**changes)
    return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


MATCHING = "custom__extra__rollout_matching__"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("training__seed", 1),
        ("training__learning_rate", 1e-3),
        ("training__lr_scheduler_type", "cosine"),
        ("training__max_grad_norm", 0.1),
        ("tuner__lora_rank", 4),
        ("template__max_pixels", 5),
        ("custom__user_prompt", "List."),
        (MATCHING + "soft_ce_weight", 0.5),
        (MATCHING + "temperature", 0.7),
        (MATCHING + "post_rollout_pack_scope", "step"),
        ("global_max_length", 12),
    ],
)
def test_settings_that_affect_weights_count(path, value):
    assert path.replace("__", ".") in differing(**{path: value})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model__model", "/elsewhere"),
        ("model__attn_impl", "eager"),
        ("training__output_dir", "/elsewhere"),
        ("training__save_steps", 3),
        ("training__eval_strategy", "steps"),
        ("training__resume", "allow-changes"),
        ("custom__train_jsonl", "/elsewhere"),
        ("custom__val_jsonl", "/v.jsonl"),
        (MATCHING + "vllm", {"max_model_len": 100}),
        (MATCHING + "image_cache_gib", 1.0),
    ],
)
def test_path_speed_and_logging_settings_do_not_count(path, value):
    assert differing(**{path: value}) == set()


def test_run_length_counts_only_if_learning_rate_depends_on_it():
    assert differing(training__max_steps=5) == {"training.max_steps", "training.num_train_epochs"}
    assert differing(training__num_train_epochs=5.0) == {"training.num_train_epochs"}
    constant = {"training__lr_scheduler_type": "constant_with_warmup"}
    assert course(**constant) == course(**constant, training__max_steps=5)
    plain = {"training__lr_scheduler_type": "constant", "training__warmup_ratio": 0.1}
    assert course(**plain) == course(**plain, training__max_steps=5), "it never warms up"


def test_run_length_counts_if_warmup_is_ratio():
    share = {"training__lr_scheduler_type": "constant_with_warmup", "training__warmup_ratio": 0.1}
    assert course(**share) != course(**share, training__max_steps=5)
    steps = {**share, "training__warmup_steps": 7}
    assert course(**steps) == course(**steps, training__max_steps=5)


def test_advice_to_continue_names_allow_changes_only_where_needed():
    assert to_train_on(Training(output_dir="/o", lr_scheduler_type="constant")) == ("raise training.num_train_epochs")
    assert to_train_on(Training(output_dir="/o", lr_scheduler_type="constant", max_steps=9)) == (
        "raise training.max_steps"
    )
    follows = to_train_on(Training(output_dir="/o", lr_scheduler_type="cosine"))
    assert "training.resume: allow-changes" in follows
    assert (
        "the learning rates of its steps follow the length of the run (training.lr_scheduler_type: cosine)" in follows
    )


def test_records_per_step_count_independent_of_their_division():
    one = course(training__effective_batch_size=32)
    assert one == course(world_size=4, training__effective_batch_size=32)
    assert one == course(training__gradient_accumulation_steps=32)
    assert one[RECORDS_OF_A_STEP] == 32
    assert course(world_size=4, training__gradient_accumulation_steps=32) != one


def test_sharded_processes_count_as_single_process():
    vllm = {"mode": "server", "server": {"learners": "sharded"}}
    sharded = {"custom__extra": {"rollout_matching": {"rollout_backend": "vllm", "vllm": vllm}}}
    for records in ("effective_batch_size", "gradient_accumulation_steps"):
        found = [course(world_size, **{f"training__{records}": 6}, **sharded) for world_size in (1, 4)]
        assert found[0] == found[1]
        assert found[0][RECORDS_OF_A_STEP] == 6


def test_ignored_keys_exist_in_config():
    assert (FREE | LENGTH | COMPARED_BY_CONTENT) - set(leaves(RunConfig)) == set()
