"""TensorBoard gets pictures of held-out rollouts, and a tracker that is missing is named with its extra."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stage2_api.errors import ConfigError
from stage2_trainer.learner.listeners import held_out_pictures
from stage2_trainer.process.supported import check_supported
from stage2_trainer.wire.requests import Rollout
from tests.unit.trainer.learner.configs import run_config
from tests.unit.trainer.learner.harness import only_first, record


def test_an_evaluation_leaves_pictures(tmp_path, encoder, matcher, records, image_paths):
    records = [*records, record(str(tmp_path / "lost.png"), 9)]
    matched = []
    for one in records:
        ids = encoder.tokenizer.encode(only_first(one), add_special_tokens=False)
        matched.append(matcher.match(one, Rollout([1], ids, only_first(one), "scripted", 0, "stop")))
    training = {"output_dir": str(tmp_path), "report_to": ["tensorboard"]}
    (pictures,) = held_out_pictures(run_config(training=training))
    for step in (0, 5):
        pictures(step, matched)
    events = EventAccumulator(str(tmp_path / "runs" / "held-out"), size_guidance={"images": 0})
    events.Reload()
    tags = events.Tags()["images"]
    assert tags == [f"held-out/record-{place}" for place in range(len(image_paths))]
    shown = events.Images(tags[0])
    assert [one.step for one in shown] == [0, 5]
    assert shown[0].width > 2 * 288


def test_a_run_without_tensorboard_draws_nothing():
    assert held_out_pictures(run_config()) == []


def test_a_tracker_that_is_missing_is_named_with_its_extra():
    config = run_config(training={"report_to": ["trackio"]})
    with pytest.raises(ConfigError, match=r"training.report_to: 'trackio'; needs .* pip install \"stage2\[trackio\]\""):
        check_supported(config, world_size=1)
