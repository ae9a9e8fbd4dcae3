"""What a configuration names that lies on another machine: on a hub of models, at a tracker's service."""

from __future__ import annotations

import re

from stage2_api.runconfig import RunConfig

HUB_NAME = re.compile(r"(?!\.+/)[\w.-]+/[\w.-]+")
"""The name of a repository on a hub of models: its owner's and its own."""
FOLDER = re.compile(r"[/.].*")
"""A name that is a folder's, and no hub's: it begins at the root, or where the process runs."""
LOCAL_TRACKERS = frozenset({"tensorboard", "none"})
"""What `training.report_to` may hold without a service that is connected to."""


def named_elsewhere(config: RunConfig) -> list[str]:
    """Return the keys whose values lie elsewhere, as paths below `config`; empty where the pods need nobody else."""
    found = ["model.model"] if HUB_NAME.fullmatch(config.model.model) else []
    if set(config.training.report_to) - LOCAL_TRACKERS:
        found.append("training.report_to")
    monitor = config.rollout_matching.desc_monitor
    if monitor.enabled and monitor.mode != "exact" and not FOLDER.fullmatch(monitor.semantic_model):
        found.append("custom.extra.rollout_matching.desc_monitor.semantic_model")
    return found
