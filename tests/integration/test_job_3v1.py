"""The shipped 3v1 job's own training section, with three servers: who is asked for what, and how full rows are."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import yaml

from stage2_trainer.matching import GTObject, serialize_objects
from tests.integration.runs import learn
from tests.support.shapes import make_shapes

pytestmark = pytest.mark.in_turns(2)
ROOT = Path(__file__).parents[2]
JOB = ROOT / "examples" / "job-3v1.yaml"
TINY_JOB = ROOT / "examples" / "job-3v1-tiny.yaml"
RECORDS = 32  # the job's own effective_batch_size
ROW = 1000  # tokens, some five answers, as the job's rows have


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return make_shapes(tmp_path_factory.mktemp("shapes"), train=RECORDS, max_shapes=6)


@pytest.fixture(scope="module")
def addresses(start_module_server):
    """Three stubs of this file's own: they are asked all at once."""
    started = [start_module_server("stub") for _ in range(3)]
    return [{"base_url": one.base_url, "group_port": one.group_port} for one in started]


@pytest.fixture
def trained(shapes, addresses, tmp_path, token_file, monkeypatch):
    """A function that trains one step of the job on the tiny model; it returns the step's record and its requests."""

    def run(**matching):
        config = yaml.safe_load(JOB.read_text())["spec"]["config"]
        tiny = yaml.safe_load(TINY_JOB.read_text())["spec"]["config"]
        config |= {"global_max_length": ROW, "tuner": tiny["tuner"], "template": {}}
        config["model"] = {**tiny["model"], "model": str(ROOT / "examples/tiny-qwen3-vl")}
        config["training"] |= {
            "output_dir": str(tmp_path / "out"),
            "max_steps": 1,
            "trace": True,
            "eval_strategy": "no",
        }
        config["custom"] |= {"train_jsonl": str(shapes / "train.jsonl"), "user_prompt": "List the shapes."}
        del config["custom"]["val_jsonl"]
        options = config["custom"]["extra"]["rollout_matching"]
        options["vllm"] |= {"max_model_len": 1024, "max_num_seqs": matching.pop("max_num_seqs", 256)}
        options["vllm"]["server"]["servers"] = addresses
        options["vllm"]["sync"]["verify_tolerance"] = 0.2  # the job computes in bfloat16, the stubs in float32
        options |= {"max_new_tokens": 128, **matching}
        monkeypatch.setenv("STAGE2_TOKEN_FILE", str(token_file))
        (step,), _ = learn(config)
        return step, tmp_path / "out"

    return run


def requests_of(folder):
    """How many requests each server had and how many at once, in no order."""
    under_way, most, count = Counter(), Counter(), Counter()
    edges = [event for event in json.loads((folder / "trace.json").read_text()) if event.get("cat") == "rollout"]
    for event in sorted(edges, key=lambda event: (event["ts"], event["ph"] == "b")):
        server = event["pid"]
        under_way[server] += 1 if event["ph"] == "b" else -1
        most[server] = max(most[server], under_way[server])
        count[server] += event["ph"] == "b"
    return sorted((count[server], most[server]) for server in count)


def assert_the_answers_of_all_are_as_long(folder, addresses):
    lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert sorted(line["micro_step"] for line in lines) == list(range(RECORDS))
    lengths = defaultdict(list)
    for line in lines:
        truth = [GTObject(one["desc"], one["kind"], one["bins"]) for one in line["ground_truth"]]
        lengths[line["server"]].append(len(serialize_objects(truth)))
    assert set(lengths) == {one["base_url"] for one in addresses}
    busiest = max(lengths.values(), key=sum)
    assert sum(busiest) - min(map(sum, lengths.values())) <= min(busiest), "the shortest come last, and level them"


def test_scope_step_requests_from_all_servers_at_once_and_fills_rows(trained, addresses):
    step, folder = trained()
    assert all(count == most for count, most in requests_of(folder))
    assert_the_answers_of_all_are_as_long(folder, addresses)
    rows = RECORDS / step["packing/post_rollout_segments"]
    assert step["packing/post_rollout_fill"] > (rows - 1) / rows  # one row fewer could not hold them
    assert rows > 1
    assert step["rollout/gt_objects"] > RECORDS


def test_scope_micro_divides_requests_like_scope_step(trained, addresses):
    step, folder = trained(post_rollout_pack_scope="micro", max_num_seqs=4)
    assert {most for _, most in requests_of(folder)} == {4}
    assert_the_answers_of_all_are_as_long(folder, addresses)
    assert step["packing/post_rollout_segments"] == 1
