"""What the chart and `stage2 render` make, read by two strict readers: `make lint`.

kubernetes-validate holds each object against the schema of its kind, and knows no other field. kube-score checks
good practice. Intended exceptions are in manifest-exceptions.yaml with their reason, and an exception that
nothing needs is a fault as well. Each fault is a line, and the command ends with 1.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

ROOT = Path(__file__).parents[1]
EXCEPTIONS = Path(__file__).with_name("manifest-exceptions.yaml")
KUBE_SCORE = ("go", "-C", str(ROOT / "hack" / "kube-score"), "tool", "kube-score", "score")
KUBERNETES = "1.34"
GRADE_OK = 10
WITHOUT_SCHEMA = frozenset({"ServiceMonitor", "PodMonitor", "PrometheusRule"})  # the Prometheus operator's
EVERYTHING = (
    *("controller.kueue=true", "metrics.serviceMonitor.enabled=true", "metrics.podMonitor.enabled=true"),
    *("metrics.prometheusRule.enabled=true", "metrics.dashboard.enabled=true"),
)
NAMED = (
    *("controller.namespaces[0]=team-a", "controller.namespaces[1]=team-b"),
    *("crd.install=false", "nameOverride=other"),
)
Manifest = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Manifests that belong together. name: for messages."""

    name: str
    text: str

    @property
    def manifests(self) -> list[Manifest]:
        """The objects of the text."""
        return [one for one in yaml.safe_load_all(self.text) if one]


@dataclass(frozen=True)
class Allowed:
    """A check that a kind of object need not pass. where: the source's name begins so."""

    check: str
    kind: str
    where: str
    why: str


@dataclass(frozen=True)
class Finding:
    """What kube-score found. kind: of the object."""

    check: str
    kind: str
    source: str
    text: str

    def is_covered(self, by: Allowed) -> bool:
        """Whether an exception is about it."""
        return (self.check, self.kind) == (by.check, by.kind) and self.source.startswith(by.where)


def main() -> int:
    """Check everything and print what is wrong; return the exit code."""
    if not shutil.which("go"):
        sys.stderr.write("check_manifests: kube-score is built by Go (1.26 or newer), which is not on PATH\n")
        return 1
    sources = [*chart(), *rendered()]
    faults = [*schema_faults(sources), *practice_faults(findings(sources), exceptions())]
    sys.stdout.writelines(f"{fault}\n" for fault in faults)
    count = sum(len(source.manifests) for source in sources)
    sys.stdout.write(f"manifests: {count} objects of {len(sources)} sources, {len(faults)} faults\n")
    return int(bool(faults))


def chart() -> Iterator[Source]:
    """The release with the chart's own values, with every option on, and for two namespaces only."""
    tool = [str(ROOT / "hack" / "local-cluster" / "local-cluster"), "tool", "helm"]
    helm = _output(tool).strip()
    for name, values in (("chart", ()), ("chart with everything", EVERYTHING), ("chart of two namespaces", NAMED)):
        arguments = [f"--set={value}" for value in values]
        command = [helm, "template", "stage2", str(ROOT / "charts" / "stage2"), "--namespace", "stage2-system"]
        arguments.append("--set=image.repository=registry.example/team")
        yield Source(name, _output([*command, *arguments]))


def rendered() -> Iterator[Source]:
    """What becomes of each job of examples/."""
    for path in sorted((ROOT / "examples").glob("job-*.yaml")):
        text = _output([sys.executable, "-m", "stage2_cli", "render", str(path)])
        made = [job for one in yaml.safe_load_all(text) for job in _as_jobs(one)]
        yield Source(f"render {path.name}", yaml.safe_dump_all(made))


def _as_jobs(manifest: Manifest) -> list[Manifest]:
    """Return the Jobs that a JobSet makes, which is all that the two readers know of it; another manifest as it is."""
    if manifest["kind"] != "JobSet":
        return [manifest]
    return [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {**manifest["metadata"], "name": f"{manifest['metadata']['name']}-{one['name']}"},
            "spec": one["template"]["spec"],
        }
        for one in manifest["spec"]["replicatedJobs"]
    ]


def schema_faults(sources: Sequence[Source]) -> Iterator[str]:
    """Yield a line for each object that is not of its kind's schema."""
    for source in sources:
        for manifest in source.manifests:
            if manifest["kind"] in WITHOUT_SCHEMA:
                continue
            name = f"{source.name}: {manifest['kind']}/{manifest['metadata']['name']}"
            try:
                kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
            except kubernetes_validate.ValidationError as error:
                yield f"{name}: {'.'.join(map(str, error.path))}: {error.message}"


def findings(sources: Sequence[Source]) -> Iterator[Finding]:
    """What kube-score thinks of the sources, each judged as a whole: policies and pods belong together."""
    for source in sources:
        command = [*KUBE_SCORE, "--kubernetes-version", f"v{KUBERNETES}", "--output-format", "json", "-"]
        done = subprocess.run(command, input=source.text, stdout=subprocess.PIPE, text=True, check=False)
        for judged in json.loads(done.stdout):
            for check in judged["checks"]:
                if not check["skipped"] and check["grade"] < GRADE_OK:
                    comments = "; ".join(f"{one['path']}: {one['summary']}" for one in check["comments"] or ())
                    text = f"{source.name}: {judged['object_name']}: {check['check']['id']}: {comments}"
                    yield Finding(check["check"]["id"], judged["type_meta"]["kind"], source.name, text)


def exceptions(path: Path = EXCEPTIONS) -> list[Allowed]:
    """Read the exceptions, each with its reason."""
    return [Allowed(**one) for one in yaml.safe_load(path.read_text(encoding="utf-8"))]


def practice_faults(found: Iterator[Finding], allowed: Sequence[Allowed]) -> Iterator[str]:
    """Yield a line for each finding without an exception, and for each exception without a finding."""
    used: set[Allowed] = set()
    for finding in found:
        covering = [one for one in allowed if finding.is_covered(one)]
        used.update(covering)
        if not covering:
            yield finding.text
    for one in allowed:
        if one not in used:
            yield f"{EXCEPTIONS.name}: nothing needs the exception from {one.check} for {one.kind} of {one.where!r}"


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
