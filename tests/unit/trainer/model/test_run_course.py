"""A checkpoint says what its run was made of, and another run does not go on from it unnoticed."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from stage2_api.errors import ConfigError
from stage2_trainer.data.model_files import SAMPLE_BYTES, model_fingerprint
from stage2_trainer.model.checkpoints import check_course, divided_among, write_course
from stage2_trainer.model.deepspeed_compat import load_undivided
from stage2_trainer.telemetry.run_log import remove_run

COURSE = {"training.seed": 1, "training.lr_scheduler_kwargs": {"min_lr": 1e-6}, "model.model": "sha256 a"}


@pytest.fixture
def checkpoint(tmp_path):
    write_course(COURSE, tmp_path)
    return tmp_path


def test_same_run_resumes_from_checkpoint(checkpoint, caplog):
    check_course(checkpoint, COURSE, allow_changes=False)
    assert not caplog.records


def test_every_changed_setting_is_reported_with_both_values_and_advice(checkpoint):
    other = {**COURSE, "training.seed": 2, "model.model": "sha256 b"}
    with pytest.raises(ConfigError) as caught:
        check_course(checkpoint, other, allow_changes=False)
    assert {(problem.path, problem.value) for problem in caught.value.problems} == {
        ("training.seed", 2),
        ("model.model", "sha256 b"),
    }
    words = str(caught.value)
    assert str(checkpoint) in words
    assert "--overwrite" in words
    assert "allow-changes" in words


def test_changed_run_length_is_refused_with_reason(tmp_path):
    course = {"training.max_steps": 40, "training.lr_scheduler_type": "cosine"}
    write_course(course, tmp_path)
    with pytest.raises(ConfigError, match=r"has 40, and the learning rates of its steps follow the length of the run"):
        check_course(tmp_path, {**course, "training.max_steps": 60}, allow_changes=False)


def test_difference_is_written_as_yaml_writes_it(tmp_path, caplog):
    """A person sets it back; Python's True and None are texts in YAML."""
    options = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 500000000}, "gradient_clipping": "auto"}
    options |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}}}
    course = {"training.bf16": True, "training.max_grad_norm": None, "deepspeed": options}
    write_course(course, tmp_path)
    now = {"training.bf16": False, "training.max_grad_norm": 1.0, "deepspeed": None}
    with pytest.raises(ConfigError) as refused:
        check_course(tmp_path, now, allow_changes=False)
    bf16, norm, deepspeed = (problem.rule for problem in refused.value.problems)
    assert bf16.endswith("has true")
    assert norm.endswith("has null")
    assert deepspeed.endswith("'torch_adam': true}}}")
    check_course(tmp_path, now, allow_changes=True)
    assert "training.bf16: false differs from true in " in caplog.text


def test_allowed_changes_are_logged(checkpoint, caplog):
    check_course(checkpoint, {**COURSE, "training.seed": 2}, allow_changes=True)
    assert "training.seed: 2 differs from 1 in " in caplog.text


def test_deepspeed_checkpoint_that_cannot_be_redivided_is_refused(tmp_path):
    pytest.importorskip("deepspeed")
    (tmp_path / "global_step2").mkdir()
    (tmp_path / "latest").write_text("global_step2")
    for rank in range(2):
        torch.save({}, tmp_path / "global_step2" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    assert divided_among(tmp_path) == 2
    with pytest.raises(ConfigError, match="KeyError: 'optimizer_state_dict'"):
        load_undivided(SimpleNamespace(), tmp_path)


def test_keys_added_or_removed_between_versions_are_not_compared(checkpoint):
    check_course(checkpoint, {"training.seed": 1, "training.new_key": True}, allow_changes=False)


def test_checkpoint_without_recorded_settings_is_accepted_with_warning(tmp_path, caplog):
    check_course(tmp_path, COURSE, allow_changes=False)
    assert "does not record the settings of its run" in caplog.text


@pytest.fixture
def copied(model_path, tmp_path):
    return shutil.copytree(model_path, tmp_path / "copied")


def test_model_fingerprint_does_not_depend_on_path(model_path, copied):
    assert model_fingerprint(str(model_path)) == model_fingerprint(str(copied))


@pytest.mark.parametrize("where", ["config", "first", "last"])
def test_model_fingerprint_changes_with_config_and_tensors(model_path, copied, where):
    if where == "config":
        config = json.loads((copied / "config.json").read_text())
        (copied / "config.json").write_text(json.dumps({**config, "another": 1}))
    else:
        (file,) = copied.glob("*.safetensors")
        content = bytearray(file.read_bytes())
        begin = 8 + int.from_bytes(content[:8], "little")
        content[begin + 3 if where == "first" else len(content) - (len(content) - begin) // 16 + 3] ^= 1
        assert SAMPLE_BYTES > 3
        file.write_bytes(content)
    assert model_fingerprint(str(model_path)) != model_fingerprint(str(copied))


def test_removing_run_deletes_only_its_own_files(tmp_path):
    for name in ("checkpoint-1", "checkpoint-20", ".unfinished", "checkpoint-mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    for name in ("stage2_log.jsonl", "rollouts.jsonl", "rank-1-rollouts.jsonl", "trace.json", "notes.txt"):
        (tmp_path / name).write_text("")
    assert len(remove_run(tmp_path)) == 7
    assert {one.name for one in tmp_path.iterdir()} == {"checkpoint-mine", "notes.txt"}
    assert remove_run(tmp_path / "nowhere") == []
