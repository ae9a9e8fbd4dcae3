"""hack/local-cluster is a real cluster: devices are pinned, names resolve, Services carry, pods reach the API."""

import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hack.lock_images import LOCKS
from packaging.utils import canonicalize_name

from local_cluster import buildah, images, locks
from local_cluster.containerd import ctr
from local_cluster.layout import HUB, SERVICE_CIDR, ClusterError, Layout
from tests.support import registry
from tests.support.clusters import ON_A_KUBELET
from tests.support.tools import tool

Kubectl = Callable[..., str]
WEB_SERVER = ["python3", "-m", "http.server", "8000", "--directory", "/tmp"]

CALL_API = """
import ssl, sys, urllib.error, urllib.request
account = "/var/run/secrets/kubernetes.io/serviceaccount/"
token = open(account + "token").read()
context = ssl.create_default_context(cafile=account + "ca.crt")
url = "https://kubernetes.default.svc" + sys.argv[1]
request = urllib.request.Request(url, headers={"Authorization": "Bearer " + token})
try:
    print(urllib.request.urlopen(request, context=context, timeout=10).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""

CALL_SERVICE = """
import sys, time, urllib.error, urllib.request
deadline = time.monotonic() + 60
while True:
    try:
        print(urllib.request.urlopen(sys.argv[1], timeout=10).status)
        break
    except urllib.error.URLError as error:
        if isinstance(error, urllib.error.HTTPError) or time.monotonic() > deadline:
            raise
        time.sleep(0.2)
"""
"""kube-proxy carries a Service some moments after its pod is ready."""


@pytest.fixture(scope="module")
def kubectl(on_local_cluster: Path) -> Iterator[Kubectl]:
    """kubectl in a namespace of this module's own."""
    namespace = f"local-cluster-{uuid.uuid4().hex[:6]}"

    def run(*arguments: str, stdin: str | None = None) -> str:
        command = ["kubectl", f"--kubeconfig={on_local_cluster}", f"--namespace={namespace}", *arguments]
        return subprocess.run(command, check=True, text=True, input=stdin, stdout=subprocess.PIPE).stdout

    run("create", "namespace", namespace)
    run("wait", "--for=create", "serviceaccount/default", "--timeout=600s")
    yield run
    run("delete", "namespace", namespace)


@pytest.fixture(scope="module")
def pod(kubectl: Kubectl, controller_image: str) -> str:
    """A running pod of two containers that ask for one GPU each, behind the Service `web`."""
    kubectl("apply", "--filename=-", stdin=json.dumps(_two_containers("two", controller_image)))
    kubectl("expose", "pod", "two", "--name=web", "--port=80", "--target-port=8000")
    kubectl("wait", "--for=condition=Ready", "pod/two", "--timeout=600s")
    return "two"


def _two_containers(name: str, image: str) -> dict[str, Any]:
    first = {
        "name": "first",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": WEB_SERVER,
        "readinessProbe": {"httpGet": {"port": 8000}, "periodSeconds": 1},
        "resources": {"limits": {"nvidia.com/gpu": 1}},
    }
    second = {**first, "name": "second", "command": ["sleep", "infinity"]}
    del second["readinessProbe"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"containers": [first, second], "terminationGracePeriodSeconds": 0, "affinity": ON_A_KUBELET},
    }


def _python(kubectl: Kubectl, pod: str, script: str, *arguments: str) -> str:
    return kubectl("exec", pod, "--container=second", "--", "python3", "-c", script, *arguments).strip()


def test_image_has_sbom_with_licences_and_locked_versions(kubectl: Kubectl, pod: str) -> None:
    listed = json.loads(kubectl("exec", pod, "--container=second", "--", "cat", "/opt/stage2/sbom.cdx.json"))[
        "components"
    ]
    (lock,) = (one for one in LOCKS if one.name == "controller")
    locked = re.findall(r"^([a-z0-9._-]+)==(\S+)", lock.path.read_text(encoding="utf-8"), re.MULTILINE)
    chosen = {canonicalize_name(one["name"]): one["version"] for one in listed}
    assert {name: chosen.get(canonicalize_name(name)) for name, _ in locked} == dict(locked)
    with_licence = [one for one in listed if one.get("licenses")]
    assert len(with_licence) > len(listed) * 0.9


def test_each_container_is_pinned_to_own_gpu(kubectl: Kubectl, pod: str) -> None:
    devices = [
        kubectl("exec", pod, f"--container={container}", "--", "printenv", "NVIDIA_VISIBLE_DEVICES").strip()
        for container in ("first", "second")
    ]
    assert len(set(devices)) == 2
    assert set(devices) <= {"GPU-0", "GPU-1", "GPU-2", "GPU-3"}


def test_fifth_gpu_is_refused_by_scheduler(kubectl: Kubectl, pod: str, controller_image: str) -> None:
    greedy = _two_containers("greedy", controller_image)
    greedy["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 2}}
    kubectl("apply", "--filename=-", stdin=json.dumps(greedy))
    kubectl("wait", "--for=condition=PodScheduled=False", "pod/greedy", "--timeout=600s")
    reason = kubectl("get", "pod", "greedy", "--output=jsonpath={.status.conditions[0].message}")
    assert "Insufficient nvidia.com/gpu" in reason


def test_service_names_resolve_to_cluster_ip(kubectl: Kubectl, pod: str) -> None:
    address = kubectl("get", "service", "web", "--output=jsonpath={.spec.clusterIP}")
    assert _python(kubectl, pod, "import socket; print(socket.gethostbyname('web'))") == address


def test_pod_reaches_itself_through_its_service(kubectl: Kubectl, pod: str) -> None:
    assert _python(kubectl, pod, CALL_SERVICE, "http://web/") == "200"


def test_unassigned_service_address_is_unreachable(kubectl: Kubectl, pod: str) -> None:
    services = kubectl("get", "services", "--all-namespaces", "--output=jsonpath={.items[*].spec.clusterIP}")
    addresses = ipaddress.ip_network(SERVICE_CIDR).hosts()
    free = next(str(address) for address in addresses if str(address) not in services.split())
    script = f"import socket\ntry: socket.create_connection(('{free}', 80), timeout=10)\nexcept OSError as e: print(e)"
    assert "Network is unreachable" in _python(kubectl, pod, script)


def test_service_account_token_grants_only_what_rbac_allows(kubectl: Kubectl, pod: str) -> None:
    assert _python(kubectl, pod, CALL_API, "/api") == "200"
    assert _python(kubectl, pod, CALL_API, "/api/v1/secrets") == "403"


def test_container_log_is_readable(kubectl: Kubectl, pod: str) -> None:
    _python(kubectl, pod, CALL_SERVICE, "http://web/?marked")
    assert "GET /?marked" in kubectl("logs", pod, "--container=first")


@pytest.fixture
def two_versions(on_local_cluster: Path) -> Iterator[tuple[Layout, list[str]]]:
    """Two images that share a layer, in buildah's storage and not in the cluster, removed afterwards."""
    layout, name = Layout.default(), f"{HUB}stage2/versions-{uuid.uuid4().hex[:6]}"
    references = [f"{name}:first", f"{name}:second"]
    with locks.held(layout, "build"):
        for below, reference in zip(["scratch", references[0]], references, strict=True):
            with buildah.working_container(layout, below) as container:
                buildah.call(layout, "copy", container, Path(__file__), f"/{reference.rpartition(':')[2]}")
                buildah.call(layout, "commit", container, reference)
    yield layout, references
    ctr(layout, "images", "remove", "--sync", *references)
    with locks.held(layout, "build"):
        buildah.call(layout, "rmi", *references)


def test_image_loads_while_another_image_sharing_its_layers_is_removed(
    two_versions: tuple[Layout, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, (first, second) = two_versions
    images.load_built(layout, first)
    export = buildah.export

    def export_while_the_first_goes(layout: Layout, reference: str, folder: Path) -> None:
        names = [line.split() for line in ctr(layout, "images", "list").splitlines()[1:]]
        digest = next(digest for name, _, digest, *_ in names if name == first)
        ctr(layout, "images", "remove", "--sync", *(name for name, _, other, *_ in names if other == digest))
        export(layout, reference, folder)

    monkeypatch.setattr(buildah, "export", export_while_the_first_goes)
    images.load_built(layout, second)
    assert second in ctr(layout, "images", "list", "--quiet").splitlines()


PUSH = """
import sys
from local_cluster import buildah
from local_cluster.layout import Layout
print(buildah.push(Layout.default(), *sys.argv[1:], plain_http=True))
"""


def test_pushing_needs_no_disk_but_that_of_cache(two_versions: tuple[Layout, list[str]], tmp_path: Path) -> None:
    layout, (first, _) = two_versions
    pid, port = registry.start(tool("docker-registry"), tmp_path / "registry")
    try:
        target, none = f"127.0.0.1:{port}/stage2/versions:first", "127.0.0.1:1/stage2/versions:first"
        pushed, refused = (_push_where_var_tmp_is_full(first, to) for to in (target, none))
        assert re.fullmatch(rf"127.0.0.1:{port}/stage2/versions@sha256:[0-9a-f]{{64}}\n", pushed.stdout), pushed.stderr
        assert refused.returncode != 0
        assert "connection refused" in refused.stderr
        assert [path for path in (layout.cache / "buildah" / "tmp").iterdir() if path.name.startswith("push-")] == []
    finally:
        registry.stop(pid, tmp_path / "registry")


def test_push_without_room_does_not_start(
    two_versions: tuple[Layout, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, (first, _) = two_versions
    free = shutil.disk_usage("/")._replace(free=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(ClusterError, match=rf"0.0 GB free; pushing {first} needs"):
        buildah.push(layout, first, "127.0.0.1:1/stage2/versions:first", plain_http=True)


def _push_where_var_tmp_is_full(reference: str, target: str) -> subprocess.CompletedProcess[str]:
    with_full_disk = 'mount -t tmpfs -o size=4k,nr_inodes=1 tmpfs /var/tmp && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", with_full_disk, "sh", sys.executable, "-c", PUSH, reference, target]
    environment = {**os.environ, "PYTHONPATH": str(Path(buildah.__file__).parents[1])}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
