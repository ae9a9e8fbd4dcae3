"""The tools that both training and evaluation take to a sample: from its record to what its rollout was matched to."""

from __future__ import annotations

from dataclasses import dataclass

from stage2_trainer.data.encode import Encoder, PromptCache
from stage2_trainer.data.messages import Prompts
from stage2_trainer.learner.matcher import Matcher
from stage2_trainer.rollouts.bad_samples import BadSamples


@dataclass(frozen=True)
class SampleTools:
    """The tools of one run. bad: gets the samples that they fail on."""

    encoder: Encoder
    cache: PromptCache
    prompts: Prompts
    matcher: Matcher
    bad: BadSamples
