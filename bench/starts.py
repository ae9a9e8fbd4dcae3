"""What a start costs on a CPU: `stage2 serve`'s server until it answers /health, and what a learner imports.

The peer of the server is vLLM's own module with the same flags, which spawns its engine. That of the learner is the
same import with garbage collections. Amounts are CPU seconds of all processes, which a busy machine changes less than
seconds. Byte code is there, and so is what vLLM finds out about the model. Each is measured once.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.sync import free_ports, wait_until_up
from bench.tables import Row, Table

from stage2_api.runconfig import RunConfig
from stage2_trainer.serve.launch import server_process
from stage2_trainer.serve.server_command import VLLM_MODULE, Endpoint
from stage2_trainer.sync.vllm.vllm_compat import SERVER_MODULE

MODEL = Path(__file__).parents[1] / "examples" / "tiny-qwen3-vl"
TICKS = os.sysconf("SC_CLK_TCK")
GROUP, FIRST_TIME, LAST_TIME = 2, 11, 15  # of /proc/PID/stat, after the name
LEARNER = "from stage2_trainer.learner import build"
QUIETLY = f"from stage2_trainer.process.uncollected import uncollected\nwith uncollected(): {LEARNER}"


def rows() -> Iterator[Row]:
    """The parts of a server's start, and a learner's import."""
    peer = "python -m vllm…api_server"
    ours, theirs = server_seconds(VLLM_MODULE), server_seconds(SERVER_MODULE)
    yield Row("a server's start: its HTTP process", peer, ours[0], theirs[0])
    yield Row("a server's start: its engine", peer, ours[1], theirs[1])
    yield Row("a server's start", peer, sum(ours), sum(theirs))
    yield Row("a learner's import", "with collections", import_seconds(QUIETLY), import_seconds(LEARNER))


def server_seconds(module: str) -> tuple[float, float]:
    """CPU seconds of a server until it answers /health: of its first process, and of all others."""
    with tempfile.TemporaryDirectory() as name:
        folder, (port, group_port) = Path(name), free_ports(2)
        (folder / "token").write_text(secrets.token_hex(8))
        config = configuration(folder, f"http://127.0.0.1:{port}", group_port)
        command, environment = server_process(config, 0, Endpoint("127.0.0.1", port), "vllm")
        command[command.index(VLLM_MODULE)] = module
        token = {"STAGE2_TOKEN_FILE": str(folder / "token")}
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                command, env={**environment, **token}, stdout=log, stderr=log, start_new_session=True
            )
            try:
                wait_until_up(f"http://127.0.0.1:{port}")
                times = group_seconds(process.pid)
                return times.pop(process.pid), sum(times.values())
            finally:
                process.terminate()
                process.wait()


def configuration(folder: Path, base_url: str, group_port: int) -> RunConfig:
    """One server of the examples' tiny model, which computes without compiling."""
    server = {"base_url": base_url, "group_port": group_port}
    vllm: dict[str, Any] = {"mode": "server", "max_model_len": 1024, "max_num_seqs": 8, "server": {"servers": [server]}}
    vllm |= {"enforce_eager": True, "limit_mm_per_prompt": {"image": 1, "video": 0}}
    return RunConfig.model_validate(
        {
            "model": {"model": str(MODEL), "torch_dtype": "float32"},
            "training": {"output_dir": str(folder / "out")},
            "custom": {"train_jsonl": "train.jsonl", "extra": {"rollout_matching": {"vllm": vllm}}},
        }
    )


def group_seconds(group: int) -> dict[int, float]:
    """CPU seconds of each process of a process group, with those of its children that have ended."""
    times = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[GROUP]) == group:
            times[int(stat.parent.name)] = sum(map(int, fields[FIRST_TIME:LAST_TIME])) / TICKS
    return times


def import_seconds(program: str) -> float:
    """CPU seconds of a new interpreter that runs a program."""
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{program}: exit code {process.returncode}")
    return used.ru_utime + used.ru_stime


TABLE = Table("Starts on a CPU", "CPU s", 1.0, rows)
