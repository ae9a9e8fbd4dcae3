"""`stage2 learn --restarts` and `stage2 wait`: restarts after failures, and the wait for servers."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from stage2_api.pod.layout import RESTARTS_VARIABLE, TERMINATION_LOG_VARIABLE, TOKEN_FILE_VARIABLE
from stage2_cli.learn import Restarts, learn_with_restarts, wait_for_servers
from stage2_trainer.wire import client
from tests.support.http_server import QuietHandler, serving
from tests.support.patience import Patience
from tests.unit.api.wrong_jobs import merge_patch
from tests.unit.cli.test_light_start import MATCHING


class Loading(QuietHandler):
    """A server that answers /health on the third time."""

    asked = 0

    def do_GET(self) -> None:
        type(self).asked += self.path == "/health"
        self.send_response(200 if self.asked > 2 else 503)
        self.end_headers()
        if self.path == "/weight_info":
            self.wfile.write(b'{"weight_version": "default"}')


@pytest.fixture
def url() -> Iterator[str]:
    with serving(Loading) as server:
        yield server.url


def test_wait_ends_when_servers_answer(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("t0ken")
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tmp_path / "token"))
    monkeypatch.setattr(client, "POLL_INTERVAL_S", 0.01)
    vllm = {"server": {"servers": [{"base_url": url, "group_port": 51216}]}}
    custom = {"train_jsonl": "x.jsonl", "extra": {"rollout_matching": {"vllm": vllm}}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(merge_patch(MATCHING, {"custom": custom})))
    wait_for_servers(tmp_path / "run.yaml")
    assert Loading.asked == 3


# Writes a line per attempt with its arguments and the termination log, then exits with the attempt's code.
TRY = f"""
import os, sys
words = open(os.environ["{TERMINATION_LOG_VARIABLE}"]).read()
attempt = int(os.environ["{RESTARTS_VARIABLE}"])
print(attempt, *sys.argv[2:], repr(words), file=open(os.environ["TRIES"], "a"))
open(os.environ["{TERMINATION_LOG_VARIABLE}"], "w").write("failed")
codes = [int(code) for code in sys.argv[1].split(",")]
sys.exit(codes[attempt])
"""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The signal handlers of the tests' own process, put back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "termination").write_text("of somebody else")
    monkeypatch.setenv(TERMINATION_LOG_VARIABLE, str(tmp_path / "termination"))
    monkeypatch.setenv("TRIES", str(tmp_path / "tries"))
    return tmp_path / "tries"


@pytest.mark.parametrize(
    ("codes", "restarts", "code", "made"),
    [("75,1,0", 3, 0, 3), ("75,64", 3, 64, 2), ("69", 3, 69, 1), ("1,75,75", 2, 69, 3)],
    ids=["until it succeeds", "never after a configuration error", "never without a package", "as often as it may be"],
)
def test_failed_learner_is_restarted_up_to_limit(tries: Path, codes: str, restarts: int, code: int, made: int) -> None:
    command = [sys.executable, "-c", TRY, codes]
    assert Restarts(command, ["--overwrite"], pause_s=0).run(restarts) == code
    shown = tries.read_text().splitlines()
    assert shown == ["0 --overwrite ''", *(f"{attempt} ''" for attempt in range(1, made))]


def test_restarted_learner_gets_same_set_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(Restarts, "run", lambda restarts, _: commands.append(list(restarts._command)) or 0)
    assert learn_with_restarts(tmp_path / "run.yaml", 2, 1, overwrite=False, changes=["training.seed=1"]) == 0
    assert commands[0][-2:] == ["--processes=2", "--set=training.seed=1"]


def test_terminated_learner_is_not_restarted(tries: Path) -> None:
    ends_us = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    assert Restarts([sys.executable, "-c", ends_us], pause_s=0).run(3) == 75


def test_child_processes_of_learner_end_with_it(tries: Path, tmp_path: Path) -> None:
    leaves = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, file=open(sys.argv[1], 'w'))"
    assert Restarts([sys.executable, "-c", leaves, str(tmp_path / "pid")]).run(1) == 0
    stat, patience = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat"), Patience(20)
    while _lives(stat):
        assert not patience.ended()


def _lives(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
