"""TCP ports and routes at which a job's processes are reached; where servers listen, `spec.rollout.port` says."""

from __future__ import annotations

from typing import Final

PROGRESS_PORT: Final = 9400
"""Port at which the learner tells its progress to whoever has the job's token."""

METRICS_PORT: Final = 9401
"""Port at which the learner serves its figures for Prometheus, to everybody."""

GROUP_PORT: Final = 51216
"""Port on the learner's side at which server 0 joins the weight-transfer group; server i has this + i."""

PROGRESS_ROUTE: Final = "/progress"
"""Route of the learner's report."""

HEALTH_ROUTE: Final = "/health"
"""Route at which a server says that it answers: the only one that asks for no token."""
