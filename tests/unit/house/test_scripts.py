"""Scripts stop when a step fails, and reach no cluster but the one that they have chosen and named."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml

from tests.support import tools
from tests.support.tools import LOCAL_CLUSTER

pytestmark = pytest.mark.in_turns(3, apart=True)

ROOT = Path(__file__).parents[3]
PATIENCE_S = 120
tool = functools.cache(tools.tool)
SHELL = ("hack/demo", "hack/demo-cluster", "hack/choose-cluster", "hack/setup", "hack/gpu-hour", "hack/audit")
SHELL += ("hack/local-cluster/local-cluster", "bench/run", ".ci/run")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@dataclass
class Stranger:
    """An API server that no script was told to use: it counts what reaches it, and refuses it."""

    printed: Path
    requests: list[str] = field(default_factory=list)
    printed_before: str | None = None
    """What the script had printed when its first request came."""

    def __enter__(self) -> Stranger:
        stranger = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.startswith("/version"):  # helm asks it first, and some builds of kubectl whatever they do
                    body = b'{"major": "1", "minor": "34", "gitVersion": "v1.34.4"}'
                    self.send_response(200)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                    return
                if not stranger.requests:
                    stranger.printed_before = stranger.printed.read_text() if stranger.printed.exists() else ""
                stranger.requests.append(f"{self.command} {self.path}")
                self.send_error(403)

            do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"


def kubeconfig(file: Path, current: str, **servers: str) -> Path:
    """Write a kubeconfig with a context for each server."""
    file.parent.mkdir(parents=True, exist_ok=True)
    clusters = [{"name": name, "cluster": {"server": url}} for name, url in servers.items()]
    contexts = [{"name": name, "context": {"cluster": name, "user": "u"}} for name in servers]
    users = [{"name": "u", "user": {"token": "t"}}]
    body = {"apiVersion": "v1", "kind": "Config", "clusters": clusters, "contexts": contexts, "users": users}
    file.write_text(json.dumps({**body, "current-context": current}))
    return file


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[Stranger]:
    """The cluster of ~/.kube/config."""
    with Stranger(tmp_path / "printed") as made:
        kubeconfig(tmp_path / "home" / ".kube" / "config", "production", production=made.url)
        yield made


@dataclass
class Checkout:
    """A copy of the scripts, with programs of a test on PATH in place of those of the machine."""

    folder: Path

    def program(self, name: str, text: str) -> None:
        """Put a program on PATH."""
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)

    def local_cluster(self, text: str) -> None:
        """Replace hack/local-cluster, but for the paths of its tools."""
        path = self.folder / "hack" / "local-cluster" / "local-cluster"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/usr/bin/env bash\n[ "$1" = tool ] && exec {LOCAL_CLUSTER} "$@"\n{text}\n')
        path.chmod(0o755)

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a script with its output in one file, as a person redirects it."""
        printed = self.folder / "printed"
        paths = [self.folder / "bin", Path(sys.executable).parent, os.environ["PATH"]]
        base = {key: value for key, value in os.environ.items() if key != "KUBECONFIG"}
        base |= {"HOME": str(self.folder / "home"), "PATH": os.pathsep.join(map(str, paths))}
        base["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        with printed.open("w") as output:
            done = subprocess.run(
                command, cwd=self.folder, env={**base, **environment}, stdout=output, stderr=output, text=True,
                timeout=PATIENCE_S, check=False,
            )  # fmt: skip
        return subprocess.CompletedProcess(command, done.returncode, printed.read_text(), "")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """Scripts that find no container engine, and a local cluster that does not start."""
    made = Checkout(tmp_path)
    for folder in ("hack", "examples"):
        (tmp_path / folder).mkdir()
    for name in ("hack/demo-cluster", "hack/choose-cluster", "examples/job-3v1-tiny.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    made.program("docker", "exit 1")
    made.program("kind", "exit 1")
    made.program("kubectl", f'exec {tool("kubectl")} "$@"')
    made.program("helm", f'exec {tool("helm")} "$@"')
    made.local_cluster("exit 1")
    return made


UP = 'up) echo "export KUBECONFIG=$PWD/missing" ;;'
LOCAL = {
    "up fails": "case $1 in up) exit 3 ;; esac",
    "up prints nothing": "exit 0",
    "up names a file that is not there": f"case $1 in {UP} esac",
    "build fails": f"case $1 in {UP} build) exit 3 ;; esac",
}
KIND = {
    "clusters cannot be listed": "exit 3",
    "no cluster can be created": 'case "$1 $2" in "get clusters") ;; *) exit 3 ;; esac',
    "no kubeconfig is printed": 'case "$1 $2" in "get clusters") echo stage2-demo ;; *) exit 3 ;; esac',
}


@pytest.mark.parametrize("fails", LOCAL)
def test_demo_stops_when_local_cluster_fails(checkout: Checkout, stranger: Stranger, fails: str) -> None:
    checkout.local_cluster(LOCAL[fails])
    done = checkout.run("hack/demo-cluster", "out")
    assert (stranger.requests, done.returncode != 0) == ([], True), done.stdout


@pytest.mark.parametrize("fails", KIND)
def test_demo_stops_when_kind_fails(checkout: Checkout, stranger: Stranger, fails: str) -> None:
    checkout.program("docker", "exit 0")
    checkout.program("kind", KIND[fails])
    done = checkout.run("hack/demo-cluster", "out")
    assert (stranger.requests, done.returncode != 0) == ([], True), done.stdout


def test_demo_prints_context_and_server_before_contacting_them(checkout: Checkout, stranger: Stranger) -> None:
    named = kubeconfig(checkout.folder / "named", "team", team=stranger.url, other="http://127.0.0.1:1")
    done = checkout.run("hack/demo-cluster", "out", KUBECONFIG=str(named))
    assert done.returncode != 0
    assert stranger.requests
    assert f"context team, server {stranger.url}" in (stranger.printed_before or "")


def test_demo_stays_on_its_cluster_when_kubeconfig_context_changes(
    checkout: Checkout, stranger: Stranger, tmp_path: Path
) -> None:
    with Stranger(tmp_path / "printed") as chosen:
        named = kubeconfig(checkout.folder / "named", "mine", mine=chosen.url, production=stranger.url)
        switch = f"{tool('kubectl')} --kubeconfig={named} config use-context production"
        checkout.program("helm", f'{switch} >/dev/null && [ "$1" = list ] || exit 0')
        checkout.run("hack/demo-cluster", "out", KUBECONFIG=str(named))
        assert (stranger.requests, chosen.requests != []) == ([], True)


@pytest.mark.parametrize("variable", ["HELM_KUBECONTEXT", "HELM_KUBEAPISERVER", "HELM_NAMESPACE", "HELM_KUBETOKEN"])
def test_demo_ignores_helm_environment_variables_for_cluster(
    checkout: Checkout, stranger: Stranger, tmp_path: Path, variable: str
) -> None:
    """Helm goes by these before it goes by a kubeconfig."""
    seen = checkout.folder / "seen"
    checkout.program("helm", f'env | grep ^HELM_ >>{seen}; exec {tool("helm")} "$@"')
    with Stranger(tmp_path / "printed") as chosen:
        named = kubeconfig(checkout.folder / "named", "mine", mine=chosen.url, production=stranger.url)
        value = stranger.url if variable == "HELM_KUBEAPISERVER" else "production"
        checkout.run("hack/demo-cluster", "out", KUBECONFIG=str(named), HELM_DEBUG="false", **{variable: value})
        assert (stranger.requests, chosen.requests != []) == ([], True)
    assert set(seen.read_text().splitlines()) == {"HELM_DEBUG=false"}


ALWAYS_FAILS = """case "$*" in
  "config "*|*" config "*) exec REAL "$@" ;;
  *"get nodes"*) echo 4 ;;
  *"-o jsonpath={.status.phase}"*) echo "the server is gone" >&2; exit 1 ;;
  *--watch*) exec sleep 60 ;;
esac"""


def test_demo_stops_when_cluster_becomes_unreachable(checkout: Checkout, stranger: Stranger) -> None:
    named = kubeconfig(checkout.folder / "named", "mine", mine=stranger.url)
    checkout.program("helm", "exit 0")
    checkout.program("kubectl", ALWAYS_FAILS.replace("REAL", tool("kubectl")))
    done = checkout.run("hack/demo-cluster", "out", KUBECONFIG=str(named))
    assert (done.returncode, "the server is gone" in done.stdout) == (1, True)


def test_demo_keeps_existing_job_of_same_name_on_foreign_cluster(checkout: Checkout, stranger: Stranger) -> None:
    """Only a cluster that the script has made itself is its own to clear."""
    named = kubeconfig(checkout.folder / "named", "team", team=stranger.url)
    calls = checkout.folder / "calls"
    checkout.program("helm", f'echo "helm $*" >>{calls}; [ "$1" != list ] || echo stage2')
    exists = f'*create*) echo "kubectl $*" >>{calls}; echo "Error from server (AlreadyExists)" >&2; exit 1 ;;'
    known = ALWAYS_FAILS.replace("REAL", tool("kubectl")).replace("esac", f"  {exists}\nesac")
    checkout.program("kubectl", f'echo "kubectl $*" >>{calls}\n{known}')
    done = checkout.run("hack/demo-cluster", "out", KUBECONFIG=str(named))
    words = calls.read_text()
    assert (done.returncode, re.findall("delete|upgrade|install|--force|apply", words)) == (1, []), words


@pytest.mark.parametrize(
    "command",
    [
        ("hack/choose-cluster", "FILE"),
        (sys.executable, "-m", "tests.red_team"),
        (sys.executable, "-m", "bench.operator", "--jobs", "1"),
        (sys.executable, "-m", "bench.placement", "--rounds", "1"),
        (sys.executable, "-m", "bench.repairs", "--repairs", "1"),
    ],
    ids=lambda command: command[-1],
)
@pytest.mark.parametrize("value", [None, "", "missing"], ids=["unset", "empty", "a missing file"])
def test_script_without_chosen_cluster_fails_with_hint(
    command: Sequence[str], value: str | None, checkout: Checkout, stranger: Stranger
) -> None:
    chosen = {} if value is None else {"KUBECONFIG": value}
    words = [str(checkout.folder / "file") if word == "FILE" else word for word in command]
    done = checkout.run("env", "-C", str(ROOT), *words, **chosen)
    assert (done.returncode, stranger.requests) == (64, [])
    assert done.stdout.startswith("KUBECONFIG: ")
    assert "export KUBECONFIG=FILE" in done.stdout


def test_chosen_kubeconfig_holds_single_cluster_and_is_private(checkout: Checkout) -> None:
    first = kubeconfig(checkout.folder / "a" / "first", "mine", other="https://other:6443")
    second = kubeconfig(checkout.folder / "b" / "second", "", mine="https://mine:6443")
    done = checkout.run("hack/choose-cluster", "file", KUBECONFIG=f"{first}:{second}")
    assert done.stdout == "cluster: context mine, server https://mine:6443\n"
    written = yaml.safe_load((checkout.folder / "file").read_text())
    assert [one["cluster"]["server"] for one in written["clusters"]] == ["https://mine:6443"]
    assert (checkout.folder / "file").stat().st_mode & 0o077 == 0


USES_IT = "def test_it(kubeconfig):\n    assert kubeconfig.read_text().count('server') == 1\n"


@pytest.mark.parametrize("processes", ["0", "2"])
def test_tests_print_cluster_they_use(checkout: Checkout, processes: str) -> None:
    named = kubeconfig(checkout.folder / "named", "mine", mine="https://mine:6443", other="https://other:6443")
    (checkout.folder / "test_it.py").write_text(USES_IT)
    (checkout.folder / "conftest.py").write_text('pytest_plugins = ["tests.support.clusters"]\n')
    words = ("-q", "-p", "no:cacheprovider", "-n", processes, "--rootdir=.", "test_it.py")
    done = checkout.run(sys.executable, "-m", "pytest", *words, KUBECONFIG=str(named), PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("cluster: context mine, server https://mine:6443\n") == 1


@pytest.mark.parametrize("script", SHELL)
def test_shell_script_stops_at_first_failure(script: str) -> None:
    text = (ROOT / script).read_text(encoding="utf-8")
    assert re.search(r"^set -euo pipefail$", text, re.MULTILINE)
    assert re.findall(r"\beval\b|^\s*(?:export|local|readonly|declare)\s+\w+=\"?\$\(|<\(", text, re.MULTILINE) == [], (
        "each hides the failure of a command: assign its output to a variable first"
    )


def test_shell_scripts_are_all_listed() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = [ROOT / name for name in tracked]
    shell = {str(file.relative_to(ROOT)) for file in files if file.is_file() and _first_line(file).endswith(b"sh")}
    assert shell == set(SHELL)


def _first_line(file: Path) -> bytes:
    with file.open("rb") as opened:
        line = opened.readline(200).strip()
    return line if line.startswith(b"#!") else b""


def test_make_recipe_stops_at_first_failure() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^\.SHELLFLAGS := -euo pipefail -c$", text, re.MULTILINE)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_step_stops_at_first_failure(workflow: Path) -> None:
    """GitHub runs a step without a shell of its own by `bash -e`, which overlooks all but the last of a pipe."""
    assert yaml.safe_load(workflow.read_text(encoding="utf-8"))["defaults"] == {"run": {"shell": "bash"}}
