"""The layout of a job's containers: files, volumes, environment variables, ports and routes.

A person's own volumes cannot take these names and paths. `spec.rollout.port` says where servers listen.
"""

from __future__ import annotations

import posixpath
from typing import Final

ROOT: Final = "/etc/stage2"
"""Folder of what stage2 mounts."""

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
"""The certificate of the job's authority, by which its members check each other."""

CERT_PATH: Final = f"{TLS_FOLDER}/tls.crt"
KEY_PATH: Final = f"{TLS_FOLDER}/tls.key"
"""The certificate with which the containers of a pod answer, and its private key."""

TMP_VOLUME: Final = "tmp"
TMP_FOLDER: Final = "/tmp"
"""Folder for files that end with the pod."""

SHARED_MEMORY_VOLUME: Final = "shm"
SHARED_MEMORY_FOLDER: Final = "/dev/shm"
"""Memory that the processes of a container share."""

TERMINATION_LOG: Final = "/dev/termination-log"
"""File in which Kubernetes looks for a container's last message."""

VOLUMES: Final = (CONFIG_VOLUME, TOKEN_VOLUME, TLS_VOLUME, TMP_VOLUME, SHARED_MEMORY_VOLUME)
"""Names of the volumes that belong to stage2."""

FOLDERS: Final = (TMP_FOLDER, SHARED_MEMORY_FOLDER, ROOT)
"""Folders that belong to stage2."""

MOUNTED: Final = (CONFIG_FOLDER, TOKEN_FOLDER, TLS_FOLDER)
"""Folders that hold only files which stage2 checked or wrote."""


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
"""Path of the certificates of the authorities by which servers of https:// are checked; unset, this machine's own."""

TLS_CERT_FILE_VARIABLE: Final = "STAGE2_TLS_CERT_FILE"
"""Path of the certificate with which a server of https:// answers, and a learner its progress; unset, it has none."""

TLS_KEY_FILE_VARIABLE: Final = "STAGE2_TLS_KEY_FILE"
"""Path of the certificate's private key."""

PROGRESS_PORT_VARIABLE: Final = "STAGE2_PROGRESS_PORT"
"""TCP port on which the learner serves its progress; unset, it serves none."""

METRICS_PORT_VARIABLE: Final = "STAGE2_METRICS_PORT"
"""TCP port at which the learner serves its figures for Prometheus; unset, it serves none."""

RESTARTS_VARIABLE: Final = "STAGE2_RESTARTS"
"""Times that the learner was started again in its container; unset, it was not."""

TERMINATION_LOG_VARIABLE: Final = "STAGE2_TERMINATION_LOG"
"""Path of the file in which the learner leaves its last report; unset, it leaves none."""


PROGRESS_PORT: Final = 9400
"""Port at which the learner serves its progress to clients with the job's token."""

METRICS_PORT: Final = 9401
"""Port at which the learner serves its figures for Prometheus, to everybody."""

GROUP_PORT: Final = 51216
"""Port on the learner's side at which server 0 joins the weight-transfer group; server i has this + i."""

PROGRESS_ROUTE: Final = "/progress"
"""Route of the learner's report."""

HEALTH_ROUTE: Final = "/health"
"""Route of a server's health: the only one that needs no token."""
