"""`stage2 evaluate CONFIG --checkpoint`: what is refused, before anything heavy is imported."""

import pytest

from stage2_api.errors import ConfigError
from stage2_cli.evaluate import EvaluationRequest, evaluate_checkpoints, require_one_kind
from tests.unit.api.grpo_configs import GOOD
from tests.unit.api.wrong_jobs import merge_patch
from tests.unit.cli.test_light_start import COLOCATED, HEAVY, MATCHING, run_over, stage2

RECORD = {"images": ["data:image/png;base64,AAAA"], "width": 8, "height": 9, "objects": []}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((None, None, None, None), "stage2 evaluate: nothing"),
        (("c.yaml", None, None, None), "CONFIG"),
        ((None, None, ["a"], None), "--rollouts"),
        (("c.yaml", ["d"], ["a"], None), "CONFIG --checkpoint --rollouts"),
    ],
)
def test_one_kind_of_answers_is_scored(given, told):
    with pytest.raises(ConfigError, match=told):
        require_one_kind(*given)


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (MATCHING, "custom.val_jsonl"),
        (merge_patch(GOOD, {}), "rlhf"),
    ],
)
def test_a_run_without_records_to_answer_is_refused(tmp_path, run, told):
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text("{}")
    config = run_over(tmp_path, run, RECORD)
    with pytest.raises(ConfigError, match=told):
        evaluate_checkpoints(tmp_path / config, [checkpoint], EvaluationRequest([], tmp_path))


def test_what_is_no_checkpoint_is_refused_before_torch_is_imported(tmp_path):
    config = run_over(tmp_path, merge_patch(COLOCATED, {"custom": {"val_jsonl": "train.jsonl"}}), RECORD)
    done, loaded = stage2(tmp_path, "evaluate", config, "--checkpoint", "lost", "--json")
    assert done.returncode == 64
    assert "--checkpoint: 'lost'" in done.stderr
    assert loaded & HEAVY == set()
