"""Every kind of object that the controller uses. A new kind of child is one entry here and a builder in `children`.

Builders read API version and name, the observed state the field, the comparison how a child is written, and store,
watches and requests what is watched and its API path.
"""

from dataclasses import dataclass

from stage2_controller.job import names


@dataclass(frozen=True)
class Resource:
    """A kind of the API server."""

    kind: str
    api_version: str
    plural: str
    spec_fields: tuple[str, ...] | None = None  # the fields of its spec that the store keeps; None: all


@dataclass(frozen=True, kw_only=True)
class ChildKind(Resource):
    """A kind of child. A job has at most one of each."""

    role: str  # ends its name: <job>-<role>
    field: str  # of Observed
    has_pods: bool = False  # its pods have its role
    watched: bool = True  # else it is read by name, so that the controller needs no right to list all of them
    create_once: bool = False  # never written again; else it is applied
    updated: str | None = None  # the only field of its spec that is updated; None: all
    of_kueue: bool = False  # exists only where Kueue is installed


CONFIG_MAP = ChildKind("ConfigMap", "v1", "configmaps", role=names.ROLE_CONFIG, field="configmap", watched=False)
SECRET = ChildKind(  # running pods hold its token and certificates
    "Secret", "v1", "secrets", role=names.ROLE_TOKEN, field="secret", watched=False, create_once=True
)
NETWORK_POLICY = ChildKind(
    "NetworkPolicy", "networking.k8s.io/v1", "networkpolicies", role=names.ROLE_PODS, field="networkpolicy"
)
SERVICE = ChildKind("Service", "v1", "services", role=names.ROLE_ROLLOUT, field="service")
DEPLOYMENT = ChildKind(
    "Deployment", "apps/v1", "deployments", role=names.ROLE_ROLLOUT, field="deployment", has_pods=True
)
LEARNER_JOB = ChildKind(  # a Job's template is immutable
    "Job", "batch/v1", "jobs", role=names.ROLE_LEARNER, field="learner", has_pods=True, create_once=True
)
JOBSET = ChildKind(  # read by name: it need not be installed. Most of its spec is immutable
    names.JOBSET,
    "jobset.x-k8s.io/v1alpha2",
    "jobsets",
    role=names.ROLE_JOBSET,
    field="jobset",
    has_pods=True,
    watched=False,
    create_once=True,
)
WORKLOAD = ChildKind(
    "Workload",
    "kueue.x-k8s.io/v1beta2",
    "workloads",
    role=names.ROLE_QUOTA,
    field="workload",
    updated="queueName",
    of_kueue=True,
)

CHILDREN = (DEPLOYMENT, SERVICE, NETWORK_POLICY, WORKLOAD, CONFIG_MAP, SECRET, LEARNER_JOB, JOBSET)
CHILD = {child.kind: child for child in CHILDREN}
ROLE_OF_PODS = {child.kind: child.role for child in CHILDREN if child.has_pods}
KIND_OF_ROLE = {role: kind for kind, role in ROLE_OF_PODS.items()}

ROLLOUT_MATCHING_JOB = Resource(names.KIND, names.API_VERSION, names.PLURAL)
POD = Resource("Pod", "v1", "pods", spec_fields=("nodeName", "resourceClaims"))
NODE = Resource("Node", "v1", "nodes")
RESOURCE_QUOTA = Resource("ResourceQuota", "v1", "resourcequotas")
OTHERS = (
    ROLLOUT_MATCHING_JOB,
    POD,
    NODE,
    Resource("Event", "v1", "events"),
    Resource("Lease", "coordination.k8s.io/v1", "leases"),
    RESOURCE_QUOTA,
    Resource("PriorityClass", "scheduling.k8s.io/v1", "priorityclasses"),
    Resource("ResourceFlavor", "kueue.x-k8s.io/v1beta2", "resourceflavors"),
    Resource("WorkloadPriorityClass", "kueue.x-k8s.io/v1beta2", "workloadpriorityclasses"),
)
RESOURCES = {resource.kind: resource for resource in (*CHILDREN, *OTHERS)}


def watched(*, kueue: bool) -> tuple[Resource, ...]:
    """Return the watched kinds: jobs, their children, and the children's pods."""
    children = (child for child in CHILDREN if child.watched and (kueue or not child.of_kueue))
    return (ROLLOUT_MATCHING_JOB, *children, POD)
