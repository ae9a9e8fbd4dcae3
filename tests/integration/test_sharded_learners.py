"""Learners of several processes with servers: they learn what one process does, and go on with each other's runs."""

from __future__ import annotations

import json

import pytest

from tests import forked
from tests.integration.runs import learn
from tests.integration.test_local_rollouts import DEEPSPEED, assert_same_weights, configuration, zero
from tests.shapes import make_shapes

pytestmark = pytest.mark.timeout(400)

RECORDS = 5  # of a step: two processes cannot halve them
STEPS = 3
ALIKE = 1e-5  # float32

FULL = {"tuner": {"train_type": "full", "freeze_vit": True}}
LORA = {"tuner": {"train_type": "lora", "lora_rank": 4, "lora_dropout": 0.0, "freeze_vit": True}}
SCOPES = {
    "DoRA, rows of the whole step": {"matching": {"post_rollout_pack_scope": "step"}},
    "adapters sent, rows of a window": {
        **LORA,
        "matching": {"post_rollout_pack_scope": "window", "loss_normalizer": "window"},
        "vllm": {"enable_lora": True, "sync": {"mode": "adapter", "verify_every": 1}},
    },
    "all weights, rows of micro-steps": FULL,
    "DoRA, no packing, one step ahead": {"training": {"packing": False}, "matching": {"pipeline": {"enabled": True}}},
}
ON_TWO_MACHINES = "all weights, rows of micro-steps"


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return make_shapes(tmp_path_factory.mktemp("shapes"), train=RECORDS * STEPS, held_out=3)


@pytest.fixture(autouse=True)
def with_token(token_file, monkeypatch):
    monkeypatch.setenv("STAGE2_TOKEN_FILE", str(token_file))


@pytest.fixture
def config_of(servers, shapes):
    """A function that returns the configuration of a run on one server."""

    def config(output, *, learners, engine="stub", training=None, matching=None, vllm=None, **top):
        served = servers(engine, enable_lora=bool((vllm or {}).get("enable_lora")))
        address = {"base_url": served.base_url, "group_port": served.group_port}
        server = {"servers": [address], "learners": learners}
        vllm = {"mode": "server", "server": server, "sync": {"verify_every": 1}, **(vllm or {})}
        few = {"max_steps": STEPS, "effective_batch_size": RECORDS, "save_steps": 1, **(training or {})}
        sampled = {"rollout_backend": "vllm", "temperature": 1.0, "vllm": vllm, **(matching or {})}
        return configuration(shapes, output, training=few, matching=sampled, **top)

    return config


def weights(output, step):
    from safetensors.torch import load_file

    (path,) = (output / f"checkpoint-{step}").glob("*model.safetensors")
    return load_file(path)


def answers(output):
    """The answers to all records of a run, with their seeds, whichever process wrote them."""
    lines = [json.loads(line) for path in output.glob("*rollouts.jsonl") for line in path.read_text().splitlines()]
    return sorted((one["part"], one["step"], one["sample_id"], one["seed"], one["text"]) for one in lines)


@pytest.mark.parametrize("scope", SCOPES)
def test_two_processes_learn_what_one_does(config_of, tmp_path, scope):
    """Those of one scope are on two machines, as pods of a JobSet are."""
    one, two = tmp_path / "one", tmp_path / "two"
    evaluated = {"eval_strategy": "steps", "eval_steps": STEPS, **SCOPES[scope].get("training", {})}
    whole = {**SCOPES[scope], "training": evaluated}
    expected, _ = learn(config_of(one, learners="one", **whole))
    where = {"processes": 1, "machines": 2} if scope == ON_TWO_MACHINES else {"processes": 2}
    steps, log = learn(config_of(two, learners="sharded", **whole), **where)
    assert_same_figures(steps, expected)
    assert_same_weights(weights(one, STEPS), weights(two, STEPS), ALIKE)
    assert answers(two) == answers(one)
    assert log.count("answers as the learner does") >= STEPS, "each sync is proved, by one process"


def assert_same_figures(steps, expected):
    for figure in ("loss", "grad_norm", "loss/ce", "loss/coord"):
        assert [step[figure] for step in steps] == pytest.approx([step[figure] for step in expected], rel=ALIKE), figure


@pytest.mark.vllm
def test_two_processes_train_with_the_answers_of_vllm_as_one_does(config_of, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    few = {"engine": "vllm", "training": {"max_steps": 2, "save_strategy": "no"}}
    expected, _ = learn(config_of(one, learners="one", **few))
    steps, log = learn(config_of(two, learners="sharded", **few), processes=2)
    assert_same_figures(steps, expected)
    assert answers(two) == answers(one)
    assert log.count("answers as the learner does") == 2, "each sync is proved, by one process"


def zero_with_weights(stage):
    """ZeRO whose checkpoints have whole weights as well."""
    config = zero(stage)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return config


def test_zero_3_learns_what_one_process_does(config_of, tmp_path):
    one, two, few = tmp_path / "one", tmp_path / "two", {"max_steps": 2}
    expected, _ = learn(config_of(one, learners="one", training=few, **FULL))
    config = config_of(two, learners="sharded", training=few, deepspeed=zero_with_weights(3), **FULL)
    steps, log = learn(config, processes=2, imports=DEEPSPEED)
    assert_same_figures(steps, expected)
    assert_same_weights(weights(one, 2), weights(two, 2), ALIKE)
    assert log.count("answers as the learner does") >= 2


@pytest.mark.parametrize("stage", [None, 2, 3], ids=["DDP", "ZeRO-2", "ZeRO-3"])
def test_a_run_goes_on_with_another_number_of_processes(config_of, tmp_path, stage):
    """Decayed weights and biases, which are not, have options and counts of steps of their own."""
    whole, changing = tmp_path / "whole", tmp_path / "changing"
    deepspeed, imports = {}, forked.LEARNER
    if stage:
        deepspeed, imports = {**FULL, "deepspeed": zero_with_weights(stage)}, DEEPSPEED

    def run(output, processes, steps):
        few = {"max_steps": steps, "weight_decay": 0.1}
        config = config_of(output, learners="sharded", training=few, **deepspeed)
        return learn(config, processes=processes, imports=imports)[0]

    expected = run(whole, 2, STEPS)
    for step, processes in ((1, 2), (2, 1), (3, 2)):
        steps = run(changing, processes, step)
    assert_same_figures(steps, expected)
    assert_same_weights(weights(whole, STEPS), weights(changing, STEPS), ALIKE)
    assert not list(changing.rglob("*universal")), "the state in one piece is removed"
