"""`stage2 serve` says what is wrong before it loads anything, and listens on loopback for loopback addresses."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.integration.conftest import run_config
from tests.support.ports import free_port

STAGE2 = str(Path(sys.executable).with_name("stage2"))


@pytest.fixture
def busy_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def serve(folder, port, *options, token_file):
    config = folder / "config.yaml"
    raw = run_config(f"http://127.0.0.1:{port}", 51216, model=folder / "no-such-model", dtype="float32")
    config.write_text(yaml.safe_dump(raw), encoding="utf-8")
    return subprocess.run(
        [STAGE2, "serve", str(config), "--server", "0", *options],
        env={**os.environ, "STAGE2_TOKEN_FILE": str(token_file), "PYTHONPROFILEIMPORTTIME": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("engine", ["vllm", "stub"])
def test_port_in_use_exits_with_64_before_heavy_imports(tmp_path, busy_port, token_file, engine):
    ended = serve(tmp_path, busy_port, "--engine", engine, token_file=token_file)
    assert ended.returncode == 64
    message = " ".join(ended.stderr.split())
    assert "custom.extra.rollout_matching.vllm.server.servers[0].base_url" in message
    assert f"port {busy_port} of 127.0.0.1 must be free" in message
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines() if "import time" in line}
    assert imported & {"torch", "vllm", "transformers"} == set()
    assert "stage2_trainer.serve.launch" in imported


def test_missing_token_exits_with_64(tmp_path, busy_port):
    ended = serve(tmp_path, busy_port, token_file=tmp_path / "missing")
    assert ended.returncode == 64
    assert "STAGE2_TOKEN_FILE" in ended.stderr
    assert "openssl rand" in ended.stderr


def test_unconfigured_server_index_exits_with_64(tmp_path, busy_port, token_file):
    ended = serve(tmp_path, busy_port, "--server", "5", token_file=token_file)
    assert ended.returncode == 64
    assert "must be the index of a server" in " ".join(ended.stderr.split())


def test_unknown_engine_exits_with_usage_error(tmp_path, token_file):
    ended = serve(tmp_path, free_port(), "--engine", "sglang", token_file=token_file)
    assert ended.returncode == 2
    assert "sglang" in ended.stderr


def test_loopback_server_listens_only_on_loopback(servers):
    served = servers("stub")
    port = int(served.base_url.rpartition(":")[2])
    entry = f"0100007F:{port:04X}"
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if " 0A " in line]
    assert entry in listening
    assert f"00000000:{port:04X}" not in listening
