"""The example job as processes: what the tests of `stage2 run` share."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support import forked
from tests.support.ports import free_port, free_ports
from tests.support.shapes import make_shapes

ROOT = Path(__file__).parents[2]
JOB = ROOT / "examples" / "job-3v1-tiny.yaml"
STAGE2 = str(Path(sys.executable).with_name("stage2"))


def stage2(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([STAGE2, *map(str, arguments)], capture_output=True, text=True, check=False)


SERVERS = 2  # the example has three; each is a process that imports everything anew


def run_example(folder: Path, *, train: int, held_out: int, training: Mapping[str, object]) -> None:
    """Run the example job on CPU stubs, on so many images and with some keys of `training` changed."""
    make_shapes(folder / "shapes", train=train, held_out=held_out)
    job = yaml.safe_load(JOB.read_text())
    job["spec"]["rollout"] |= {"servers": SERVERS, "port": free_ports(SERVERS)}
    job["spec"]["config"]["training"] |= training
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    examples = "/opt/stage2/examples"
    maps = [
        f"{examples}/few={folder / 'shapes'}",
        f"{examples}/tiny-few={ROOT / 'examples/tiny-few'}",
    ]
    options = ["--engine", "stub", "--work-dir", folder, *(part for text in maps for part in ("--map", text))]
    done = stage2("run", folder / "job.yaml", *options)
    assert done.returncode == 0, done.stdout + done.stderr


def learn(
    configuration: Mapping[str, Any],
    *,
    processes: int = 1,
    machines: int = 1,
    run: Callable[..., Any] = forked.run,
    imports: Sequence[str] = forked.LEARNER,
) -> tuple[list[dict], str]:
    """Run a learner to its end; return its step records and what it, or its first machine, wrote to stderr.

    machines: launchers, each of which starts so many processes.
    """
    output = Path(configuration["training"]["output_dir"])
    output.mkdir(parents=True, exist_ok=True)
    path = output / "config.yaml"
    path.write_text(yaml.safe_dump(configuration))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command, port = [STAGE2, "learn", path, f"--processes={processes}"], free_port()
    others = [
        forked.start([*command, f"--node={index}/{machines}@127.0.0.1:{port}"], imports=imports, env=environment)
        for index in range(1, machines)
    ]
    first = [f"--node=0/{machines}@127.0.0.1:{port}"] if others else []
    done = run([*command, *first], imports=imports, env=environment)
    codes = [done.returncode, *(other.wait() for other in others)]
    assert codes == [0] * machines, done.stderr[-4000:]
    lines = (output / "stage2_log.jsonl").read_text().splitlines()
    return [found for line in lines if (found := json.loads(line))["event"] == "step"], done.stderr


@contextlib.contextmanager
def learning(
    config: Path, log: Path, *, command: Sequence[str] = (STAGE2, "learn"), **environment: object
) -> Iterator[forked.Forked]:
    """Start a learner that writes into a log, and kill it with the block. environment: variables beside ours."""
    variables = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    with log.open("wb") as output:
        process = forked.start([*command, config], imports=forked.LEARNER, env=variables, stdout=output)
    try:
        yield process
    finally:
        process.kill()


def assert_resumes_alike(
    whole: Path, steps: Sequence[Mapping[str, Any]], middle: int, configuration: Any, *, processes: int = 1
) -> None:
    """A run that resumes in the middle of a whole one has its figures and ends with its weights, bit for bit."""
    output, last = Path(configuration["training"]["output_dir"]), steps[-1]["step"]
    shutil.copytree(whole / f"checkpoint-{middle}", output / f"checkpoint-{middle}")
    resumed, log = learn(configuration, processes=processes)
    assert "resuming from" in log
    for figure in ("step", "loss", "learning_rate"):
        assert [step[figure] for step in resumed] == [step[figure] for step in steps[middle:]]
    found, expected = adapter(output, last), adapter(whole, last)
    assert found.keys() == expected.keys()
    assert [name for name, tensor in found.items() if not tensor.equal(expected[name])] == []


def adapter(output: Path, step: int) -> dict[str, Any]:
    """The weights of the adapter in a checkpoint, by name."""
    from safetensors.torch import load_file

    return load_file(output / f"checkpoint-{step}" / "adapter_model.safetensors")


def records(folder: Path) -> list[dict]:
    """What the learner of a finished run wrote to its standard output, one object a line."""
    lines = (folder / "logs" / "learner.log").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"event"')]
