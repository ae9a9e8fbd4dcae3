"""The JobSet of a job with engine JobSet: Jobs that have the pods of servers and learner. Pure."""

from stage2_api.job import RolloutMatchingJob
from stage2_controller.children import manifest, pods
from stage2_controller.children.manifest import Manifest, Owner
from stage2_controller.children.pods import PodInputs
from stage2_controller.job import kinds, names
from stage2_controller.job.containers import is_elastic
from stage2_controller.state.observed import Object, Observed, terminating

_NO_LIMIT = 2**31 - 1  # of failures; the kubelet's restarts count
_MOST_PODS = 256  # by the rule of spec.rollout.servers
_EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
_PASSED_ON = (names.LABEL_QUEUE, names.LABEL_PRIORITY)  # labels of the job, by which Kueue admits the JobSet


def jobset(owner: Owner, inputs: PodInputs) -> Manifest:
    """Return JobSet `<job>-jobset`: a Job for all pods of the learner, and for the rollout pods one, or one for each.

    The kubelet restarts a server alone, and its Job replaces a lost rollout pod, without limit. The learner's Job
    replaces each of its pods `backoffLimit` times, and fails at once after exit code 64. Its end is the JobSet's: no
    rule restarts the JobSet, and so servers stay warm.

    The number of rollout pods changes in their Job (`scaled_job`): a JobSet's cannot. It has more completions than
    pods, so that JobSet's feature ElasticJobSet (0.12, off by default) does not set the number back.
    """
    job, templates = inputs.job, pods.templates(inputs)
    learner, nodes = pods.learner_job_spec(inputs), job.spec.learner.nodes
    learner |= {"parallelism": nodes, "completions": nodes, "backoffLimit": learner["backoffLimit"] * nodes}
    replicated = [_replicated(names.ROLE_LEARNER, 1, learner)]
    if names.ROLE_ROLLOUT in templates:
        jobs, of_each = (1, rollout_pods(job)) if is_elastic(job) else (rollout_pods(job), 1)
        servers: Manifest = {"parallelism": of_each, "completions": _MOST_PODS + 1 if is_elastic(job) else 1}
        servers |= {"backoffLimitPerIndex": _NO_LIMIT, "template": templates[names.ROLE_ROLLOUT]}
        placement = job.spec.placement
        apart = {_EXCLUSIVE: str(placement.topology_key)} if placement.topology == "Exclusive" else {}
        replicated.insert(0, _replicated(names.ROLE_ROLLOUT, jobs, servers, apart))
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
    labels = job.metadata.labels or {}
    made = manifest.child(
        kinds.JOBSET,
        owner,
        {"spec": spec},
        spec_hash=inputs.control.spec_hash if inputs.control else None,
    )
    made["metadata"]["labels"] |= {key: labels[key] for key in _PASSED_ON if labels.get(key)}
    return made


def rollout_pods(job: RolloutMatchingJob) -> int:
    """Return the number of pods with the job's servers."""
    return job.spec.rollout.servers // job.spec.rollout.servers_per_pod


def scaled_job(owner: Owner, pods: int) -> Manifest:
    """Return the patch that gives the rollout pods' Job this many pods: those with the highest indices go.

    Kubernetes allows it of Indexed Jobs with as many completions as pods (elastic Indexed Jobs).
    """
    metadata = {"name": names.jobset_job(owner.name, names.ROLE_ROLLOUT), "namespace": owner.namespace}
    job = kinds.LEARNER_JOB
    spec = {"parallelism": pods, "completions": pods}
    return {"apiVersion": job.api_version, "kind": job.kind, "metadata": metadata, "spec": spec}


def scaled(owner: Owner, job: RolloutMatchingJob, observed: Observed) -> Manifest | None:
    """Return the patch that corrects the number of pods of the servers' Job; None if it is right."""
    found, of_servers = observed.jobset, observed.rollout_job
    if not is_elastic(job) or found is None or of_servers is None or terminating(found) or terminating(of_servers):
        return None
    wanted = rollout_pods(job)
    return None if of_servers["spec"]["parallelism"] == wanted else scaled_job(owner, wanted)


def allowed_pods(found: Object | None, wanted: int) -> int:
    """Return how many of the wanted rollout pods are allowed now: with a queue, no more than Kueue admitted."""
    if found is None or "suspend" not in found["spec"]:  # Kueue writes it into each JobSet of a queue
        return wanted
    of_servers = [one for one in found["spec"]["replicatedJobs"] if one["name"] == names.ROLE_ROLLOUT]
    admitted: list[int] = [one["replicas"] * one["template"]["spec"]["parallelism"] for one in of_servers]
    return min([wanted, *admitted])


def _replicated(name: str, replicas: int, spec: Manifest, annotations: Manifest | None = None) -> Manifest:
    metadata = {"metadata": {"annotations": annotations}} if annotations else {}
    return {"name": name, "replicas": replicas, "template": {**metadata, "spec": spec}}
