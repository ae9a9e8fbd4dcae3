"""Parsed jobs are held to bounds only where they are new."""

import pytest

from stage2_api.errors import ConfigError
from stage2_api.validation.size import LARGEST
from stage2_controller.children.build import is_large, parse
from stage2_controller.state import reasons
from tests.unit.controller import builders as b


def older_than_the_bounds() -> b.Object:
    """A job that holds more than any new one may."""
    return b.job(config={"deepspeed": {"note": "x" * 2 * LARGEST}})


def judged(status: str) -> b.Object:
    """The condition by which a controller reported what it makes of the first generation of a spec."""
    return {"type": reasons.ACCEPTED, "status": status, "reason": reasons.VALID, "observedGeneration": 1}


def hash_before(raw: b.Object) -> str:
    """The hash by which a controller without bounds accepted a job."""
    status = {"specHash": "?", "observedGeneration": raw["metadata"]["generation"]}
    return parse({**raw, "status": status}, b.SETTINGS).spec_hash


def test_new_size_limits_do_not_apply_to_jobs_accepted_earlier() -> None:
    """Else nobody ended it: neither its deadlines nor its learner's end would be looked at."""
    raw = older_than_the_bounds()
    with pytest.raises(ConfigError):
        parse(raw, b.SETTINGS)
    status = {"specHash": hash_before(raw), "observedGeneration": 1, "conditions": [judged("True")]}
    ended = b.edited({**raw, "status": status}, suspend=True, activeDeadlineSeconds=60)
    assert parse(ended, b.SETTINGS).job.spec.suspend


def test_edit_of_accepted_job_must_meet_size_limits() -> None:
    """Also where nothing looks at an edit before the controller does."""
    asked = {"rollout": {"servers": 3, "template": {"metadata": {"annotations": {"note": "x" * 2 * LARGEST}}}}}
    raw = b.job(suspend=True)
    raw = b.with_status(raw, b.planned(raw))
    assert b.condition(b.planned(raw), reasons.ACCEPTED) == ("True", reasons.VALID)
    resumed = b.edited(b.edited(raw, **asked), suspend=False)
    assert b.condition(b.planned(resumed), reasons.ACCEPTED) == ("False", reasons.INVALID_SPEC)


def test_unknown_top_level_data_counts_for_size_limit_but_status_and_annotations_do_not() -> None:
    raw, much = b.job(), {"much": "x" * LARGEST}
    assert is_large({**raw, "junk": much})
    assert not is_large({**raw, "status": much, "metadata": {**raw["metadata"], "annotations": much}})


@pytest.mark.parametrize("own", ["registry.example/learner:2", None])
def test_learner_init_container_uses_learner_image(own: str | None) -> None:
    """So a wrong one shows while the servers load, and not minutes later."""
    patch = {"image": own, "imagePullPolicy": "Always"} if own else {}
    template = {"spec": {"containers": [{"name": "learner", **patch}]}}
    job = b.child(b.planned(b.job(learner={"gpus": 1, "template": template})), "Job")
    pod = job["spec"]["template"]["spec"]
    first, learner = pod["initContainers"][0], pod["containers"][0]
    assert first["name"] == "wait-for-servers"
    assert first["image"] == learner["image"] == (own or "my/trainer:1")
    assert first["imagePullPolicy"] == learner["imagePullPolicy"]


def test_template_image_for_init_container_is_kept() -> None:
    template = {
        "spec": {
            "containers": [{"name": "learner", "image": "registry.example/learner:2"}],
            "initContainers": [{"name": "wait-for-servers", "image": "registry.example/waits:1"}],
        }
    }
    job = b.child(b.planned(b.job(learner={"gpus": 1, "template": template})), "Job")
    assert job["spec"]["template"]["spec"]["initContainers"][0]["image"] == "registry.example/waits:1"
