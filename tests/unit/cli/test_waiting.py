"""`stage2 wait`: it ends when all servers answer, and no sooner."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from stage2_api.pod.layout import TOKEN_FILE_VARIABLE
from stage2_cli.learn import wait_for_servers
from stage2_trainer.wire import client


class Loading(BaseHTTPRequestHandler):
    """A server that answers /health on the third time."""

    asked = 0

    def do_GET(self) -> None:
        type(self).asked += self.path == "/health"
        self.send_response(200 if self.asked > 2 else 503)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    served = ThreadingHTTPServer(("127.0.0.1", 0), Loading)
    thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{served.server_port}"
    served.shutdown()
    served.server_close()
    thread.join()


def test_the_wait_ends_when_the_servers_answer(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("t0ken")
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tmp_path / "token"))
    monkeypatch.setattr(client, "POLL_INTERVAL_S", 0.01)
    server = {"servers": [{"base_url": url, "group_port": 51216}]}
    vllm = {"mode": "server", "max_model_len": 1024, "server": server}
    custom = {"train_jsonl": "x.jsonl", "extra": {"rollout_matching": {"vllm": vllm}}}
    raw = {"model": {"model": "x"}, "training": {"output_dir": "out"}, "custom": custom}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    wait_for_servers(tmp_path / "run.yaml")
    assert Loading.asked == 3
