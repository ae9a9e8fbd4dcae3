"""The layout of a job's containers: files, volumes, environment variables, ports and routes.

Volumes of a job cannot use these names and paths. Servers listen on `spec.rollout.port`.
"""

from __future__ import annotations

import posixpath
from typing import Final

ROOT: Final = "/etc/stage2"
"""Folder of stage2's mounts."""

CONFIG_VOLUME: Final = "stage2-config"
CONFIG_KEY: Final = "config.yaml"
CONFIG_FOLDER: Final = f"{ROOT}/config"
CONFIG_PATH: Final = f"{CONFIG_FOLDER}/{CONFIG_KEY}"
"""The effective training configuration."""

TOKEN_VOLUME: Final = "stage2-token"
TOKEN_KEY: Final = "token"
TOKEN_FOLDER: Final = f"{ROOT}/token"
TOKEN_PATH: Final = f"{TOKEN_FOLDER}/{TOKEN_KEY}"
"""The job's bearer token."""

TLS_VOLUME: Final = "stage2-tls"
TLS_FOLDER: Final = f"{ROOT}/tls"
CA_KEY: Final = "ca.crt"
CA_PATH: Final = f"{TLS_FOLDER}/{CA_KEY}"
"""Certificate of the job's authority, which its members trust."""

CERT_PATH: Final = f"{TLS_FOLDER}/tls.crt"
KEY_PATH: Final = f"{TLS_FOLDER}/tls.key"
"""Certificate of the pod's containers, and its private key."""

TMP_VOLUME: Final = "tmp"
TMP_FOLDER: Final = "/tmp"
"""Folder for files that live as long as the pod."""

SHARED_MEMORY_VOLUME: Final = "shm"
SHARED_MEMORY_FOLDER: Final = "/dev/shm"
"""Shared memory of a container's processes."""

SHARED_MEMORY_BYTES: Final = 2**30
"""Bytes that workers of vLLM and NCCL need there."""

TERMINATION_LOG: Final = "/dev/termination-log"
"""File that Kubernetes reads for a container's last message."""

VOLUMES: Final = (CONFIG_VOLUME, TOKEN_VOLUME, TLS_VOLUME, TMP_VOLUME, SHARED_MEMORY_VOLUME)
"""Names of stage2's volumes."""

FOLDERS: Final = (TMP_FOLDER, SHARED_MEMORY_FOLDER, ROOT)
"""stage2's folders."""

MOUNTED: Final = (CONFIG_FOLDER, TOKEN_FOLDER, TLS_FOLDER)
"""Folders with only files that stage2 wrote or checked."""

GROUP: Final = 10001
"""The group that owns the files of mounted volumes; the images run as user and group 10001."""


def cleaned(mount_path: str) -> str:
    """Return a mount path as a runtime resolves it: absolute, without repeated slashes, `.` and `..`."""
    return "/" + posixpath.normpath("/" + mount_path).lstrip("/")  # normpath keeps two slashes at the beginning


def certificate_key(role: str) -> str:
    """Return the key of the job's Secret that holds the certificate of a role's pod."""
    return f"{role}.crt"


def private_key_key(role: str) -> str:
    """Return the key of the job's Secret that holds that certificate's private key."""
    return f"{role}.key"


TOKEN_FILE_VARIABLE: Final = "STAGE2_TOKEN_FILE"
"""Path of the file with the job's bearer token; servers and learner refuse to start without it."""

TLS_CA_FILE_VARIABLE: Final = "STAGE2_TLS_CA_FILE"
"""Path of the authority certificates for https:// servers; by default those of the machine."""

TLS_CERT_FILE_VARIABLE: Final = "STAGE2_TLS_CERT_FILE"
"""Path of the certificate of an https:// server, or of a learner's progress; unset means none."""

TLS_KEY_FILE_VARIABLE: Final = "STAGE2_TLS_KEY_FILE"
"""Path of the certificate's private key."""

PROGRESS_PORT_VARIABLE: Final = "STAGE2_PROGRESS_PORT"
"""TCP port of the learner's progress; unset turns it off."""

METRICS_PORT_VARIABLE: Final = "STAGE2_METRICS_PORT"
"""TCP port of the learner's Prometheus metrics; unset turns them off."""

RESTARTS_VARIABLE: Final = "STAGE2_RESTARTS"
"""Restarts of the learner in its container; unset means 0."""

POD_INDEX_VARIABLE: Final = "STAGE2_POD"
"""Index of a pod among those that share the servers (engine JobSet)."""

TERMINATION_LOG_VARIABLE: Final = "STAGE2_TERMINATION_LOG"
"""Path of the file for the learner's last report; unset turns it off."""


PROGRESS_PORT: Final = 9400
"""Port of the learner's progress, for clients with the job's token."""

METRICS_PORT: Final = 9401
"""Port of the learner's Prometheus metrics, without a token."""

GROUP_PORT: Final = 51216
"""The learner's port at which server 0 joins the weight-transfer group; server i uses this + i."""

RENDEZVOUS_PORT: Final = 29400
"""Port of the learner's first pod at which the processes of several pods meet."""

PROGRESS_ROUTE: Final = "/progress"
"""Route of the learner's report."""

HEALTH_ROUTE: Final = "/health"
"""Route of a server's health, the only one without a token."""
