"""The ResourceQuotas of all namespaces: whether one refuses the pods of a job, before any of its pods exists.

The API server counts a pod when it is created. So what a job that starts now will take counts here until its pods
exist. Left to the API server: quotas with scopes, limits, and what a LimitRange or a RuntimeClass adds to a pod.
"""

from collections import defaultdict
from collections.abc import Callable, Container

from stage2_controller.job import kinds, names
from stage2_controller.job.names import Key
from stage2_controller.job.objects import Amounts, add_amounts, parse_amounts, show_quantity
from stage2_controller.place.node_fit import Need
from stage2_controller.place.placement import Place
from stage2_controller.state import reasons
from stage2_controller.state.observed import Object, ended, role_of
from stage2_controller.state.store import Store

# The objects beside its pod that a role's pod needs, under the names that a quota counts them by.
_OBJECTS: dict[str, Amounts] = {
    names.ROLE_ROLLOUT: {"deployments.apps": 1, "replicasets.apps": 1},
    names.ROLE_LEARNER: {"jobs.batch": 1},
}

# Why pods may never come to exist: room that is kept for them would be kept for ever.
_NEVER_MADE = frozenset({reasons.POD_REFUSED, reasons.QUEUED_TWICE})


class Quotas:
    """The live quotas. `freed` is called with a waiting job whose pods no quota refuses any more."""

    def __init__(self, store: Store) -> None:
        self.freed: Callable[[Key], object] = lambda key: None
        self._store = store
        self._quotas: dict[str, dict[str, Object]] = defaultdict(dict)  # by namespace and uid
        self._starting: dict[Key, Need] = {}  # jobs whose pods are about to exist
        self._waiting: dict[Key, Need] = {}  # in the order in which they began to wait

    def observe(self, kind: str, event: Object) -> None:
        """Take in an event of the watch."""
        namespace, uid = (event["object"]["metadata"][part] for part in ("namespace", "uid"))
        self._quotas[namespace].pop(uid, None)
        if event["type"] != "DELETED":
            self._quotas[namespace][uid] = event["object"]
        self._serve(namespace)

    def vanished(self, kind: str, namespace: str | None, present: Container[str], list_version: int) -> list[Object]:
        """Return the known quotas of a namespace, or of all, that a new list lacks. present: the uids in the list."""
        listed = (known for space, known in self._quotas.items() if namespace in (None, space))
        return [body for known in listed for uid, body in known.items() if uid not in present]

    def exceeded(self, key: Key, need: Need) -> str | None:
        """Return which quota refuses those pods of the job that do not exist; None if none does."""
        quotas = self._quotas.get(key.namespace)
        if not quotas:
            return None
        needed = self._unmade(key, need)
        others = [one for one in self._starting if one.namespace == key.namespace and one != key]
        promised = add_amounts(self._unmade(one, self._starting[one]) for one in others)
        found = (_exceeded(one, needed, promised, need.gpu_resource) for one in quotas.values())
        return next(filter(None, found), None)

    def record(self, key: Key, place: Place | None) -> None:
        """Note that the job waits for a quota, or what it is about to create."""
        if place and place.condition and place.condition.reason == reasons.QUOTA_EXCEEDED:
            self._waiting[key] = place.need
        else:
            self._waiting.pop(key, None)
        refused = bool(place and place.condition and place.condition.reason in _NEVER_MADE)
        starts = place is not None and not place.is_complete and not refused and (place.node or not place.tied)
        if place and starts and self._unmade(key, place.need):
            self._starting[key] = place.need
        elif self._starting.pop(key, None):
            self._serve(key.namespace)

    def _serve(self, namespace: str) -> None:
        """Let jobs that wait in the namespace start by priority and then age, as far as the quotas reach."""
        for key, need in sorted(self._waiting.items(), key=lambda waiter: -waiter[1].priority):
            if key.namespace == namespace and self.exceeded(key, need) is None:
                self._starting[key] = self._waiting.pop(key)
                self.freed(key)

    def _unmade(self, key: Key, need: Need) -> Amounts:
        """Return what those pods of the job will take that do not exist yet: no quota counts them."""
        made = {role_of(pod) for pod in self._store.all(kinds.POD.kind, key) if not ended(pod)}
        unmade = [pod for pod in need.pods if pod.role not in made]
        return add_amounts(part for pod in unmade for part in (pod.requests, _OBJECTS[pod.role]))


def _exceeded(quota: Object, needed: Amounts, promised: Amounts, gpu_resource: str) -> str | None:
    """Return what the quota refuses, GPUs first; None if it has room, or counts only pods of certain scopes."""
    metadata, spec, status = (quota.get(part) or {} for part in ("metadata", "spec", "status"))
    if spec.get("scopes") or spec.get("scopeSelector"):
        return None
    hard, used = (parse_amounts(status.get(part) or {}) for part in ("hard", "used"))
    for name in sorted(hard, key=lambda name: name != f"requests.{gpu_resource}"):
        resource = name.removeprefix("requests.").removeprefix("count/")
        amount, taken = needed.get(resource, 0), used.get(name, 0) + promised.get(resource, 0)
        if amount > 0 and taken + amount > hard[name] + 1e-9:  # sums of 0.1 are not exact
            needs, allows, has = (show_quantity(resource, one) for one in (amount, hard[name], taken))
            wait = "" if amount > hard[name] else "wait for other pods to end, "
            return (
                f"needs {needs} {name}; ResourceQuota {metadata['name']} of namespace {metadata['namespace']} allows"
                f" {allows}, and {has} are used or promised; the job has no pods meanwhile: {wait}request less"
                " (spec.rollout, spec.learner), or ask the admin to raise the quota"
            )
    return None
