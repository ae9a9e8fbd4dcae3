"""Names of children: short, valid, and never shared by two jobs."""

import re

from hypothesis import given
from hypothesis import strategies as st

from stage2_controller.spec import names

JOB_NAME = st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,250}[a-z0-9])?", fullmatch=True)
ROLES = st.sampled_from([names.ROLE_ROLLOUT, names.ROLE_LEARNER, names.ROLE_CONFIG, names.ROLE_TOKEN])


def test_a_short_name_is_kept_as_it_is() -> None:
    assert names.child_name("job-3v1", names.ROLE_ROLLOUT) == "job-3v1-rollout"
    assert names.service_host("job-3v1", "team-a") == "job-3v1-rollout.team-a.svc"


@given(JOB_NAME, ROLES)
def test_every_child_has_a_name_that_services_and_label_values_accept(job: str, role: str) -> None:
    name = names.child_name(job, role)
    assert len(name) <= 63
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert name.endswith(f"-{role}")


@given(JOB_NAME, JOB_NAME, ROLES)
def test_two_jobs_never_share_a_child(one: str, other: str, role: str) -> None:
    assert (names.child_name(one, role) == names.child_name(other, role)) == (one == other)


def test_long_names_that_differ_only_at_the_end_stay_apart() -> None:
    one, other = "a" * 200 + "1", "a" * 200 + "2"
    assert names.child_name(one, names.ROLE_ROLLOUT) != names.child_name(other, names.ROLE_ROLLOUT)
