"""A model by its name: fetched once from a hub, taken from the cache without one, and refused in a sentence."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.http_server import QuietHandler, serving

TINY = Path(__file__).parents[4] / "examples" / "tiny-qwen3-vl"
NAME = "someone/tiny-qwen3-vl"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
UNWANTED = "training_args.bin"
NOWHERE = "http://127.0.0.1:9"  # the port of a service that no machine has

FETCH = """
import sys
from stage2_api.errors import ConfigError
from stage2_trainer.data.model_files import fetched_model
try:
    print(fetched_model(sys.argv[1]))
except ConfigError as error:
    sys.exit(str(error))
"""


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Hub(QuietHandler):
    """A hub with one repository, as much of its interface as a download takes."""

    asked: Counter[str]

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{NAME}/tree/"):
            listed = [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": digest(file.read_bytes())}
                      for file in sorted(TINY.iterdir())]  # fmt: skip
            unwanted = {"type": "file", "path": UNWANTED, "size": 1, "oid": "1"}
            self._send(json.dumps([*listed, unwanted]).encode(), "application/json", body=body)
            return
        if path.startswith(f"/api/models/{NAME}"):
            files = [{"rfilename": file.name} for file in sorted(TINY.iterdir())] + [{"rfilename": UNWANTED}]
            document = {"id": NAME, "modelId": NAME, "sha": COMMIT, "private": False, "siblings": files, "tags": [],
                        "downloads": 0, "likes": 0}  # fmt: skip
            self._send(json.dumps(document).encode(), "application/json", body=body)
            return
        file = TINY / path.rpartition("/")[2]
        if not path.startswith(f"/{NAME}/resolve/") or not file.is_file():
            self.send_error(404)
            return
        if body:
            self.asked[file.name] += 1
        self._send(file.read_bytes(), "application/octet-stream", body=body)

    def _send(self, content: bytes, kind: str, *, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{digest(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def hub():
    asked: Counter[str] = Counter()
    with serving(type("OneHub", (Hub,), {"asked": asked})) as server:
        yield server.url, asked


@pytest.fixture
def fetch(tmp_path):
    """Fetch in a process of its own, for the hub's address is read once."""

    def run(name, endpoint):
        environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": endpoint}
        environment.pop("HF_HUB_OFFLINE", None)
        return subprocess.run(
            [sys.executable, "-c", FETCH, name], env=environment, capture_output=True, text=True, check=False
        )

    return run


def test_model_is_downloaded_once_and_then_found_offline(fetch, hub):
    endpoint, asked = hub
    first = fetch(NAME, endpoint)
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    assert folder.name == COMMIT
    assert (folder / "model.safetensors").read_bytes() == (TINY / "model.safetensors").read_bytes()
    assert not (folder / UNWANTED).exists()
    assert fetch(NAME, endpoint).stdout == first.stdout
    assert set(asked.values()) == {1}
    later = fetch(NAME, NOWHERE)
    assert later.stdout == first.stdout, later.stderr


def test_incomplete_cached_model_is_refused_offline(fetch, hub):
    endpoint, _ = hub
    folder = Path(fetch(NAME, endpoint).stdout.strip())
    (folder / "model.safetensors").unlink()
    refused = fetch(NAME, NOWHERE)
    assert refused.returncode == 1
    assert "model.model" in refused.stderr
    assert NAME in refused.stderr


@pytest.mark.parametrize("name", ["someone/other", "nobody/nothing"])
def test_unknown_model_name_is_refused_with_advice(fetch, hub, name):
    refused = fetch(name, hub[0])
    assert refused.returncode == 1
    assert "no model on a hub that can be reached" in refused.stderr
    assert "HF_HOME" in refused.stderr


def test_model_path_is_used_unchanged(fetch):
    assert fetch(str(TINY), NOWHERE).stdout.strip() == str(TINY)
    assert fetch("/models/not/there", NOWHERE).stdout.strip() == "/models/not/there"
