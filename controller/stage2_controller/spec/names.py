"""Names that builders, passes and status share: job keys, labels, annotations, roles, names of children."""

import hashlib
import re
from typing import NamedTuple

from stage2_api.job import GROUP as GROUP
from stage2_api.job import KIND as KIND
from stage2_api.job import PLURAL as PLURAL
from stage2_api.job import VERSION as VERSION


class Key(NamedTuple):
    """A job's namespace and name, by which queue, store and caches know it."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


API_VERSION = f"{GROUP}/{VERSION}"

FIELD_MANAGER = "stage2-controller"
MANAGER = "stage2.dev/controller"  # spec.managedBy of a job that is ours

LABEL_JOB = "stage2.dev/job"
LABEL_ROLE = "stage2.dev/role"
LABEL_ATTEMPT = "stage2.dev/attempt"  # of the servers' pods: which attempt of which job they belong to
LABEL_QUEUE = "kueue.x-k8s.io/queue-name"  # of a job; Kueue itself may give it to a learner's Job
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "stage2"

# The label holds the job's short name, the annotation its full name.
ANNOTATION_JOB = "stage2.dev/job-name"
ANNOTATION_JOB_UID = "stage2.dev/job-uid"  # of pods: a ReplicaSet stands between them and the job
ANNOTATION_SPEC_HASH = "stage2.dev/spec-hash"
ANNOTATION_MANIFEST_HASH = "stage2.dev/manifest-hash"
ANNOTATION_CONFIG_HASH = "stage2.dev/config-hash"
ANNOTATION_NODE = "stage2.dev/node"  # the node that was chosen for the whole job

WAIT_CONTAINER = "wait-for-servers"  # of the learner's pod: it ends when all servers answer

ROLE_ROLLOUT = "rollout"
ROLE_LEARNER = "learner"
ROLE_CONFIG = "config"
ROLE_TOKEN = "token"
ROLE_PODS = "pods"
ROLE_QUOTA = "quota"

MAX_NAME = 63  # a label value and a DNS label hold no more (RFC 1123)
_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def short_name(name: str, suffix: str = "") -> str:
    """Return `name` + `suffix` as a DNS label of at most 63 characters.

    A name that already is one is kept. Any other (too long, dots, a leading digit) is cut and gets eight hexadecimal
    digits of its SHA-256, so that two jobs share no child.
    """
    plain = f"{name}{suffix}"
    if len(plain) <= MAX_NAME and _DNS_LABEL.fullmatch(plain):
        return plain
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    stem = re.sub(r"[^-a-z0-9]", "-", name.lower())
    if not stem[:1].isalpha():
        stem = f"j-{stem}"
    return f"{stem[: MAX_NAME - len(suffix) - 9].rstrip('-')}-{digest}{suffix}"


def child_name(job: str, role: str) -> str:
    """Return the name of the child of `job` that plays `role`: `job-3v1-rollout`."""
    return short_name(job, f"-{role}")


def learner_host(job: str, namespace: str) -> str:
    """Return the name in the learner's certificate; the learner has no Service, and clients use its address."""
    return f"{child_name(job, ROLE_LEARNER)}.{namespace}.svc"


def certificate_hosts(job: str, namespace: str) -> dict[str, tuple[str, ...]]:
    """Return the names in each role's certificate."""
    service = child_name(job, ROLE_ROLLOUT)
    return {
        ROLE_ROLLOUT: (service, f"{service}.{namespace}", service_host(job, namespace)),
        ROLE_LEARNER: (learner_host(job, namespace),),
    }


def service_host(job: str, namespace: str) -> str:
    """Return the rollout Service's name in the cluster's DNS, without the cluster's own domain."""
    return f"{child_name(job, ROLE_ROLLOUT)}.{namespace}.svc"
