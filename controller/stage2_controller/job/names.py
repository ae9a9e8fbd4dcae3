"""Names that builders, passes and status share: job keys, labels, annotations, roles, names of children."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

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
LABEL_PRIORITY = "kueue.x-k8s.io/priority-class"  # of a job: its rank in the queue
LABEL_JOB_INDEX = "jobset.sigs.k8s.io/job-index"  # of a pod: its Job's among those of JobSet for its role
LABEL_POD_INDEX = "batch.kubernetes.io/job-completion-index"  # of a pod: its own in its Job
LABEL_JOB_KEY = "jobset.sigs.k8s.io/job-key"  # of a JobSet's pod: its Job's among all of the cluster
LABEL_POD_PRIORITY = "jobset.sigs.k8s.io/priority"  # of a JobSet's pod: its priority, as a number
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
ROLE_JOBSET = "jobset"  # of one object that has the pods of both roles
JOBSET = "JobSet"  # spec.engine of a job whose pods another controller runs

MAX_NAME = 63  # a label value and a DNS label hold no more (RFC 1123)
_JOBSET_MAX_NAME = MAX_NAME - len("-rollout-0-255-abcde")  # JobSet builds its pods' names so
_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def short_name(name: str, suffix: str = "", longest: int = MAX_NAME) -> str:
    """Return `name` + `suffix` as a DNS label of at most `longest` characters.

    A name that already is one is kept. Any other (too long, dots, a leading digit) is cut and gets eight hexadecimal
    digits of its SHA-256, so that two jobs share no child.
    """
    plain = f"{name}{suffix}"
    if len(plain) <= longest and _DNS_LABEL.fullmatch(plain):
        return plain
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    stem = re.sub(r"[^-a-z0-9]", "-", name.lower())
    if not stem[:1].isalpha():
        stem = f"j-{stem}"
    return f"{stem[: longest - len(suffix) - 9].rstrip('-')}-{digest}{suffix}"


def child_name(job: str, role: str) -> str:
    """Return the name of the child of `job` that plays `role`: `job-3v1-rollout`."""
    return short_name(job, f"-{role}", _JOBSET_MAX_NAME if role == ROLE_JOBSET else MAX_NAME)


def runs_as_jobset(job: Mapping[str, Any]) -> bool:
    """Return whether another controller has the pods of this job, as the API server holds it."""
    return bool((job.get("spec") or {}).get("engine") == JOBSET)


def learner_host(job: str, namespace: str) -> str:
    """Return the name in the learner's certificate; the learner has no Service, and clients use its address."""
    return f"{child_name(job, ROLE_LEARNER)}.{namespace}.svc"


def certificate_hosts(job: str, namespace: str, *, engine: str = "Node") -> dict[str, tuple[str, ...]]:
    """Return the names in each role's certificate."""
    service = child_name(job, ROLE_ROLLOUT)
    own = (service, f"{service}.{namespace}", service_host(job, namespace))
    return {
        ROLE_ROLLOUT: (f"*.{child_name(job, ROLE_JOBSET)}.{namespace}.svc",) if engine == JOBSET else own,
        ROLE_LEARNER: (learner_host(job, namespace),),
    }


def service_host(job: str, namespace: str) -> str:
    """Return the rollout Service's name in the cluster's DNS, without the cluster's own domain."""
    return f"{child_name(job, ROLE_ROLLOUT)}.{namespace}.svc"


def jobset_job(job: str, role: str) -> str:
    """Return the name of JobSet's first Job of a role."""
    return f"{child_name(job, ROLE_JOBSET)}-{role}-0"


def jobset_host(job: str, namespace: str, role: str, of_jobs: int, of_pods: int) -> str:
    """Return the name of a pod of JobSet: <jobset>-<role>-<Job>-<pod>.<its headless Service>."""
    jobset = child_name(job, ROLE_JOBSET)
    return f"{jobset}-{role}-{of_jobs}-{of_pods}.{jobset}.{namespace}.svc"
