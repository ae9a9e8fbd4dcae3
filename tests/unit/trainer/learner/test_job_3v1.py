"""The shipped 3v1 job's own training section, with three servers: who is asked for what, and how full rows are."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from stage2_api.parsing import parse_run_config
from stage2_trainer.data.messages import image_sources
from stage2_trainer.learner.row_planner import PackedRowPlanner, StepRowPlanner
from stage2_trainer.process.training_arguments import training_options
from stage2_trainer.process.transformers_compat import disable_cache
from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.wire.rollout import Sampling
from stage2_trainer.wire.seeds import request_seed
from tests.unit.trainer.learner import harness
from tests.unit.trainer.learner.harness import PROMPTS, box, build, perfect, record

JOB = Path(__file__).parents[4] / "examples" / "job-3v1.yaml"
SERVERS = 3
ROW = 1200  # a tenth of the job's: prompts and answers are a tenth as long too


class Handler(BaseHTTPRequestHandler):
    """Answers each image as it was told to, and counts what is under way."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._say({"weight_version": str(self.server.version())})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.under_way += 1
            server.most = max(server.most, server.under_way)
            server.seeds.append(body["seed"])
        time.sleep(0.4)
        prompt, answer, text = server.answers[image_sources(body["messages"])[0]]
        with server.lock:
            server.under_way -= 1
        choice = {"message": {"content": text}, "token_ids": answer, "finish_reason": "stop"}
        self._say({"object": "chat.completion", "prompt_token_ids": prompt, "choices": [choice]})

    def _say(self, document):
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


@pytest.fixture
def records(tmp_path):
    """32 records with as many objects as images of dense scenes have: few, and now and then very many."""
    counts = np.random.default_rng(0).lognormal(np.log(10), 0.8, 32).clip(1, 40).astype(int)
    found = []
    for i, count in enumerate(counts):
        path = tmp_path / f"{i}.png"
        Image.new("RGB", (32, 32), (8 * i, 100, 50)).save(path)
        found.append(record(str(path), i, **{
            f"object_{k + 1}": box("red box", 10 * k, 20 * k, 10 * k + 300, 20 * k + 200) for k in range(count)
        }))  # fmt: skip
    return found


@pytest.fixture
def servers(records, encoder):
    answers = {}
    for one in records:
        chat, text = PROMPTS.chat(one), perfect(one)
        ids = encoder.tokenizer.encode(text, add_special_tokens=False) + encoder.end_of_turn_ids[:1]
        answers[image_sources(chat)[0]] = (encoder.prompt(chat).input_ids.tolist(), ids, text)
    started = []
    for _ in range(SERVERS):
        server = Server(("127.0.0.1", 0), Handler)
        server.answers, server.seeds = answers, []
        server.lock, server.under_way, server.most = threading.Lock(), 0, 0
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
    yield started
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.fixture
def step(tmp_path, model, encoder, records, servers, monkeypatch):
    """A function that trains one step of the job with these rows."""

    def run(rows, *, in_flight=256):
        disable_cache(model)
        config = yaml.safe_load(JOB.read_text())["spec"]["config"]
        addresses = [{"base_url": "http://127.0.0.1:1", "group_port": 2}]
        config["custom"]["extra"]["rollout_matching"]["vllm"]["server"]["servers"] = addresses
        options = training_options(parse_run_config(config), world_size=1)
        unrelated = {"eval_strategy": "no", "eval_on_start": False, "save_strategy": "no", "max_steps": 1}
        del options["output_dir"]
        options |= unrelated
        urls = [f"http://127.0.0.1:{server.server_address[1]}" for server in servers]
        backend = ServerBackend(urls, token="t", sampling=Sampling(max_new_tokens=4), timeout_s=30, in_flight=in_flight)
        monkeypatch.setattr(harness, "ScriptedBackend", lambda *_: backend)
        trained = build(tmp_path / "out", model, encoder, records, rows=rows, **options)
        for server in servers:
            server.version = lambda: trained.sync.versions[-1]
        trained.trainer.train()
        backend.close()
        lines = map(json.loads, (tmp_path / "out" / "stage2_log.jsonl").read_text().splitlines())
        return next(line for line in lines if line["event"] == "step")

    return run


def assert_asked_at_once(servers, at_once):
    assert [len(server.seeds) for server in servers] == [11, 11, 10]
    assert [server.most for server in servers] == at_once
    asked = Counter(seed for server in servers for seed in server.seeds)
    assert asked == Counter(request_seed(17, 0, micro_step, 0) for micro_step in range(32))


@pytest.mark.timeout(300)
def test_scope_step_asks_all_servers_at_once_and_fills_its_rows(step, servers):
    told = step(StepRowPlanner(ROW))
    assert_asked_at_once(servers, [11, 11, 10])
    assert told["packing/post_rollout_fill"] >= 0.9
    assert told["rollout/gt_objects"] == told["rollout/matched_for_supervision"] > 32


@pytest.mark.timeout(300)
def test_scope_micro_asks_in_the_same_way(step, servers):
    told = step(PackedRowPlanner(ROW, capacity=512, min_fill=0.01), in_flight=4)
    assert_asked_at_once(servers, [4, 4, 4])
    assert told["packing/post_rollout_segments"] == 1
