"""A second implementation of an API server, of what `stage2.Job` asks for: jobs, events, pods and logs.

`client_contract.py` holds it and the real one to the same answers.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.http_server import QuietHandler, serving
from tests.unit.api.wrong_jobs import merge_patch
from tests.unit.controller import builders as b

Object = dict[str, Any]
JOBS = re.compile(r"/apis/stage2\.dev/v1alpha1(?:/namespaces/([^/]+))?/rolloutmatchingjobs(?:/([^/]+))?")
CORE = re.compile(r"/api/v1/namespaces/([^/]+)/(pods|events)(?:/([^/]+)/log)?")


@dataclass
class JobApi:
    """Jobs by namespace and name; pods and events of all; the parts of a log, by pod and container."""

    kubeconfig: str = ""
    jobs: dict[tuple[str, str], Object] = field(default_factory=dict)
    pods: list[Object] = field(default_factory=list)
    events: list[Object] = field(default_factory=list)
    logs: dict[tuple[str, str], list[bytes]] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    sentence: str = "etcd is not there"
    failures: list[int] = field(default_factory=list)  # statuses of the next answers
    released: threading.Event = field(default_factory=threading.Event)  # the last part of each followed log

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Object]:
        if self.failures:
            return _refusal(self.failures.pop(0), "InternalError", self.sentence)
        if found := JOBS.fullmatch(path):
            namespace, name = (unquote(one) if one else None for one in found.groups())
            return self._job(method, namespace, name, query, body)
        if found := CORE.fullmatch(path):
            items = self.pods if found[2] == "pods" else self.events
            return 200, {"items": items, "metadata": {}}
        return _refusal(404, "NotFound", "the server could not find the requested resource")

    def _job(self, method: str, namespace: Any, name: Any, query: dict[str, str], body: Any) -> tuple[int, Object]:
        if name is None and method == "GET":
            items = [job for (space, _), job in self.jobs.items() if namespace in (None, space)]
            first = int(query.get("continue", 0))
            rest = {"continue": str(first + 1)} if len(items) > first + 1 else {}
            return 200, {"items": items[first : first + 1], "metadata": rest}  # pages of one
        if name is None:
            return 201, self.put(namespace, body["metadata"]["generateName"] + "abcde", body)
        there = self.jobs.get((namespace, name))
        if method == "PATCH" and "force" in query:
            return 200, self.put(namespace, name, body)
        if there is None:
            return _refusal(404, "NotFound", f'rolloutmatchingjobs.stage2.dev "{name}" not found')
        if method == "DELETE":
            del self.jobs[namespace, name]
            return 200, {"kind": "Status", "status": "Success"}
        return 200, self.put(namespace, name, body) if method == "PATCH" else there

    def put(self, namespace: str, name: str, change: Object) -> Object:
        """Create a job, or merge into it."""
        there = self.jobs.get((namespace, name), {"metadata": {"generation": 0, "uid": f"uid-{len(self.jobs)}"}})
        job = merge_patch(there, change)
        changed = job.get("spec") != there.get("spec")
        job["metadata"] |= {"namespace": namespace, "name": name}
        job["metadata"]["generation"] = there["metadata"]["generation"] + changed
        self.jobs[namespace, name] = job
        return job

    def report(self, name: str, namespace: str = "team-a", **status: Any) -> None:
        """Write a status, as the controller does."""
        job = self.jobs[namespace, name]
        job["status"] = {"observedGeneration": job["metadata"]["generation"], **status}


def _refusal(status: int, reason: str, message: str) -> tuple[int, Object]:
    return status, {"kind": "Status", "status": "Failure", "reason": reason, "message": message, "code": status}


@contextmanager
def api_server(folder: Path) -> Iterator[JobApi]:
    """Serve such an API until the block ends."""
    api = JobApi()

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            url = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
            api.requests.append((self.command, url.path, query))
            api.headers.append(dict(self.headers))
            if (found := CORE.fullmatch(url.path)) and found[3]:
                if (log := api.logs.get((found[3], query["container"]))) is None:
                    self._document(404, {"message": f'pods "{found[3]}" not found'})
                else:
                    self._log(log, follow="follow" in query)
            else:
                self._document(*api.answer(self.command, url.path, query, body))

        def _document(self, status: int, document: Object) -> None:
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _log(self, parts: list[bytes], *, follow: bool) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for number, part in enumerate(parts):
                if follow and number == len(parts) - 1:
                    api.released.wait(60)
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = do_PATCH = do_DELETE = _answer

    with serving(Handler) as server:
        api.kubeconfig = b.kubeconfig(folder / "kubeconfig", server.url)
        try:
            yield api
        finally:
            api.released.set()
