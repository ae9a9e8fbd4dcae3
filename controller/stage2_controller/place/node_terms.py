"""Affinity of pods to nodes: which nodes a term takes, and terms that are narrowed further. Pure.

Terms are those of a pod's `nodeAffinity`, as JSON; what they mean is the scheduler's (k8s.io/component-helpers,
nodeaffinity).
"""

from collections.abc import Mapping, Sequence
from typing import Any

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def of(pod_spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the nodeAffinity of a pod, empty where it has none."""
    found: Mapping[str, Any] = (pod_spec.get("affinity") or {}).get("nodeAffinity") or {}
    return found


def takes(affinity: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a node with these labels meets one of the required terms, or none is required."""
    required = affinity.get(REQUIRED)
    return required is None or any(_meets(term, labels) for term in required["nodeSelectorTerms"])


def weight(affinity: Mapping[str, Any], labels: Mapping[str, str]) -> int:
    """Return the sum of the weights of all preferences that a node meets."""
    preferred = affinity.get(PREFERRED) or ()
    return sum(one["weight"] for one in preferred if _meets(one["preference"], labels))


def narrowed(affinity: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """Return the affinity to those of its nodes that meet a further term as well."""
    terms: Sequence[Mapping[str, Any]] = (affinity.get(REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
    return {**affinity, REQUIRED: {"nodeSelectorTerms": [_both(term, further) for term in terms]}}


def preferring(affinity: Mapping[str, Any], term: Mapping[str, Any]) -> dict[str, Any]:
    """Return the affinity with a preference for nodes that meet a term, as strong as one can be."""
    return {**affinity, PREFERRED: [*(affinity.get(PREFERRED) or ()), {"weight": 100, "preference": term}]}


def shown(affinity: Mapping[str, Any]) -> str:
    """Return the required terms as a person reads them: `gpu In (h100, a100), zone NotIn (b) or pool Exists`."""
    terms = affinity[REQUIRED]["nodeSelectorTerms"]
    return " or ".join(", ".join(map(_shown, term.get("matchExpressions") or ())) for term in terms)


def _both(term: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    return {**term, **{key: [*(term.get(key) or ()), *more] for key, more in further.items()}}


def _meets(term: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    return all(_holds(one, labels.get(one["key"])) for one in term.get("matchExpressions") or ())


def _holds(one: Mapping[str, Any], label: str | None) -> bool:
    values: Sequence[str] = one.get("values") or ()
    match one["operator"]:
        case "In":
            return label in values
        case "NotIn":
            return label not in values
        case "Exists":
            return label is not None
        case "DoesNotExist":
            return label is None
        case "Gt":
            return _whole(label) and int(str(label)) > int(values[0])
        case _:
            return _whole(label) and int(str(label)) < int(values[0])


def _whole(label: str | None) -> bool:
    return label is not None and label.removeprefix("-").isdecimal()


def _shown(one: Mapping[str, Any]) -> str:
    values = ", ".join(one.get("values") or ())
    return f"{one['key']} {one['operator']}" + (f" ({values})" if values else "")
