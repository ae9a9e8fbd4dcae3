"""The rollout client against `vllm bench serve`, on the same real vLLM server with the same images and prompts.

vLLM's own benchmark client checks nothing and keeps nothing; ours puts answers in order, gives each request its seed,
reads every token id and proves that the weights did not change during the request. Amounts are seconds a rollout.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from bench.sync import free_ports, wait_until_up
from bench.tables import Row, Table

from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.wire.chat import CHAT_ROUTE
from stage2_trainer.wire.requests import POLICY_MODEL, RolloutRequest, Sampling, SeedPlan, answers

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "tiny-qwen3-vl"
STAGE2 = str(Path(sys.executable).with_name("stage2"))
PROMPT = "List the objects."
ROLLOUTS = 64
SAMPLING = Sampling(max_new_tokens=128)
TURNS = 4
Timed = tuple[float, int]  # seconds from the first request to the last answer, and tokens generated
# The `vllm` command looks up its version under a name that vLLM's CPU wheel does not have.
VLLM_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
# It can only stream; ours does not. This is its own request, session and report, and one answer as a whole.
WITHOUT_STREAMING = """
import time
from vllm.benchmarks.lib import endpoint_request_func as lib
async def whole(request_func_input, session, pbar=None, mm_position="last"):
    request = request_func_input
    chat = lib._get_chat_messages(request, mm_position=mm_position)
    payload = {"model": request.model, "messages": chat, "max_completion_tokens": request.output_len}
    lib._update_payload_common(payload, request)
    headers = lib._get_headers("application/json")
    lib._update_headers_common(headers, request)
    output = lib.RequestFuncOutput(prompt_len=request.prompt_len, start_time=time.perf_counter())
    async with session.post(url=request.api_url, json=payload, headers=headers) as response:
        response.raise_for_status()
        answer = await response.json()
    output.latency = output.ttft = time.perf_counter() - output.start_time
    output.generated_text = answer["choices"][0]["message"]["content"]
    output.output_tokens, output.success = answer["usage"]["completion_tokens"], True
    return output
lib.ASYNC_REQUEST_FUNCS["openai-chat"] = whole
"""
PEERS = {
    "vllm bench serve, neither streams": WITHOUT_STREAMING + VLLM_BENCH_SERVE,
    "vllm bench serve, which streams": VLLM_BENCH_SERVE,
}


def rows() -> Iterator[Row]:
    """All requests at once, greedy: both clients ask for the same tokens and their ids."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(
            [sys.executable, ROOT / "examples/make_shapes.py", folder, "--train", str(ROLLOUTS), "--held-out", "1"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        images = sorted(folder.rglob("*.png"))[:ROLLOUTS]
        requests = [RolloutRequest(messages=[{"role": "user", "content": content(image)}]) for image in images]
        with (
            serving(folder) as (base_url, token),
            ServerBackend([base_url], token=token, sampling=SAMPLING, timeout_s=60) as backend,
        ):
            ours, theirs = [], {peer: [] for peer in PEERS}  # type: list[Timed], dict[str, list[Timed]]
            for _ in range(TURNS):
                ours.append(our_client(backend, requests))
                for peer, program in PEERS.items():
                    theirs[peer].append(vllm_bench(program, base_url, token, images, folder))
        tokens = {count for _, count in ours}
        for peer, found in theirs.items():
            yield Row(
                f"{ROLLOUTS} images, greedy, {max(tokens)} tokens",
                peer,
                min(seconds for seconds, _ in ours[1:]) / ROLLOUTS,
                min(seconds for seconds, _ in found[1:]) / ROLLOUTS,
                f"{max(abs(a - b) for a in tokens for _, b in found)} tokens",
            )


def content(image: Path) -> list[dict[str, Any]]:
    """An image and the question, as both clients send them."""
    data = base64.b64encode(image.read_bytes()).decode()
    url = {"url": f"data:image/png;base64,{data}"}
    return [{"type": "image_url", "image_url": url}, {"type": "text", "text": PROMPT}]


def our_client(backend: ServerBackend, requests: list[RolloutRequest]) -> Timed:
    """Seconds from the first request to the last answer, and tokens generated."""
    start = time.perf_counter()
    found = answers(backend.generate(requests, seed_plan=SeedPlan(17, 0, 0)))
    return time.perf_counter() - start, sum(len(rollout.token_ids) for rollout in found)


def vllm_bench(program: str, base_url: str, token: str, images: list[Path], folder: Path) -> Timed:
    """The same of vLLM's client, as its report has them."""
    dataset = folder / "bench.jsonl"
    lines = [{"prompt": PROMPT, "image_files": [str(image)], "output_tokens": 128} for image in images]
    dataset.write_text("\n".join(map(json.dumps, lines)))
    options = {
        "--backend": "openai-chat",
        "--base-url": base_url,
        "--endpoint": CHAT_ROUTE,
        "--model": POLICY_MODEL,
        "--tokenizer": str(MODEL),
        "--dataset-name": "custom_image",
        "--dataset-path": str(dataset),
        "--custom-output-len": str(SAMPLING.max_new_tokens),
        "--num-prompts": str(len(images)),
        "--extra-body": json.dumps({**SAMPLING.parameters(), "seed": 0, "return_token_ids": True}),
        "--result-dir": str(folder),
        "--result-filename": "report.json",
    }
    switches = ["--save-result", "--disable-shuffle", "--disable-tqdm", "--custom-ensure-client-side-data"]
    command = [sys.executable, "-c", program, *switches]
    done = subprocess.run(
        [*command, *(part for option in options.items() for part in option)],
        env={**os.environ, "OPENAI_API_KEY": token, "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or (report := json.loads((folder / "report.json").read_text()))["completed"] < len(images):
        sys.exit(f"vllm bench serve: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return float(report["duration"]), int(report["total_output_tokens"])


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, str]]:
    """Start a real vLLM by `stage2 serve`; yields where it is, and its token."""
    token, (port, group_port) = secrets.token_hex(8), free_ports(2)
    base_url = f"http://127.0.0.1:{port}"
    (folder / "token").write_text(token)
    server = {"base_url": base_url, "group_port": group_port}
    vllm = {"mode": "server", "max_model_len": 1024, "max_num_seqs": 64, "server": {"servers": [server]}}
    vllm |= {"enforce_eager": True, "limit_mm_per_prompt": {"image": 1, "video": 0}}
    config = {
        "model": {"model": str(MODEL), "torch_dtype": "float32"},
        "training": {"output_dir": str(folder / "out")},
        "custom": {"train_jsonl": "train.jsonl", "extra": {"rollout_matching": {"vllm": vllm}}},
    }
    (folder / "serve.yaml").write_text(yaml.safe_dump(config))
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [STAGE2, "serve", str(folder / "serve.yaml"), "--server", "0"],
            env={**os.environ, "STAGE2_TOKEN_FILE": str(folder / "token")},
            stdout=log,
            stderr=log,
        )
        try:
            wait_until_up(base_url)
            yield base_url, token
        finally:
            process.terminate()
            process.wait()


TABLE = Table("Rollout client", "ms a rollout", 1e3, rows)
