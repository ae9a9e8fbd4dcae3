"""What `hack/gpu-hour` measures of a whole run on one GPU, with a server of vLLM, and the memory that it took.

    python -m bench.gpu_hour train FOLDER --transport nccl|tcp [--tiny]
    python -m bench.gpu_hour memory FOLDER [--tiny]

The run is examples/job-3v1.yaml with one server, which shares its GPU with the learner. Its model has the shapes of
Qwen3-VL-4B and random weights. With --tiny it has as many layers, all narrow, and a CPU computes; NCCL is then played
by sockets, and its server by the CPU stub.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from bench.gpu_push import LEARNER, NCCL_ENVIRONMENT, SERVER, TOKEN
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from stage2_api.parsing import merged
from stage2_api.pod.layout import TOKEN_FILE_VARIABLE
from stage2_cli.config_files import load_config
from stage2_trainer.checks.footprint import footprint
from stage2_trainer.checks.resources import CONTEXT_BYTES, GIB, total
from stage2_trainer.telemetry.run_log import STEP_LOG

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY_MODEL = EXAMPLES / "tiny-qwen3-vl"
STAGE2 = (sys.executable, "-m", "stage2_cli")
STEPS = 3
SAMPLED_S = 1.0
PATCH = 16
MOST_OVER = 1.1  # of what the doctor predicts
COLUMNS = (
    "step", "s", "rollouts s", "tokens/s", "forward s", "fill", "loss", "pushed GB", "push s", "GB/s", "proof gap",
    "peak GiB",
)  # fmt: skip
MERGED_AT = {"nccl": "learner", "tcp": "server"}
"""Each way once. A learner that merges sends the whole model first, and servers that merge have most of it on disk."""


@dataclass(frozen=True)
class Size:
    """The shapes of a model, and the lengths of its run.

    side: the pixels of an image's side. row: of a packed row, answer: of the longest, context: of a server, in tokens.
    """

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    side: int
    records: int
    row: int
    answer: int
    context: int
    engine: Mapping[str, Any]


FULL = Size(
    text={
        "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True
        },
    },
    vision={"hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16},
    side=768, records=32, row=12_000, answer=512, context=4096,
    engine={"gpu_memory_utilization": 0.35, "max_num_seqs": 64},
)  # fmt: skip
TINY = Size(
    text={
        "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "vocab_size": 1408,
    },
    vision={"hidden_size": 64, "intermediate_size": 64, "num_heads": 2},
    side=96, records=4, row=1024, answer=32, context=1024,
    engine={"max_num_seqs": 4, "enforce_eager": True},
)  # fmt: skip


def make_shape(folder: Path, text: Mapping[str, Any], vision: Mapping[str, Any], side: int) -> Any:
    """Write a model's folder without weights, with the tiny one's tokenizer; return its configuration.

    side: the pixels of an image's side.
    """
    shutil.copytree(TINY_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    of_text = {"num_hidden_layers": 36, "max_position_embeddings": 32768, "initializer_range": 0.02, **text}
    of_vision = {
        "depth": 24, "deepstack_visual_indexes": [5, 11, 17], "patch_size": PATCH, "num_position_embeddings": 2304,
        "initializer_range": 0.02, "out_hidden_size": text["hidden_size"], **vision,
    }  # fmt: skip
    pixels = {"patch_size": PATCH, "size": {"shortest_edge": side**2, "longest_edge": side**2}}
    _change(folder / "config.json", {"text_config": of_text, "vision_config": of_vision})
    _change(folder / "processor_config.json", {"image_processor": pixels, "video_processor": pixels})
    return AutoConfig.from_pretrained(folder)


def make_model(folder: Path, size: Size) -> None:
    """Write a model with random weights, unless it is there. Tokens that its tokenizer lacks are never answered."""
    if folder.exists():
        return
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shape = make_shape(unfinished, size.text, size.vision, size.side)
    torch.manual_seed(0)
    with torch.device("cuda" if size is FULL else "cpu"):
        model: Any = AutoModelForImageTextToText.from_config(shape, dtype=torch.bfloat16)
    known = len(AutoTokenizer.from_pretrained(unfinished))
    with torch.no_grad():
        model.get_input_embeddings().weight[known:] = 0
    model.save_pretrained(unfinished)
    del model
    torch.cuda.empty_cache()  # the run needs it
    unfinished.rename(folder)


def _change(file: Path, changes: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(merged(json.loads(file.read_text()), changes), indent=1))


def make_records(folder: Path, size: Size) -> None:
    """Write images of shapes, enough for all steps."""
    counts = [f"--train={STEPS * size.records}", "--held-out=1", "--max-shapes=6"]
    command = [sys.executable, str(EXAMPLES / "make_shapes.py"), str(folder), *counts]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def configuration(folder: Path, size: Size, transport: str) -> dict[str, Any]:
    """Return the training YAML: that of job-3v1 with this model, these images, and few steps."""
    document: dict[str, Any] = yaml.safe_load((EXAMPLES / "job-3v1.yaml").read_text())["spec"]["config"]
    address = {"base_url": f"http://127.0.0.1:{_free_port()}", "group_port": _free_port()}
    vllm = {
        "max_model_len": size.context,
        **size.engine,
        "sync": {"transport": transport, "merge": MERGED_AT[transport]},
        "server": {"servers": [address]},
    }
    training = {
        "output_dir": str(folder / transport), "max_steps": STEPS, "save_steps": STEPS, "eval_strategy": "no",
        "metric_for_best_model": None, "effective_batch_size": size.records,
    }  # fmt: skip
    custom = {
        "train_jsonl": str(folder / "shapes/train.jsonl"), "val_jsonl": str(folder / "shapes/held-out.jsonl"),
        "extra": {"rollout_matching": {"max_new_tokens": size.answer, "vllm": vllm}},
    }  # fmt: skip
    model = {"model": str(folder / "model")}
    return merged(document, {"global_max_length": size.row, "model": model, "training": training, "custom": custom})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def train(folder: Path, size: Size, transport: str) -> Iterator[str]:
    """Run to the end; yield the steps as a table. Raises RuntimeError where the run is not what was asked for."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    sampled = folder / f"{transport}.memory.json"
    sampled.unlink(missing_ok=True)
    make_model(folder / "model", size)
    make_records(folder / "shapes", size)
    config, token = folder / f"{transport}.yaml", folder / "token"
    config.write_text(yaml.safe_dump(configuration(folder, size, transport)))
    token.write_text(TOKEN)
    env = {**os.environ, **NCCL_ENVIRONMENT, TOKEN_FILE_VARIABLE: str(token)}
    serve, learn = _commands(config, by_sockets=size is TINY and transport == "nccl")
    with subprocess.Popen(serve, env={**env, "NCCL_HOSTID": SERVER}) as server:
        try:
            _wait(server, config, env)
            with _memory_sampled(size is FULL) as samples:
                learned = subprocess.run(learn, env={**env, "NCCL_HOSTID": LEARNER}, check=False)
        finally:
            server.terminate()
    if learned.returncode:
        raise RuntimeError(f"the learner ended with exit code {learned.returncode}")
    sampled.write_text(json.dumps(samples))
    yield from step_table(read_steps(folder, transport), transport)


def _commands(config: Path, *, by_sockets: bool) -> tuple[list[str], list[str]]:
    serve, learn = ["serve", str(config), "--server", "0"], ["learn", str(config), "--overwrite"]
    if not by_sockets:
        return [*STAGE2, *serve], [*STAGE2, *learn]
    python = [sys.executable, "-m"]
    server = [*python, "tests.integration.prepared_server", *serve, "--engine", "stub"]
    return server, [*python, "tests.support.socket_communicator", *learn]


def _wait(server: subprocess.Popen[bytes], config: Path, env: Mapping[str, str]) -> None:
    """Return when the server answers. Raises RuntimeError where it ends instead."""
    start = time.monotonic()
    with subprocess.Popen([*STAGE2, "wait", str(config)], env=dict(env)) as waiting:
        while waiting.poll() is None:
            if server.poll() is not None:
                waiting.kill()
                raise RuntimeError(f"the server ended with exit code {server.returncode} before it answered")
            time.sleep(SAMPLED_S)
    print(f"the server answers after {time.monotonic() - start:.0f} s", flush=True)


@contextmanager
def _memory_sampled(on_gpu: bool) -> Iterator[list[int]]:
    """Yield the MiB that nvidia-smi finds in use before the block and then every second, if it is installed."""
    samples: list[int] = []
    asked = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]

    def sample() -> None:
        samples.append(int(subprocess.run(asked, check=True, capture_output=True, text=True).stdout))

    def keep_sampling() -> None:
        while not ended.wait(SAMPLED_S):
            sample()

    if not on_gpu or shutil.which("nvidia-smi") is None:
        yield samples
        return
    ended, thread = threading.Event(), threading.Thread(target=keep_sampling)
    sample()
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def read_steps(folder: Path, transport: str) -> list[dict[str, Any]]:
    """Return the steps of a run's log."""
    lines = map(json.loads, (folder / transport / STEP_LOG).read_text().splitlines())
    return [line for line in lines if line["event"] == "step"]


def step_table(steps: Sequence[Mapping[str, Any]], transport: str) -> Iterator[str]:
    """Yield a line for each step. Raises RuntimeError where one is missing, or its weights came in another way."""
    yield f"\n## {STEPS} steps, weights over {transport}, merged by the {MERGED_AT[transport]}\n\n"
    yield f"| {' | '.join(COLUMNS)} |\n|{' ---: |' * len(COLUMNS)}\n"
    for step in steps:
        cells = [
            f"{step['step/wall_s']:.1f}", f"{step['time/rollout_generate_s']:.1f}",
            f"{step['rollout/gen_tokens_per_s']:.0f}", f"{step['time/forward_s']:.1f}",
            f"{step['packing/post_rollout_fill']:.2f}", f"{step['loss']:.2f}", f"{step['sync/bytes'] / 1e9:.3f}",
            f"{step['sync/seconds']:.2f}", f"{step['sync/gigabytes_per_second']:.2f}", f"{step['sync/proof_gap']:.3g}",
            f"{step['memory/peak_bytes'] / GIB:.2f}",
        ]  # fmt: skip
        yield f"| {step['step']} | {' | '.join(cells)} |\n"
    found = [(step["step"], step["sync/transport"], step["sync/merge"]) for step in steps]
    expected = [(number, transport, MERGED_AT[transport]) for number in range(1, STEPS + 1)]
    if found != expected:
        raise RuntimeError(f"steps, transports and mergers are {found}, not {expected}")


def memory(folder: Path, size: Size) -> Iterator[str]:
    """Yield what `stage2 doctor` says, and its prediction beside the memory of the runs that have ended.

    Raises RuntimeError where none has, or a learner on a GPU took more.
    """
    ended = [one for one in MERGED_AT if (folder / f"{one}.memory.json").is_file()]
    if not ended:
        raise RuntimeError(f"no run has ended in {folder}: run `train` first")
    config = folder / f"{ended[0]}.yaml"
    subprocess.run([*STAGE2, "doctor", str(config)], check=False)
    run = load_config(config)
    predicted = total(footprint(run, run.model.model, row_tokens=run.max_length or 0).learner)
    yield "\n## Memory of the learner\n\n"
    yield "| run | measured by | measured GiB | predicted GiB | measured / predicted |\n"
    yield "| --- | --- | ---: | ---: | ---: |\n"
    for transport in ended:
        samples = json.loads((folder / f"{transport}.memory.json").read_text())
        peak = max(step["memory/peak_bytes"] for step in read_steps(folder, transport))
        how = "PyTorch's allocator" if size is FULL else "peak resident size, its libraries included"
        yield _compared(transport, how, peak, predicted)
        if samples:
            taken = (max(samples) - samples[0]) * 2**20
            yield _compared(transport, "nvidia-smi, above what the server had", taken, predicted + CONTEXT_BYTES)
        if size is FULL and peak > MOST_OVER * predicted:
            raise RuntimeError(f"{transport}: the learner took {peak / predicted:.2f} times what `stage2 doctor` says")


def _compared(run: str, how: str, measured: int, predicted: int) -> str:
    amounts = f"{measured / GIB:.2f} | {predicted / GIB:.2f} | {measured / predicted:.2f}"
    return f"| {run} | {how} | {amounts} |\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the tables; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.gpu_hour", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("train", "memory"))
    parser.add_argument("folder", type=Path, help="of the model, the images and the runs")
    parser.add_argument("--transport", choices=tuple(MERGED_AT), default="nccl")
    parser.add_argument("--tiny", action="store_true", help="rehearse on a CPU, with narrow layers")
    options = parser.parse_args(arguments)
    size = TINY if options.tiny else FULL
    folder = options.folder / ("tiny" if options.tiny else "full")
    lines = memory(folder, size) if options.what == "memory" else train(folder, size, options.transport)
    for line in lines:
        print(line, end="", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
