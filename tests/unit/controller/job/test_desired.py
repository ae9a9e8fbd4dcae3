"""A draft is made once for a spec, anew for another one, and forgotten with its job."""

from dataclasses import replace

import pytest

from stage2_api.errors import ConfigError
from stage2_api.validation.size import LARGEST
from stage2_controller.job.desired import DesiredCache, desired
from stage2_controller.job.key import Key
from tests.unit.controller import builders as b


def test_a_draft_is_made_once_until_the_spec_changes() -> None:
    drafts, raw = DesiredCache(b.SETTINGS), b.job()
    first = drafts.of(raw)
    assert drafts.of(b.job()) is first
    edited = {**raw, "metadata": {**raw["metadata"], "generation": raw["metadata"]["generation"] + 1}}
    assert drafts.of(edited) is not first


def test_a_bound_that_is_younger_than_a_job_leaves_it_what_it_was_accepted_with() -> None:
    """Else nobody ended it: neither its deadlines nor its learner's end would be looked at."""
    settings = replace(b.SETTINGS, policy=replace(b.SETTINGS.policy, longest_start_seconds=86_400))
    raw = b.job(learner={"gpus": 1, "startDeadlineSeconds": 172_800})
    raw["spec"]["config"]["deepspeed"] = {"note": "x" * 2 * LARGEST}
    with pytest.raises(ConfigError):
        desired(raw, settings)
    accepted = {**raw, "status": {"specHash": "of an earlier release"}}
    assert desired(accepted, settings).job.spec.learner.start_deadline_seconds == 172_800


def test_a_draft_goes_with_its_job() -> None:
    drafts, raw = DesiredCache(b.SETTINGS), b.job()
    first = drafts.of(raw)
    drafts.forget(Key(raw["metadata"]["namespace"], raw["metadata"]["name"]))
    assert drafts.of(raw) is not first
