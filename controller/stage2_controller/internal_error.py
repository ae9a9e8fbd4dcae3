"""A pass that meets a bug of the controller: the job says so and keeps what runs, and the other jobs go on."""

import logging
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from stage2_api.errors import shortened
from stage2_controller import conditions, reasons
from stage2_controller.conditions import Condition, merged
from stage2_controller.plan import Plan
from stage2_controller.report import explanation
from stage2_controller.spec.names import Key

logger = logging.getLogger(__name__)

_SHOWN = 1000  # characters of an exception's text


class InternalErrors:
    """The plans of jobs that could not be planned. Each traceback is logged once for a generation of the spec."""

    def __init__(self) -> None:
        self._logged: dict[Key, tuple[str, int]] = {}

    def plan(self, key: Key, raw: Mapping[str, Any], error: Exception, *, now: datetime) -> Plan:
        """Return a plan that creates and deletes nothing; its condition Accepted has the exception's text."""
        spec = raw["metadata"].get("uid", ""), raw["metadata"].get("generation", 0)
        if self._logged.get(key) != spec:
            self._logged[key] = spec
            logger.error("%s: a bug of the controller; told once for this spec", key, exc_info=error)
        return Plan(status=_status(raw, error, now), keeps_place=True)

    def forget(self, key: Key) -> None:
        """Drop what is known of a job that is gone."""
        self._logged.pop(key, None)


def _status(raw: Mapping[str, Any], error: Exception, now: datetime) -> dict[str, Any]:
    """Return the status as it was, besides what the bug changes: whether the spec can run is not known any more."""
    previous, generation = raw.get("status") or {}, raw["metadata"].get("generation", 0)
    found = _findings(raw, error)
    told = previous.get("conditions") or []
    replaced = {condition.type for condition in found}
    kept = [item for item in told if item["type"] not in replaced and item["reason"] != reasons.INVALID_SPEC]
    refused = any(item["type"] == reasons.FAILED and item["reason"] == reasons.INVALID_SPEC for item in told)
    first, *others = merged(told, found, generation=generation, now=now)
    phase = reasons.PENDING if refused else previous.get("phase", reasons.PENDING)
    return {
        **previous,
        "phase": phase,
        "observedGeneration": generation,
        "conditions": [first, *kept, *others],
    }


def _findings(raw: Mapping[str, Any], error: Exception) -> list[Condition]:
    message = f"{shortened(error, _SHOWN)}; this is a bug of the controller, report it with the spec"
    found = [Condition(reasons.ACCEPTED, "Unknown", reasons.INTERNAL_ERROR, message)]
    trains = conditions.find(raw.get("status") or {}, reasons.TRAINING)
    if trains is None or trains["status"] != "True":
        found.append(explanation.training(found, raw))
    return found
