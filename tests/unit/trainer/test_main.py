"""`learn` ends with an exit code that says who must act, and leaves its last words."""

from __future__ import annotations

import errno
import json
import os
from functools import partial

import pytest
import torch

from stage2_api.errors import EXIT_CONFIG, EXIT_RETRYABLE, ConfigError
from stage2_trainer.checks.preflight import checked_records
from stage2_trainer.main import EXIT_FAILURE, check, learn
from stage2_trainer.model.checkpoints import newest_whole, run_course, write_course
from tests.unit.trainer.learner.configs import SERVER, run_config, write_box_records
from tiny_model.checkpoint import save
from tiny_model.model import build_model, build_processor
from tiny_model.tokenizer import build_tokenizer


@pytest.fixture
def environment(token, termination_log, monkeypatch):
    return monkeypatch


@pytest.fixture
def config(tmp_path, model_path, image_paths):
    data = write_box_records(tmp_path / "train.jsonl", image_paths[0])

    def server(changed):
        return {**SERVER, "timeout_s": 0.5, **changed}  # by the clock: nobody answers there

    return lambda **changes: run_config(
        matching={"vllm": {"mode": "server", "server": server(changes.pop("server", {})), **changes.pop("vllm", {})}},
        training={"output_dir": str(tmp_path / "out"), "gradient_checkpointing": False, **changes.pop("training", {})},
        **{"model": {"model": str(model_path)}, "train_jsonl": data, **changes},
    )


def last_words(tmp_path):
    return json.loads((tmp_path / "termination.json").read_text())


def test_missing_token_exits_with_config_code(environment, config, tmp_path):
    environment.delenv("STAGE2_TOKEN_FILE")
    assert learn(config()) == EXIT_CONFIG
    assert "STAGE2_TOKEN_FILE" in last_words(tmp_path)["message"]
    assert last_words(tmp_path)["phase"] == "failed"


@pytest.mark.parametrize("place", ["token/out", "/proc/out", "x" * 300])
@pytest.mark.parametrize("start", [learn, lambda config: check(config, world_size=1)])
def test_unwritable_output_folder_exits_with_config_code(environment, config, tmp_path, start, place):
    assert start(config(training={"output_dir": str(tmp_path / place)})) == EXIT_CONFIG
    assert "training.output_dir" in last_words(tmp_path)["message"]
    assert "in a folder that can be written to" in last_words(tmp_path)["message"]


def test_several_processes_with_servers_exit_with_config_code(environment, config, tmp_path):
    environment.setenv("WORLD_SIZE", "2")
    assert learn(config()) == EXIT_CONFIG
    assert "the learner is one process" in last_words(tmp_path)["message"]


def test_samples_that_processes_cannot_share_are_config_error(config):
    with pytest.raises(ConfigError, match="do not give each of 2 learner processes equally many batches"):
        checked_records(config(), world_size=2)  # one line, in batches of any size


def test_unresolvable_server_name_exits_with_retryable_code(environment, config, tmp_path):
    nowhere = "http://server-0.nowhere.invalid:8000"
    assert learn(config(server={"servers": [{"base_url": nowhere, "group_port": 2}]})) == EXIT_RETRYABLE
    message = last_words(tmp_path)["message"]
    assert nowhere in message
    assert "Traceback" not in message


def test_missing_model_exits_with_config_code(environment, config, tmp_path):
    assert learn(config(model={"model": str(tmp_path / "lost")})) == EXIT_CONFIG
    assert "model.model" in last_words(tmp_path)["message"]


def test_model_without_coordinate_tokens_exits_with_config_code(environment, config, tmp_path):
    tokenizer = build_tokenizer(7, plain=True)
    save(tmp_path / "stock", build_model(tokenizer, 7), build_processor(tokenizer))
    assert learn(config(model={"model": str(tmp_path / "stock")})) == EXIT_CONFIG
    assert f"stage2 prepare {tmp_path / 'stock'} --output DIR" in last_words(tmp_path)["message"]


def test_full_disk_for_log_exits_with_retryable_code(environment, config, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "stage2_log.jsonl").symlink_to("/dev/full")
    changes = {"custom": {"trainer_variant": "sft", "train_jsonl": str(tmp_path / "train.jsonl")}}
    assert learn(config(**changes, training={"max_steps": 1})) == EXIT_RETRYABLE
    message = last_words(tmp_path)["message"]
    assert f"training.output_dir {tmp_path / 'out'}" in message
    assert "stage2_log.jsonl" in message
    assert "Make room" in message


@pytest.mark.parametrize("start", [learn, partial(check, world_size=1)])
def test_stale_mount_exits_with_failure_code(environment, config, tmp_path, start):
    environment.setattr("tempfile.TemporaryFile", raising(OSError(errno.ESTALE, os.strerror(errno.ESTALE))))
    assert start(config()) == EXIT_FAILURE
    assert "Stale file handle" in last_words(tmp_path)["message"]


def test_full_disk_in_check_exits_with_retryable_code(environment, config, tmp_path):
    environment.setattr("tempfile.TemporaryFile", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert check(config(), world_size=1) == EXIT_RETRYABLE
    assert "Make room" in last_words(tmp_path)["message"]


def raising(error):
    def raises(*args, **options):
        raise error

    return raises


def test_missing_servers_exit_with_retryable_code(environment, config, tmp_path):
    assert learn(config()) == EXIT_RETRYABLE
    assert "http://127.0.0.1:1" in last_words(tmp_path)["message"]


def earlier_run(config, tmp_path, *, seed):
    """Leave the whole checkpoint of a run that ended at its only step."""
    checkpoint = tmp_path / "out" / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(
        json.dumps({"global_step": 1, "max_steps": 1, "num_train_epochs": 3})
    )
    records = checked_records(config, world_size=1)
    write_course({**run_course(config, records.fingerprint, world_size=1), "training.seed": seed}, checkpoint)
    return checkpoint


def test_checkpoint_of_other_run_in_output_folder_exits_with_config_code(environment, config, tmp_path):
    checkpoint = earlier_run(config(), tmp_path, seed=5)
    assert learn(config()) == EXIT_CONFIG
    message = last_words(tmp_path)["message"]
    assert "training.seed" in message
    assert str(checkpoint) in message
    assert newest_whole(tmp_path / "out") == checkpoint


def test_finished_run_exits_with_success_and_reports_it(environment, config, tmp_path, caplog):
    earlier_run(config(), tmp_path, seed=config().training.seed)
    with caplog.at_level("INFO"):
        assert learn(config()) == 0
    assert "this run ended at step 1" in caplog.text
    assert last_words(tmp_path)["resumedStep"] == 1


def test_learner_reports_step_from_which_it_resumes(environment, config, tmp_path):
    assert learn(config()) == EXIT_RETRYABLE  # its servers do not come
    assert last_words(tmp_path)["resumedStep"] == 0
    earlier_run(config(), tmp_path, seed=config().training.seed)
    more = config(training={"max_steps": 3, "resume": "allow-changes"})
    assert learn(more) == EXIT_RETRYABLE
    assert last_words(tmp_path)["resumedStep"] == 1


def test_deepspeed_refuses_to_resume_without_its_state(environment, config, tmp_path):
    run = config(deepspeed={"zero_optimization": {"stage": 2}}, training={"max_steps": 3, "resume": "allow-changes"})
    checkpoint = earlier_run(run, tmp_path, seed=run.training.seed)
    assert learn(run) == EXIT_CONFIG
    message = last_words(tmp_path)["message"]
    assert message.startswith(f"training.output_dir: '{checkpoint}'")
    assert "--overwrite" in message


def test_state_of_deepspeed_is_refused_without_it(environment, config, tmp_path):
    """The refusal once said that somebody may have tampered with the checkpoint."""
    run = config(training={"max_steps": 3, "resume": "allow-changes"})
    state = earlier_run(run, tmp_path, seed=run.training.seed) / "global_step1" / "mp_rank_00_model_states.pt"
    state.parent.mkdir()
    torch.save({"ds_config": {"zero_optimization": {"stage": 2}}}, state)
    assert learn(run) == EXIT_CONFIG
    message = last_words(tmp_path)["message"]
    assert message.startswith("deepspeed: DeepSpeed wrote")
    assert message.endswith("set deepspeed back, or start over with --overwrite")


def test_change_of_deepspeed_that_nothing_allows_is_refused_at_once(environment, config, tmp_path):
    """The first refusal sent a person to training.resume: allow-changes, and the next one refused that."""
    sharded = config(deepspeed={"zero_optimization": {"stage": 2}}, training={"max_steps": 3})
    state = earlier_run(sharded, tmp_path, seed=sharded.training.seed) / "global_step1" / "mp_rank_00_model_states.pt"
    state.parent.mkdir()
    torch.save({"ds_config": {"zero_optimization": {"stage": 2}}}, state)
    assert learn(config(training={"max_steps": 3})) == EXIT_CONFIG
    assert last_words(tmp_path)["message"].endswith("set deepspeed back, or start over with --overwrite")
    assert learn(config(training={"max_steps": 3}), overwrite=True) == EXIT_RETRYABLE  # its servers do not come


def test_overwrite_removes_earlier_run_only_if_config_is_valid(environment, config, tmp_path):
    checkpoint = earlier_run(config(), tmp_path, seed=5)
    assert learn(config(train_jsonl=str(tmp_path / "lost")), overwrite=True) == EXIT_CONFIG
    assert checkpoint.exists()
    assert learn(config(), overwrite=True) == EXIT_RETRYABLE  # its servers do not come
    assert not checkpoint.exists()


def test_resume_allow_changes_continues_run_with_changed_config(environment, config, tmp_path, caplog):
    earlier_run(config(), tmp_path, seed=5)
    assert learn(config(training={"resume": "allow-changes"})) == 0
    assert "training.resume allows it" in caplog.text
