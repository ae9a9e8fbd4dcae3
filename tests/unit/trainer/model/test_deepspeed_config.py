"""What DeepSpeed does not take of its configuration is refused before it builds an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.model.deepspeed_config import settle_options

pytest.importorskip("deepspeed")
ZERO = {"stage": 2, "offload_optimizer": {"device": "none", "pin_memory": True}, "reduce_bucket_size": 2e8}
SETTLED: dict[str, Any] = {
    "zero_optimization": ZERO, "bf16": {"enabled": True}, "fp16": {"enabled": False, "loss_scale": 0},
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
}  # fmt: skip


def settle(**changes):
    """Settle options that agree with the training section, in a process that has met no others yet."""
    options = SimpleNamespace(config=SETTLED | changes, trainer_config_finalize=lambda *given: None)
    settle_options(options, None, None, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}},
        {"optimizer": {"type": "NAdam"}, "zero_allow_untested_optimizer": True},
        {"scheduler": {"type": "WarmupLR"}, "zero_optimization": ZERO | {"stage": 3, "sub_group_size": 1e9}},
        {"steps_per_print": 2000, "wall_clock_breakdown": False},
    ],
)
def test_what_deepspeed_takes_is_accepted(changes):
    settle(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"zero_optimization": ZERO | {"stge": 1}}, "deepspeed: DeepSpeed does not take it (stge: Extra inputs are"),
        ({"zero_optimization": ZERO | {"reduce_bucket_size": "many"}}, "(reduce_bucket_size: Input should be a valid"),
        ({"zero_optimization": ZERO | {"offload_optimizer": {"device": "disk"}}}, "(offload_optimizer.device: Input"),
        ({"fp16": {"enabled": True}}, "bfloat16 and fp16 modes cannot be simultaneously enabled"),
        ({"amp": {"enabled": True}}, "DeepSpeedConfigError: NVIDIA Apex AMP integration has been removed."),
        ({"optimizer": {"type": "Adamm"}}, "deepspeed.optimizer.type: 'Adamm'; must be one of adagrad, adam, adamw,"),
        ({"optimizer": {}}, "deepspeed.optimizer.type: must be one of"),
        ({"scheduler": {"type": "StepLR"}}, "deepspeed.scheduler.type: 'StepLR'; must be one of LRRangeTest,"),
        ({"scheduler": {"type": "warmuplr"}}, "deepspeed.scheduler.type: 'warmuplr'; must be one of LRRangeTest,"),
    ],
)
def test_what_deepspeed_does_not_take_is_refused_in_its_words(changes, words):
    """As DeepSpeed's own errors they were no mistakes of a person, and the learner was started again."""
    with pytest.raises(ConfigError) as refused:
        settle(**changes)
    assert words in str(refused.value)
