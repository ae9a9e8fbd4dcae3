"""The shipped jobs' own model, tuner and training sections on the tiny model: bf16, checkpointing, DoRA, resume.

job-3v1 generates its own answers here. job-2v2 has what its name says, two servers and two learner processes, and
trains on answers that are one step old.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml

from tests.integration.runs import adapter, assert_resumes_alike, learn
from tests.support.shapes import make_shapes

pytestmark = pytest.mark.in_turns(2, first=1)
ROOT = Path(__file__).parents[2]
SHIPPED, TWO_BY_TWO = (
    yaml.safe_load((ROOT / f"examples/{name}.yaml").read_text())["spec"]["config"] for name in ("job-3v1", "job-2v2")
)
RECORDS, HELD_OUT, EPOCHS = 12, 2, 2
PROCESSES = 2
# What fits a run of minutes; everything else is the file's own.
SMALLER = {"effective_batch_size": 4, "eval_steps": 3, "save_steps": 3}
STEPS = RECORDS // SMALLER["effective_batch_size"] * EPOCHS
MIDDLE = STEPS // 2
ITS_OWN_ANSWERS = {"rollout_backend": "hf", "rollout_generate_batch_size": 4}


def configuration(shapes, output, *, job=SHIPPED, row=512, answers=ITS_OWN_ANSWERS, **training):
    """A job's configuration at tiny size. row: of how many tokens. answers: where they come from."""
    # The file's layers and mergers, where the tiny model has them.
    regex = job["tuner"]["target_regex"].replace("(0|1|2)", "0").replace("(2[8-9]|3[0-5])", "[23]")
    custom = job["custom"]
    matching = {**custom["extra"]["rollout_matching"], **answers, "max_new_tokens": 60, "maskiou_gate": 0.0}
    return {
        **job,
        "global_max_length": row,
        "model": {**job["model"], "model": str(ROOT / "examples/tiny-qwen3-vl")},
        "template": {},
        "tuner": {**job["tuner"], "target_regex": regex},
        "training": {**job["training"], **SMALLER, **training, "output_dir": str(output)},
        "custom": {
            **custom,
            "train_jsonl": str(shapes / "train.jsonl"),
            "val_jsonl": str(shapes / "held-out.jsonl"),
            "val_sample_limit": 2,
            "user_prompt": "List the shapes.",
            "extra": {"rollout_matching": matching},
        },
    }


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return make_shapes(tmp_path_factory.mktemp("shapes"), train=RECORDS, held_out=HELD_OUT)


@pytest.fixture(scope="module")
def unbroken(shapes, tmp_path_factory):
    """The run from its start to its end: its folder and its steps."""
    output = tmp_path_factory.mktemp("unbroken")
    return output, learn(configuration(shapes, output))[0]


def test_shipped_config_sections_have_expected_settings():
    training, model = SHIPPED["training"], SHIPPED["model"]
    assert (model["torch_dtype"], model["attn_impl"]) == ("bfloat16", "auto")
    assert [training[name] for name in ("bf16", "gradient_checkpointing", "packing")] == [True] * 3
    assert (SHIPPED["tuner"]["use_dora"], SHIPPED["tuner"]["freeze_aligner"]) == (True, False)


def test_shipped_training_completes_with_finite_losses(unbroken):
    _, steps = unbroken
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    for step in steps:
        assert math.isfinite(step["loss"])
        assert math.isfinite(step["grad_norm"])


def test_float32_adapters_on_bfloat16_base_are_all_trained(unbroken):
    output, _ = unbroken
    first, last = adapter(output, MIDDLE), adapter(output, STEPS)
    assert {tensor.dtype for tensor in last.values()} == {torch.float32}
    assert any("merger" in name for name in last)
    assert any("lora_magnitude_vector" in name for name in last)
    assert [name for name, tensor in last.items() if torch.equal(tensor, first[name])] == []


def test_aligner_has_its_own_learning_rate(unbroken):
    output, _ = unbroken
    names = adapter(output, STEPS)
    state = torch.load(output / f"checkpoint-{STEPS}" / "optimizer.pt", weights_only=True)
    counts: dict[float, int] = {}
    for group in state["param_groups"]:
        counts[group["initial_lr"]] = counts.get(group["initial_lr"], 0) + len(group["params"])
    of_aligner = sum("merger" in name for name in names)
    training = SHIPPED["training"]
    assert counts == {training["aligner_lr"]: of_aligner, training["learning_rate"]: len(names) - of_aligner}


def test_resumed_run_ends_with_same_weights(unbroken, shapes, tmp_path):
    assert_resumes_alike(*unbroken, MIDDLE, configuration(shapes, tmp_path))


@pytest.fixture(scope="module")
def addresses(start_module_server):
    """Two servers, in the number format of job-2v2."""
    started = [start_module_server("stub", dtype=TWO_BY_TWO["model"]["torch_dtype"]) for _ in range(2)]
    return [{"base_url": one.base_url, "group_port": one.group_port} for one in started]


@pytest.fixture(scope="module")
def shared_config(shapes, addresses, token_file):
    """A function that returns the configuration of job-2v2 on these servers; two answers fill a row."""
    vllm = TWO_BY_TWO["custom"]["extra"]["rollout_matching"]["vllm"]
    servers, sync = {**vllm["server"], "servers": addresses}, {**vllm["sync"], "verify_every": 1}
    small = {**vllm, "max_model_len": 1024, "max_num_seqs": 8, "server": servers, "sync": sync}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("STAGE2_TOKEN_FILE", str(token_file))
        yield lambda output: configuration(shapes, output, job=TWO_BY_TWO, row=256, answers={"vllm": small}, trace=True)


@pytest.fixture(scope="module")
def shared(shared_config, tmp_path_factory):
    """The run of two processes with two servers, to its end: its folder, its steps, and what it wrote."""
    output = tmp_path_factory.mktemp("shared")
    return output, *learn(shared_config(output), processes=PROCESSES)


def test_both_servers_of_2v2_answer_each_request_once(shared, addresses):
    output, _, _ = shared
    found = [json.loads(line) for path in output.glob("*rollouts.jsonl") for line in path.read_text().splitlines()]
    assert {one["server"] for one in found} == {one["base_url"] for one in addresses}
    asked = Counter((one["part"], one["sample_id"]) for one in found)
    assert sorted(asked.values()) == [EPOCHS] * RECORDS + [1 + STEPS // SMALLER["eval_steps"]] * HELD_OUT


def test_2v2_trains_on_answers_one_step_old_after_first_step_of_epoch(shared):
    _, steps, _ = shared
    later = STEPS // EPOCHS - 1
    assert [step["rollout/staleness"] for step in steps] == [0, *[1] * later] * EPOCHS


def test_both_processes_of_2v2_train_half_the_rows_of_each_step(shared):
    output, steps, _ = shared
    rows = [SMALLER["effective_batch_size"] / step["packing/post_rollout_segments"] for step in steps]
    assert rows == [PROCESSES] * STEPS
    traces = [json.loads((output / name).read_text()) for name in ("trace.json", "rank-1-trace.json")]
    assert [sum(event["name"] == "forward" for event in trace) for trace in traces] == [STEPS] * PROCESSES


def test_each_push_of_2v2_is_merged_and_proved_by_both_servers(shared, addresses):
    _, steps, log = shared
    assert [step["sync/version"] for step in steps] == list(range(STEPS))
    assert {step["sync/merge"] for step in steps if step["sync/bytes"]} == {"server"}
    pushes = 1 + STEPS  # the evaluation at the end has one more
    proofs = [log.count(f"proved: server {one['base_url']} has the learner's log-probabilities") for one in addresses]
    assert proofs == [pushes] * len(addresses)


def test_2v2_resumed_between_epochs_ends_with_same_weights(shared, shared_config, tmp_path):
    """Both processes had the same weights: those that resume from what the first one saved end alike."""
    output, steps, _ = shared
    assert_resumes_alike(output, steps, MIDDLE, shared_config(tmp_path), processes=PROCESSES)
