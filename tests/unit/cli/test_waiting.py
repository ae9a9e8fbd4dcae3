"""`stage2 wait`: it ends when all servers answer, and no sooner."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from stage2_api.pod.layout import TOKEN_FILE_VARIABLE
from stage2_cli.learn import wait_for_servers
from stage2_trainer.wire import client
from tests.http_server import QuietHandler, serving


class Loading(QuietHandler):
    """A server that answers /health on the third time."""

    asked = 0

    def do_GET(self) -> None:
        type(self).asked += self.path == "/health"
        self.send_response(200 if self.asked > 2 else 503)
        self.end_headers()


@pytest.fixture
def url() -> Iterator[str]:
    with serving(Loading) as server:
        yield server.url


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
