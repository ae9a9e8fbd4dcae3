"""The plan of a job whose pods a JobSet has. Pure."""

from stage2_controller.children.build import build
from stage2_controller.children.jobset import scaled
from stage2_controller.children.pods import Control
from stage2_controller.job import names
from stage2_controller.plan import outcome
from stage2_controller.plan import status as statuses
from stage2_controller.plan.children import new_secret, secret_goes, without
from stage2_controller.plan.job_pass import JobPass
from stage2_controller.plan.result import (
    NewCredentials,
    Plan,
    existing,
    learner_stays,
    looks,
    soonest,
    with_time_to_live,
)
from stage2_controller.state import jobset, reasons
from stage2_controller.state.conditions import Condition
from stage2_controller.state.observed import ended


def plan(job: JobPass, *, end: Condition | None, blocked: Condition | None, new_credentials: NewCredentials) -> Plan:
    """Return the plan of a job whose pods a JobSet has: it is created and deleted, and nothing else.

    JobSet ends the servers of a learner that has ended. A new JobSet waits for all pods of the one before, because two
    learners would write the same checkpoints.
    """
    observed, parsed = job.observed, job.parsed
    status = statuses.valid_status(job, end=end, blocked=blocked, quota=job.quota_of_jobset, place=None)
    if end:
        unwanted = () if learner_stays(job, end) else (names.JOBSET,)
        made = Plan(status, deletions=existing(observed, *unwanted))
        return with_time_to_live(job.raw, observed, made, job.now)
    taken = blocked and blocked.reason == reasons.NAME_TAKEN and not outcome.learner_begun(observed)
    stop = bool(taken) or job.must_stop
    control = Control(job_uid=str(parsed.owner.uid), spec_hash=parsed.spec_hash)
    children = () if taken else build(parsed, job.settings, control=control)
    if stop or (observed.jobset is None and not all(map(ended, observed.pods))):
        children = without(children, names.JOBSET)
    if children and observed.secret is None and not job.holds_secret:
        children = (new_secret(job, new_credentials), *children)
    unwanted = (*((names.JOBSET,) if stop else ()), *(("Secret",) if secret_goes(job) else ()))
    deletions = existing(observed, *unwanted)
    every_look = (*looks(job, status, blocked=blocked, deletions=deletions), jobset.looks_again_s(observed))
    return Plan(
        status=status,
        children=() if blocked else children,
        scaled=None if stop or blocked else scaled(parsed.owner, parsed.job, observed),
        deletions=deletions,
        again_after_s=soonest(*every_look),
    )
