"""The words of the status: phases, condition types and their constant reasons. Messages are for people."""

from typing import Final

# Phases: one word for `kubectl get`; programs should read the conditions.
PENDING: Final = "Pending"  # accepted; no pod has a node yet
STARTING: Final = "Starting"  # pods have a node; servers load, or the learner's container starts
RUNNING: Final = "Running"  # the learner's container runs
SUCCEEDED: Final = "Succeeded"  # the learner ended with exit code 0; final
FAILED: Final = "Failed"  # invalid, or ended without success; a corrected spec runs
SUSPENDED: Final = "Suspended"  # spec.suspend: no pod exists

# Condition Accepted: the spec can run.
ACCEPTED: Final = "Accepted"
VALID: Final = "Valid"  # the job passes the definition, the rules and the policy
KEYS_IGNORED: Final = "KeysIgnored"  # valid without keys that this version does not know and no author wrote
INVALID_SPEC: Final = "InvalidSpec"  # a rule is broken; the message has path, value, rule and fix
NO_LONGER_VALID: Final = "NoLongerValid"  # accepted earlier, and managed to its end: a new start would be refused
INTERNAL_ERROR: Final = "InternalError"  # a bug of the controller: nothing changes, and passes are retried

# Condition Placed: one node has room for servers and learner. Where the scheduler chooses, it reports only what failed.
PLACED: Final = "Placed"
NODE_CHOSEN: Final = "NodeChosen"  # servers and learner are placed on a node
NO_NODE_FITS: Final = "NoSingleNodeFits"  # the message says what is missing; pods exist only if nodes can be added
NODE_LOST: Final = "NodeLost"  # the node is gone or out of service; the whole job moves
NODE_FULL: Final = "NodeFull"  # the scheduler or the kubelet refused a pod on the node; the whole job moves
NODE_DRAINED: Final = "NodeDrained"  # somebody has cordoned the node; the whole job moves
QUOTA_EXCEEDED: Final = "QuotaExceeded"  # a ResourceQuota refuses the job's pods: it has none, and waits
HALF_PLACED: Final = "HalfPlaced"  # one pod got a node, or each another one: all go, and it is retried later
NODE_NOT_READY: Final = "NodeNotReady"  # the node is silent; the job stays, because its learner may still write

# Condition ChildrenApplied: the API server accepted every child.
CHILDREN_APPLIED: Final = "ChildrenApplied"
APPLIED: Final = "Applied"  # the API server accepted every child
CHILD_REFUSED: Final = "ChildRefused"  # quota, admission or permissions; the message is the API server's
JOBSET_MISSING: Final = "JobSetMissing"  # JobSet is not installed; the message has the command
NAME_TAKEN: Final = "NameTaken"  # another object has a child's name: the job starts once it is gone
OLD_CHILDREN_ENDING: Final = "OldChildrenEnding"  # children of a deleted job of this name end: none is written yet

# Condition RolloutReady: every server answers /health. Absent where a job has no servers (colocate, hf).
ROLLOUT_READY: Final = "RolloutReady"
SERVERS_READY: Final = "ServersReady"  # all servers answer
SERVERS_LOADING: Final = "ServersLoading"  # containers run and do not answer yet
SERVER_CRASHED: Final = "ServerCrashed"  # a container ended and waits for its next start
RELEASED: Final = "Released"  # the job has ended, and its servers were removed; WeightsInSync has it too

# Condition LearnerRunning: the learner's container runs.
LEARNER_RUNNING: Final = "LearnerRunning"
LEARNER_STARTED: Final = "LearnerStarted"  # the learner's container runs
WAITING_FOR_SERVERS: Final = "WaitingForServers"  # it starts when the servers answer
OLD_LEARNER_ENDING: Final = "OldLearnerEnding"  # an earlier learner has not ended, and may still write
SECRET_RENEWED: Final = "SecretRenewed"  # its certificates expire soon: the pods restart with new ones
LEARNER_RETRYING: Final = "LearnerRetrying"  # a pod failed; the Job waits before the next one
LEARNER_FINISHED: Final = "LearnerFinished"  # the job has ended, and its learner with it

# Condition LearnerReachable: present only while the controller gets no report from a running learner.
LEARNER_REACHABLE: Final = "LearnerReachable"
LEARNER_UNREACHABLE: Final = "LearnerUnreachable"  # the learner runs, but gives no report

# Reasons of RolloutReady and LearnerRunning: why a pod does not run. Some are also why Placed is not True.
NOT_CREATED: Final = "NotCreated"  # the object or its pod does not exist yet
LABELS_LOST: Final = "PodLabelsLost"  # somebody took the labels by which the pod is seen; it may run
POD_REFUSED: Final = "PodRefused"  # a quota, a policy or the kubelet refused the pod; the message is theirs
QUEUED_TWICE: Final = "QueuedTwice"  # Kueue took the learner's Job for one of its own
EVICTED: Final = "Evicted"  # the kubelet evicted a pod, for lack of something; the next start follows a pause
UNSCHEDULABLE: Final = "Unschedulable"  # no node fits the pod; the message is the scheduler's
IMAGE_UNAVAILABLE: Final = "ImageUnavailable"  # the message names the image and the registry's answer
CONTAINER_CONFIG: Final = "ContainerConfigError"  # a ConfigMap, Secret or volume is missing
CONTAINERS_STARTING: Final = "ContainersStarting"  # images are pulled, or containers start

# Condition WeightsInSync: every server holds the version that the learner pushed last.
WEIGHTS_IN_SYNC: Final = "WeightsInSync"
SAME_VERSION: Final = "SameVersion"  # all servers hold the version pushed last
VERSIONS_DIFFER: Final = "VersionsDiffer"  # some server holds another version
SERVER_RESTARTED: Final = "ServerRestarted"  # a server that restarted has no pushed weights until the next push
NOT_SYNCED_YET: Final = "NotSyncedYet"  # the learner has pushed no weights yet

# Condition StepsKept: present only while steps that a learner had done have to be done again.
STEPS_KEPT: Final = "StepsKept"
STEPS_LOST: Final = "StepsLost"  # the learner began at an older step than another one had reached

# Condition QuotaReserved: Kueue has admitted the job. Present where the job names a queue.
QUOTA_RESERVED: Final = "QuotaReserved"
ADMITTED: Final = "Admitted"  # Kueue has admitted the job
QUOTA_PENDING: Final = "QuotaPending"  # no quota is free, or an admission check is not ready
CHECK_FAILED: Final = "AdmissionCheckFailed"  # a check failed, as of a ProvisioningRequest; Kueue retries with pauses
QUOTA_REFUSED: Final = "QuotaRefused"  # Kueue deactivated the Workload: suspend and resume the job to ask again
WORKLOAD_INACTIVE: Final = "WorkloadInactive"  # somebody else deactivated the Workload; the job waits for them
NO_PRIORITY_CLASS: Final = "NoWorkloadPriorityClass"  # the label names no existing class: no quota is requested
KUEUE_DISABLED: Final = "KueueDisabled"  # the controller was installed without Kueue: only what runs continues

# Condition Training: nothing is missing. If it is False, its reason is that of the first condition that is missing.
TRAINING: Final = "Training"
TRAINS: Final = "Trains"  # at least one optimizer step is done
NO_STEP_YET: Final = "NoStepYet"  # no optimizer step is done

# Conditions Ready, Reconciling and Stalled: as kstatus reads them. The last two are present only when true.
READY: Final = "Ready"  # the job is as its spec says: it runs, is suspended, or has succeeded
RECONCILING: Final = "Reconciling"  # the job is on its way there
STALLED: Final = "Stalled"  # the job does not get there unless somebody acts

# Condition Suspended: present while spec.suspend is true.
SUSPENDED_BY_SPEC: Final = "SuspendedBySpec"  # spec.suspend is true
PODS_ENDING: Final = "PodsEnding"  # pods were told to stop, and end: a learner that runs first writes its checkpoint

# Condition PodsEnded: present only while pods of a job that has ended, or must have none, do not end.
PODS_ENDED: Final = "PodsEnded"
PODS_OVERDUE: Final = "PodsOverdue"  # a pod keeps its node and GPUs five minutes after it should have ended

# Conditions Succeeded and Failed: present only when true.
LEARNER_SUCCEEDED: Final = "LearnerSucceeded"  # the learner ended with exit code 0
CONFIGURATION_ERROR: Final = "ConfigurationError"  # exit code 64: never retried
BACKOFF_LIMIT: Final = "BackoffLimitExceeded"  # the learner failed more often than spec.learner.backoffLimit
EVICTED_TOO_OFTEN: Final = "EvictedTooOften"  # the kubelet evicted pods more often than spec.evictionLimit allows
DEADLINE_EXCEEDED: Final = "DeadlineExceeded"  # spec.activeDeadlineSeconds has passed
START_DEADLINE: Final = "StartDeadlineExceeded"  # spec.learner.startDeadlineSeconds: the learner did not start in time
LEARNER_FAILED: Final = "LearnerFailed"  # the Job failed for another reason, which the message names
