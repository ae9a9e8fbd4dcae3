"""A learner whose colocated vLLM loses its weights in a sleep of level 2, on a CPU, where vLLM itself cannot sleep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import vllm
import yaml

from stage2_api.parsing import parse_run_config
from stage2_trainer import main
from stage2_trainer.checks import supported
from stage2_trainer.rollouts import colocate
from stage2_trainer.sync.vllm.vllm_compat import planned_engine_words


class ForgetfulLLM(vllm.LLM):
    """vLLM, with a sleep that does to its weights what level 2 does to them on a GPU."""

    def __init__(self, *, enable_sleep_mode: bool, **options: Any) -> None:
        assert enable_sleep_mode
        super().__init__(**options)

    def sleep(self, level: int = 1) -> None:  # type: ignore[override]
        """Lose all weights."""
        assert level == 2
        self.apply_model(_forget)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Find nothing."""


@torch.no_grad()
def _forget(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.zero_()


def _words(options: dict[str, Any]) -> str:
    return planned_engine_words({name: value for name, value in options.items() if name != "enable_sleep_mode"})


def learn(path: str) -> int:
    """Be `stage2 learn PATH`; return its exit code."""
    vllm.LLM = ForgetfulLLM
    colocate.planned_engine_words = _words  # vLLM refuses the option on a CPU
    supported._engine = lambda config: []  # so does stage2
    return main.learn(parse_run_config(yaml.safe_load(Path(path).read_text())))
