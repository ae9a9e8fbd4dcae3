"""kubectl for a red-team run: as the admin, who sets the scene and looks on, and as the tenant who attacks."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

IN_POD = Path(__file__).with_name("in_pod.py")
LONGEST_WAIT_S = 900.0


class Cluster:
    """kubectl in one namespace; tenant: the service account that it speaks as, else the admin of the kubeconfig."""

    def __init__(self, kubectl: str, namespace: str, tenant: str = "") -> None:
        account = [f"--as=system:serviceaccount:{namespace}:{tenant}"] if tenant else []
        self._command = [kubectl, f"--namespace={namespace}", *account]
        self.namespace = namespace

    def run(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl, and return its output, whether it succeeds or not."""
        return subprocess.run([*self._command, *arguments], input=stdin, capture_output=True, text=True, check=False)

    def __call__(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl; return its standard output. Raise RuntimeError if it failed."""
        done = self.run(*arguments, stdin=stdin)
        if done.returncode:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr}")
        return done.stdout

    def apply(self, *manifests: Mapping[str, Any]) -> None:
        """Create or change objects."""
        self("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)}))

    def get(self, kind: str, name: str) -> Any:
        """Return an object, or None."""
        done = self.run("get", kind, name, "--output=json")
        return None if done.returncode else json.loads(done.stdout)

    def from_pod(self, pod: str, command: str, *words: str) -> Iterator[dict[str, Any]]:
        """Run a command of in_pod.py in a pod; yield what it reports."""
        words = ("exec", "-i", pod, "--", "python3", "-u", "-", command, *words)
        with (
            IN_POD.open() as sent,
            subprocess.Popen([*self._command, *words], stdin=sent, stdout=subprocess.PIPE, text=True) as running,
        ):
            assert running.stdout is not None
            for line in running.stdout:
                yield json.loads(line)
        if running.returncode:
            raise RuntimeError(f"{command} in pod {pod} ended with {running.returncode}")


def eventually(look: Callable[[], Any], *, why: str) -> Any:
    """Return what `look` finds once it is true. Raise TimeoutError that says why it was awaited."""
    deadline = time.monotonic() + LONGEST_WAIT_S
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {LONGEST_WAIT_S:.0f} s: {why}")
        time.sleep(1.0)
    return found
