"""Servers of this tier: real processes on loopback ports, started by `stage2 serve` when a test first asks for them.

A real vLLM takes about a minute to start, so each kind of server is started once for the whole session. Those that a
test or a module starts for itself end with it: one takes 0.7 to 1.8 GB.
"""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import pytest
import yaml
from filelock import FileLock

from stage2_api.vllm import ServerAddress, VllmSync
from stage2_cli.processes import end_with_parent
from tests.support import certificates, forked
from tests.support.patience import Patience, crowding
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
WARMED_MODEL = ROOT / "examples" / "tiny-qwen3-vl"
START_TIMEOUT_S = 400.0
LONG_S = 120.0  # a deadline that only a server which stands still misses
STOP_TIMEOUT_S = 20.0
LOG_LINES = 40
MAX_MODEL_LEN = 1024
BOTH_DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"], indirect=True, scope="module")


def patience(seconds: float) -> float:
    """A deadline that is met on a quiet machine, prolonged by how busy this one is."""
    return seconds * crowding()


@dataclass(frozen=True)
class Served:
    """A running server and how it was configured."""

    engine: str
    base_url: str
    group_port: int
    dtype: str
    log: Path
    process: forked.Forked | subprocess.Popen[bytes]
    tls: certificates.Files | None = None
    transport: str = "tcp"

    def log_tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])


@pytest.fixture(scope="session")
def token(tmp_path_factory):
    return "integration-token"


@pytest.fixture(scope="session")
def token_file(tmp_path_factory, token):
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text(f"{token}\n", encoding="utf-8")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """The warmed tiny Qwen3-VL; where it is not there yet, one with random weights."""
    if (WARMED_MODEL / "model.safetensors").exists():
        return WARMED_MODEL
    path = tmp_path_factory.mktemp("model") / "tiny-random"
    script = ROOT / "examples" / "make_tiny_model.py"
    subprocess.run([sys.executable, str(script), str(path), "--steps", "0"], check=True, capture_output=True)
    return path


@pytest.fixture
def start_server(server_settings):
    """A function that starts a server, which ends with the test; see `starting`."""
    with starting(*server_settings) as start:
        yield start


@pytest.fixture(scope="module")
def start_module_server(server_settings):
    """The same, of servers that end with the module."""
    with starting(*server_settings) as start:
        yield start


@pytest.fixture(scope="module")
def renewed(start_module_server):
    """A function that returns the module's server of a kind, started again on its ports where it has ended.

    Such servers can be struck in the middle of a merge (`prepared_server`).
    """
    running: dict[tuple[str, str, str], Served] = {}

    def get(engine: str, dtype: str = "float32", *, transport: str = "tcp") -> Served:
        kind = (engine, dtype, transport)
        last = running.get(kind)
        if last is None or last.process.poll() is not None:
            ports = (int(last.base_url.rpartition(":")[2]), last.group_port) if last else None
            running[kind] = start_module_server(engine, dtype=dtype, ports=ports, transport=transport, prepared=True)
        return running[kind]

    return get


@pytest.fixture(scope="session")
def server_settings(tmp_path_factory, token_file, model_path):
    """A folder for logs, the token's file, and the model that is served."""
    return tmp_path_factory.mktemp("servers"), token_file, model_path


@contextlib.contextmanager
def starting(folder: Path, token_file: Path, model_path: Path):
    """Yield a function that starts `stage2 serve` for one server and returns it when it is healthy; end all of them."""
    with contextlib.ExitStack() as stack:

        def start(
            engine: str,
            /,
            *,
            dtype: str = "float32",
            ports: tuple[int, int] | None = None,
            model: Path = model_path,
            tls: certificates.Files | None = None,
            transport: str = "tcp",
            prepared: bool = False,
            **overrides: object,
        ) -> Served:
            port, group_port = ports or (free_port(), free_port())
            config = run_config(url_of(port, tls), group_port, model=model, dtype=dtype)
            config["custom"]["extra"]["rollout_matching"]["vllm"].update({"sync": {"transport": transport}} | overrides)
            prepared = prepared or transport == "nccl"
            served = launch(
                folder, engine, config, ports=(port, group_port), token=token_file, tls=tls, prepared=prepared
            )
            stack.callback(stop, served.process)
            wait_until_healthy(served)
            return served

        yield start


@pytest.fixture(scope="session")
def servers(server_settings):
    """A function that returns the session's one server of an engine, a dtype and keys of `vllm` or `transport`."""
    running: dict[tuple[object, ...], Served] = {}
    with starting(*server_settings) as start:

        def get(engine: str, dtype: str = "float32", **options: Any) -> Served:
            options = {"enable_lora": False, "transport": "tcp", **options}
            key = (engine, dtype, *sorted(options.items()))
            if key not in running:
                running[key] = start(engine, dtype=dtype, **options)
            return running[key]

        yield get


@pytest.fixture(scope="module")
def dtype(request):
    """The number format of `base` and `served`; a module marked with BOTH_DTYPES tries both."""
    return getattr(request, "param", "float32")


@pytest.fixture(scope="module")
def base(model_path, dtype):
    """The policy before it trains."""
    import torch

    from tests.integration import policies

    return policies.load(model_path, getattr(torch, dtype))


@pytest.fixture(scope="module")
def probe(model_path, tmp_path_factory):
    """The prompt by which servers and learner are compared."""
    from tests.integration import policies

    return policies.grey_probe(model_path, tmp_path_factory.mktemp("probe"))


@pytest.fixture(scope="module")
def engine():
    """What `served` runs; a module that tries several gives it parameters."""
    return "stub"


@pytest.fixture(scope="module")
def served(engine, dtype, servers):
    """A module's server, of its engine and its dtype."""
    return servers(engine, dtype)


@pytest.fixture
def client(served, token):
    """The control calls of a module's server."""
    from stage2_trainer.wire.client import ServerClient

    return ServerClient(served.base_url, token, timeout_s=60)


@pytest.fixture
def make_sync(token):
    """A function that returns a full sync to these servers; it is closed with the test.

    timeout_s: by default so long that no server misses it which is only slow; to notice one that stands still, shorter.
    """
    import torch

    from stage2_trainer.sync.fleet.push import FullPush
    from tests.support.socket_communicator import sending_over

    with contextlib.ExitStack() as stack:

        def make(*served: Served, timeout_s: float = LONG_S, **options: Any) -> FullPush:
            addresses = [ServerAddress(one.base_url, one.group_port) for one in served]
            with sending_over(served[0].transport):
                sync = FullPush(addresses, token=token, timeout_s=timeout_s, device=torch.device("cpu"), **options)
            stack.callback(sync.close)
            return sync

        yield make


@pytest.fixture(scope="module")
def policy_of(base):
    """A function that returns the policy of a push that is struck; each is made once."""
    from tests.integration import policies

    return cache(lambda push: policies.trained(base, push.policy))


@pytest.fixture
def no_other_engine():
    """No other test of this machine has a colocated engine meanwhile: all share their names of shared memory."""
    with FileLock(Path(tempfile.gettempdir()) / "stage2-test-engine.lock"):
        yield


@pytest.fixture
def sync_by(served, make_sync):
    """A function that returns a full sync to a module's server, with keys of `vllm.sync`."""
    return lambda **how: make_sync(served, how=VllmSync(**how))


def run_config(base_url: str, group_port: int, *, model: Path, dtype: str) -> dict[str, Any]:
    vllm = {
        "mode": "server",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "server": {"servers": [{"base_url": base_url, "group_port": group_port}]},
    }
    return {
        "model": {"model": str(model), "torch_dtype": dtype},
        "training": {"output_dir": "out"},
        "custom": {"train_jsonl": "train.jsonl", "extra": {"rollout_matching": {"vllm": vllm}}},
    }


def url_of(port: int, tls: certificates.Files | None) -> str:
    return f"https://{certificates.HOST}:{port}" if tls else f"http://127.0.0.1:{port}"


def launch(
    folder: Path,
    engine: str,
    config: dict[str, Any],
    *,
    ports: tuple[int, int],
    token: Path,
    executed: bool = False,
    prepared: bool = False,
    tls: certificates.Files | None = None,
) -> Served:
    """Start a server and return at once.

    executed: by its true command line, with all that it imports. prepared: as `prepared_server`.
    """
    port, group_port = ports
    file = folder / f"{engine}-{port}.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    log = folder / f"{engine}-{port}.log"
    stage2 = [sys.executable, "-m", "tests.integration.prepared_server"] if prepared else [forked.STAGE2]
    command = [*stage2, "serve", str(file), "--server", "0", "--engine", engine]
    environment = {**os.environ, "STAGE2_TOKEN_FILE": str(token), **(tls.environment() if tls else {})}
    process: forked.Forked | subprocess.Popen[bytes]
    with log.open("wb") as output:
        if executed:
            # As on a machine without a C++ compiler, on which nothing was compiled before.
            bare = {"CXX": "false", "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
            process = execute(command, environment | bare, output)
        else:
            imports = forked.VLLM if engine == "vllm" else forked.STUB
            process = forked.start(command, imports=imports, env=environment, stdout=output)
    vllm = config["custom"]["extra"].get("rollout_matching", {}).get("vllm", {})
    transport = vllm.get("sync", {}).get("transport", "tcp")
    return Served(engine, url_of(port, tls), group_port, config["model"]["torch_dtype"], log, process, tls, transport)


def execute(command: list[str], environment: dict[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # vLLM's own children end with it
        preexec_fn=end_with_parent,
    )


def wait_until_healthy(served: Served) -> None:
    import httpx

    trusted = ssl.create_default_context(cafile=served.tls.authority) if served.tls else True
    patience = Patience(START_TIMEOUT_S)
    while not patience.ended():
        if served.process.poll() is not None:
            pytest.fail(f"{served.engine} ended with {served.process.returncode}:\n{served.log_tail()}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{served.base_url}/health", trust_env=False, verify=trusted).status_code == 200:
                return
        time.sleep(0.3)
    pytest.fail(f"{served.engine} was not healthy within {patience.waited_s:.0f} s:\n{served.log_tail()}")


def stop(process: forked.Forked) -> None:
    """End a server and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
