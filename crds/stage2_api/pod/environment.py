"""Names of the environment variables that the containers of a job get, and that servers and learner read."""

from __future__ import annotations

from typing import Final

TOKEN_FILE_VARIABLE: Final = "STAGE2_TOKEN_FILE"
"""Path of the file with the job's bearer token; servers and learner refuse to start without it."""

TLS_CA_FILE_VARIABLE: Final = "STAGE2_TLS_CA_FILE"
"""Path of the certificates of the authorities by which servers of https:// are checked; unset, this machine's own."""

TLS_CERT_FILE_VARIABLE: Final = "STAGE2_TLS_CERT_FILE"
"""Path of the certificate with which a server of https:// answers, and a learner its progress; unset, it has none."""

TLS_KEY_FILE_VARIABLE: Final = "STAGE2_TLS_KEY_FILE"
"""Path of the certificate's private key."""

PROGRESS_PORT_VARIABLE: Final = "STAGE2_PROGRESS_PORT"
"""TCP port at which the learner tells its progress; unset, it tells nobody."""

METRICS_PORT_VARIABLE: Final = "STAGE2_METRICS_PORT"
"""TCP port at which the learner serves its figures for Prometheus; unset, it serves none."""

RESTARTS_VARIABLE: Final = "STAGE2_RESTARTS"
"""Times that the learner was started again in its container; unset, it was not."""

TERMINATION_LOG_VARIABLE: Final = "STAGE2_TERMINATION_LOG"
"""Path of the file in which the learner leaves its last report; unset, it leaves none."""
