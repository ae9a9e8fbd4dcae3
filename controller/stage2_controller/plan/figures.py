"""What the learner's report adds to a job's status: steps, loss, the last weight sync. Pure.

A report belongs to the pod that gave it. While that pod does not answer, its last report stays in the status; once it
is gone, nothing that it said counts any more. A job that has ended keeps the figures of its last learner.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stage2_controller.job import names, output_folder
from stage2_controller.plan.job_pass import JobPass
from stage2_controller.state import reasons
from stage2_controller.state.conditions import Condition, find

_KEPT = ("step", "maxSteps", "sync", "reproducibility", "loss", "tokensPerSecond", "bestStep", "bestScore")


@dataclass(frozen=True)
class Report:
    """The figures of the learner's present pod.

    pod: its uid, which the next pass compares; now: the newest figures; before: those that the last pass wrote.
    furthest: the step that any learner of this spec has reached.
    """

    pod: str | None
    now: Mapping[str, Any]
    before: Mapping[str, Any]
    furthest: int

    def status(self) -> dict[str, Any]:
        """Return the part of the status that is reported. Absent figures are None."""
        return {
            "learnerPod": self.pod,
            **{key: _without_nulls(self.now.get(key)) for key in ("step", "maxSteps", "sync", "reproducibility")},
            "furthestStep": self.furthest or None,
            "progress": self._progress(),
            "loss": _finite(self.now.get("loss")),
            "tokensPerSecond": _finite(self.now.get("tokensPerSecond")),
            "bestStep": self.now.get("bestStep"),
            "bestScore": _finite(self.now.get("bestScore")),
        }

    def _progress(self) -> str | None:
        done, all_steps = self.now.get("step"), self.now.get("maxSteps")
        return f"{done}/{all_steps}" if all_steps else None


def report_of(job: JobPass, *, end: Condition | None) -> Report:
    """Return the figures of the learner's present pod, or of the last one where the job has ended."""
    learner, uid = job.observed.report(), _learner_pod(job)
    if end:
        uid = uid or job.previous.get("learnerPod")
    is_same = end or is_of_last_pod(job)
    before = {key: job.previous[key] for key in _KEPT if key in job.previous} if is_same else {}
    now = {**before, **(learner.reported() if learner else {})}
    return Report(uid, now, before, max(now.get("step") or 0, furthest_step(job)))


def is_of_last_pod(job: JobPass) -> bool:
    """Return whether the learner has the pod that it had in the last pass; older controllers named none."""
    uid = _learner_pod(job)
    return uid is not None and job.previous.get("learnerPod") in (uid, None)


def _learner_pod(job: JobPass) -> str | None:
    pod = job.observed.pod(names.ROLE_LEARNER)
    uid: str | None = pod["metadata"].get("uid") if pod else None
    return uid


def furthest_step(job: JobPass) -> int:
    """Return the step that a learner of this spec was last known to have reached; an edited run begins anew."""
    previous = job.previous
    if previous.get("specHash") != job.parsed.spec_hash:
        return 0
    reached: int = max(previous.get("furthestStep") or 0, previous.get("step") or 0)  # older controllers have no first
    return reached


def steps_kept(job: JobPass, report: Report) -> Condition | None:
    """Return the condition StepsKept while steps have to be done again; None where none are lost."""
    learner = job.observed.report()
    begun = learner.resumed_step if learner else None
    if begun is None:  # it is not known, or not known any more
        lost = find(job.previous, reasons.STEPS_KEPT) if report.before else None
        return Condition(reasons.STEPS_KEPT, "False", reasons.STEPS_LOST, lost["message"]) if lost else None
    if max(begun, report.now.get("step") or 0) >= report.furthest:
        return None
    where = output_folder.fleeting(job.parsed.job)
    if begun:
        why = ", the newest checkpoint"
    elif where:
        why = f": {where}; {output_folder.WAY_OUT}"
    else:
        why = f": it found no checkpoint in training.output_dir {job.spec.config.training.output_dir}"
    count = report.furthest - begun
    message = (
        f"{count} step{'s are' if count > 1 else ' is'} lost: a learner had done step {report.furthest}, and this one"
        f" began at step {begun}{why}"
    )
    return Condition(reasons.STEPS_KEPT, "False", reasons.STEPS_LOST, message)


def _without_nulls(value: Any) -> Any:
    """Return a reported value without null keys, which the status's schema refuses."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return value


def _finite(figure: float | None) -> float | None:
    """Return a finite figure or None: JSON has no infinity, and a NaN, which never equals itself, would be rewritten in
    every pass."""
    return figure if figure is not None and math.isfinite(figure) else None
