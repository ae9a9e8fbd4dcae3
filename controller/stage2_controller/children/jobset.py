"""The JobSet of a job with engine JobSet: Jobs that have the pods of servers and learner. Pure."""

from stage2_controller.children import manifest, pods
from stage2_controller.children.manifest import Manifest, Owner
from stage2_controller.children.pods import PodInputs
from stage2_controller.spec import kinds, names

_NO_LIMIT = 2**31 - 1  # of failures; the kubelet's restarts count
_EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
_PASSED_ON = (names.LABEL_QUEUE, names.LABEL_PRIORITY)  # labels of the job, by which Kueue admits the JobSet


def jobset(owner: Owner, inputs: PodInputs) -> Manifest:
    """Return JobSet `<job>-jobset`: a Job for each rollout pod, and one for all pods of the learner.

    The kubelet restarts a server alone, and a lost rollout pod is replaced by its own Job, without limit. The learner's
    Job replaces each of its pods `backoffLimit` times, and fails at once after exit code 64. Its end is the JobSet's:
    no rule restarts the JobSet, and so servers stay warm.
    """
    job, templates = inputs.job, pods.templates(inputs)
    learner, nodes = pods.learner_job_spec(inputs), job.spec.learner.nodes
    learner |= {"parallelism": nodes, "completions": nodes, "backoffLimit": learner["backoffLimit"] * nodes}
    replicated = [_replicated(names.ROLE_LEARNER, 1, learner)]
    if names.ROLE_ROLLOUT in templates:
        servers: Manifest = {"parallelism": 1, "completions": 1, "backoffLimit": _NO_LIMIT}
        servers |= {"template": templates[names.ROLE_ROLLOUT]}
        replicated.insert(0, _replicated(names.ROLE_ROLLOUT, job.spec.rollout.pods, servers))
    of_learner = {"targetReplicatedJobs": [names.ROLE_LEARNER]}
    refused = {"name": "ConfigurationError", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    spec: Manifest = {
        "replicatedJobs": replicated,
        "successPolicy": {"operator": "All", **of_learner},
        "failurePolicy": {"maxRestarts": 0, "rules": [{**refused, **of_learner}]},
    }
    if inputs.control is None:  # a controller deletes the JobSet of a suspended job, and the whole job after its time
        spec |= {"suspend": True} if job.spec.suspend else {}
        if job.spec.ttl_seconds_after_finished is not None:
            spec["ttlSecondsAfterFinished"] = job.spec.ttl_seconds_after_finished
    placement, labels = job.spec.placement, job.metadata.labels or {}
    made = manifest.child(
        kinds.JOBSET,
        owner,
        {"spec": spec},
        annotations={_EXCLUSIVE: str(placement.topology_key)} if placement.topology == "Exclusive" else {},
        spec_hash=inputs.control.spec_hash if inputs.control else None,
    )
    made["metadata"]["labels"] |= {key: labels[key] for key in _PASSED_ON if labels.get(key)}
    return made


def _replicated(name: str, replicas: int, spec: Manifest) -> Manifest:
    return {"name": name, "replicas": replicas, "template": {"spec": spec}}
