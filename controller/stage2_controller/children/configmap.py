"""The ConfigMap with the effective training configuration, mounted in every pod of the job."""

from collections.abc import Mapping
from typing import Any

from stage2_api.pod import files
from stage2_controller.children import meta
from stage2_controller.spec import kinds


def configmap(owner: Mapping[str, Any], config_text: str) -> meta.Manifest:
    """Return ConfigMap `<job>-config` with the one key config.yaml."""
    body = {"data": {files.CONFIG_KEY: config_text}}
    return meta.child(kinds.CONFIG_MAP, owner=owner, body=body)
