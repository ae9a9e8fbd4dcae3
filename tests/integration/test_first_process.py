"""SIGTERM to the first process of a container, which the kernel drops without a handler: it ends within two seconds.

A starting job took 120 s to end, because the container that waits for the servers had none.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from stage2_api.errors import EXIT_RETRYABLE
from tests.integration.conftest import patience
from tests.integration.test_fault_table import learner_config
from tests.support.ports import free_port

LIMIT_S = 10.0
"""Two seconds on a quiet machine; no handler runs within one call of an import, which takes longer on a busy one."""
STAGE2 = str(Path(sys.executable).with_name("stage2"))
ISOLATED = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]


@pytest.fixture(scope="module")
def isolated():
    """The command that makes another one the first process of a pid namespace, as a container does."""
    if subprocess.run([*ISOLATED, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no pid namespace")
    return ISOLATED


@pytest.fixture
def config(tmp_path, model_path):
    """A run whose server is not there."""
    nobody = SimpleNamespace(base_url=f"http://127.0.0.1:{free_port()}", group_port=free_port())
    return learner_config(tmp_path, [nobody], model_path)


@contextlib.contextmanager
def first_process(command, log, **environment):
    """The command as a first process: its own pid in this namespace, and the process that waits for its end."""
    with log.open("wb") as output:
        outer = subprocess.Popen(command, env={**os.environ, **environment}, stdout=output, stderr=output)
    try:
        yield outer
    finally:
        outer.kill()
        outer.wait()


def inner_pid(outer):
    """The pid of the first process, once it runs Python."""
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    while True:
        assert outer.poll() is None
        for pid in children.read_text().split():
            handled = int(dict(line.split(":\t", 1) for line in status(pid))["SigCgt"], 16)
            if handled & 1 << (signal.SIGTERM - 1):
                return int(pid)
        time.sleep(0.01)


def status(pid):
    return [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line]


def sharded(config):
    """The run with a learner of two processes."""
    run = yaml.safe_load(config.read_text())
    run["training"]["effective_batch_size"] = 2
    run["custom"]["extra"]["rollout_matching"]["vllm"]["server"]["learners"] = "sharded"
    config.write_text(yaml.safe_dump(run))
    return config


COMMANDS = {
    "wait": lambda config: [STAGE2, "wait", str(config)],
    "learn": lambda config: [STAGE2, "learn", str(config)],
    "learn with restarts": lambda config: [STAGE2, "learn", str(config), "--restarts=3"],
    "learn in two processes": lambda config: [STAGE2, "learn", str(sharded(config)), "--processes=2"],
    "serve, the stub": lambda config: [STAGE2, "serve", str(config), "--server=0", "--engine=stub"],
    "serve, vLLM": lambda config: [STAGE2, "serve", str(config), "--server=0"],
    "the controller": lambda config: [sys.executable, "-m", "stage2_controller"],
}


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("after_s", [0.0, 0.5, 3.0, 8.0])
@pytest.mark.parametrize("name", COMMANDS)
def test_first_process_with_nothing_to_save_ends_on_sigterm_at_once(
    name, after_s, isolated, config, token_file, tmp_path
):
    log = tmp_path / "log"
    nobody = tmp_path / "kubeconfig"
    nobody.write_text(json.dumps(KUBECONFIG))
    environment = {"STAGE2_TOKEN_FILE": str(token_file), "KUBECONFIG": str(nobody)}
    with first_process([*isolated, *COMMANDS[name](config)], log, **environment) as outer:
        pid = inner_pid(outer)
        time.sleep(after_s)  # by the clock: it ends at once at any moment; these are four of them
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        outer.wait(timeout=patience(LIMIT_S))
        assert outer.returncode in (EXIT_RETRYABLE, 0), log.read_text()
        assert "Traceback" not in log.read_text()


@pytest.mark.vllm
def test_server_loading_its_model_ends_on_sigterm_at_once(isolated, config, token_file, tmp_path):
    """vLLM's own handler ends its engine first, which takes up to five seconds."""
    log = tmp_path / "log"
    with first_process([*isolated, *COMMANDS["serve, vLLM"](config)], log, STAGE2_TOKEN_FILE=str(token_file)) as outer:
        while "Initializing a V1 LLM engine" not in log.read_text():
            assert outer.poll() is None, log.read_text()
            time.sleep(0.1)
        os.kill(inner_pid(outer), signal.SIGTERM)
        outer.wait(timeout=patience(LIMIT_S))
    assert outer.returncode == EXIT_RETRYABLE, log.read_text()


KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "x",
    "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
    "clusters": [{"name": "x", "cluster": {"server": "http://127.0.0.1:1"}}],
    "users": [{"name": "x", "user": {}}],
}
