"""Learners of several processes with servers: they learn what one process does, and go on with each other's runs."""

from __future__ import annotations

import json
import os
import shutil
import sys
from functools import cache

import pytest
import yaml

from tests.integration.runs import learn
from tests.integration.struck import BUCKET_BYTES
from tests.integration.test_local_rollouts import assert_same_weights, configuration, zero
from tests.integration.test_stopping_together import LAUNCH, assert_stopped, struck
from tests.support import forked
from tests.support.fork_server import STRUCK
from tests.support.shapes import make_shapes

pytestmark = pytest.mark.in_turns(5, apart=True)

RECORDS = 5  # of a step: two processes cannot halve them
STEPS = 3
FEW = 2  # of a run whose other steps would show nothing more
ALIKE = 1e-5  # float32

FULL = {"tuner": {"train_type": "full", "freeze_vit": True}}
LORA = {"tuner": {"train_type": "lora", "lora_rank": 4, "lora_dropout": 0.1, "freeze_vit": True}}
DORA, ADAPTERS_SENT = "DoRA, rows of the whole step", "adapters sent, rows of a window"
ALL_WEIGHTS, PIPELINED = "all weights, rows of micro-steps", "DoRA, no packing, one step ahead"
SCOPES = {
    DORA: {"matching": {"post_rollout_pack_scope": "step"}},
    ADAPTERS_SENT: {
        **LORA,
        "matching": {"post_rollout_pack_scope": "window", "loss_normalizer": "window"},
        "vllm": {"enable_lora": True, "sync": {"mode": "adapter", "verify_every": 1}},
    },
    ALL_WEIGHTS: FULL,
    PIPELINED: {"training": {"packing": False}, "matching": {"pipeline": {"enabled": True}}},
}
LARGEST_BYTES = 693_760  # of a tensor of the tiny model, in float32


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return make_shapes(tmp_path_factory.mktemp("shapes"), train=RECORDS * STEPS, held_out=3)


@pytest.fixture(scope="module", autouse=True)
def with_token(token_file):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("STAGE2_TOKEN_FILE", str(token_file))
        yield


@pytest.fixture(scope="module")
def config_of(servers, shapes):
    """A function that returns the configuration of a run on one server."""

    def config(output, *, learners, engine="stub", training=None, matching=None, vllm=None, **top):
        served = servers(engine, enable_lora=bool((vllm or {}).get("enable_lora")))
        address = {"base_url": served.base_url, "group_port": served.group_port}
        server = {"servers": [address], "learners": learners}
        vllm = {"mode": "server", "server": server, "sync": {"verify_every": 1}, **(vllm or {})}
        few = {"max_steps": STEPS, "effective_batch_size": RECORDS, "save_steps": 1, "weight_decay": 0.1}
        sampled = {"rollout_backend": "vllm", "temperature": 1.0, "vllm": vllm, **(matching or {})}
        return configuration(shapes, output, training=few | (training or {}), matching=sampled, **top)

    return config


def weights(output, step):
    """The weights in a checkpoint; ZeRO-2 saves a tied table twice."""
    from safetensors.torch import load_file

    (path,) = (output / f"checkpoint-{step}").glob("*model.safetensors")
    found = load_file(path)
    head = found.pop("lm_head.weight", None)
    assert head is None or head.equal(found["model.language_model.embed_tokens.weight"])
    return found


def answers(output):
    """The answers to all records of a run, with their seeds, whichever process wrote them."""
    lines = [json.loads(line) for path in output.glob("*rollouts.jsonl") for line in path.read_text().splitlines()]
    return sorted((one["part"], one["step"], one["sample_id"], one["seed"], one["text"]) for one in lines)


def evaluated(scope):
    """The options of a scope, in a run that is evaluated at its start and at its end."""
    evaluations = {"eval_strategy": "steps", "eval_steps": STEPS}
    return {**SCOPES[scope], "training": evaluations | SCOPES[scope].get("training", {})}


@pytest.fixture(scope="module")
def alone(config_of, tmp_path_factory):
    """A function that returns the folder and the steps of one process's run of a scope."""

    @cache
    def run(scope):
        output = tmp_path_factory.mktemp("alone")
        return output, learn(config_of(output, learners="one", **evaluated(scope)))[0]

    return run


@pytest.fixture(scope="module")
def together(config_of, tmp_path_factory):
    """The same of two processes, with what they wrote; those of one scope are on two machines, as a JobSet's pods."""

    @cache
    def run(scope):
        output = tmp_path_factory.mktemp("together")
        where = {"processes": 1, "machines": 2} if scope == ALL_WEIGHTS else {"processes": 2}
        return output, *learn(config_of(output, learners="sharded", **evaluated(scope)), **where)

    return run


@pytest.mark.parametrize("scope", SCOPES)
def test_two_processes_train_like_one(alone, together, scope):
    (one, expected), (two, steps, log) = alone(scope), together(scope)
    assert_same_figures(steps, expected)
    assert_same_weights(weights(one, STEPS), weights(two, STEPS), ALIKE)
    assert answers(two) == answers(one)
    assert log.count("has the learner's log-probabilities") >= STEPS, "each sync is proved, by one process"


def struck_in(phase, **environment):
    """A function that runs a learner's command as two processes that are struck in a phase (`struck`)."""

    def run(command, *, env, imports):
        command = [sys.executable, "-c", LAUNCH, STRUCK, command[2], phase]
        return forked.run(command, imports=(*forked.LEARNER, STRUCK), env={**env, **environment})

    return run


def assert_same_figures(steps, expected):
    for figure in ("loss", "grad_norm", "loss/ce", "loss/coord"):
        assert [step[figure] for step in steps] == pytest.approx([step[figure] for step in expected], rel=ALIKE), figure


@pytest.mark.vllm
def test_two_processes_with_vllm_train_like_one(config_of, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    few = {"engine": "vllm", "training": {"max_steps": FEW, "save_strategy": "no"}}
    expected, _ = learn(config_of(one, learners="one", **few))
    steps, log = learn(config_of(two, learners="sharded", **few), processes=2)
    assert_same_figures(steps, expected)
    assert answers(two) == answers(one)
    assert log.count("has the learner's log-probabilities") == FEW, "each sync is proved, by one process"


def zero_with_weights(stage):
    """ZeRO whose checkpoints have whole weights as well, and which keeps none whole for longer than a layer needs.

    So each gather makes processes meet; with sanity checks letting go does, too.
    """
    config = zero(stage)
    config["zero_optimization"] |= {
        "enable_sanity_checks": True,
        "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
    }
    return config


@pytest.mark.parametrize("scope", [DORA, ADAPTERS_SENT, ALL_WEIGHTS])
def test_zero_3_trains_like_one_process_with_bounded_push_memory(alone, config_of, tmp_path, scope):
    """A save touches what does not train, which the next push sends again: nothing is saved before the end."""
    one, expected = alone(scope)
    whole = {**SCOPES[scope], "training": {"save_steps": STEPS}}
    config = config_of(tmp_path, learners="sharded", deepspeed=zero_with_weights(3), **whole)
    steps, log = learn(config, processes=2, run=struck_in("pushes"))
    assert_same_figures(steps, expected)
    assert_same_weights(weights(one, STEPS), weights(tmp_path, STEPS), ALIKE)
    assert steps[1]["sync/bytes"] == expected[1]["sync/bytes"], "what can have changed"
    assert log.count("has the learner's log-probabilities") >= STEPS
    for process in range(2):
        held = json.loads((tmp_path / f"whole-{process}.json").read_text())
        assert 0 < held["push"] <= BUCKET_BYTES + LARGEST_BYTES < held["all"] / 4
        assert 0 < held["proof"] <= 2 * LARGEST_BYTES, "as a forward pass in training"


def test_server_lost_during_zero_3_push_does_not_change_training(alone, config_of, start_server, tmp_path):
    lost = start_server("stub")
    few = {**FULL, "training": {"max_steps": FEW}}
    config = config_of(tmp_path, learners="sharded", deepspeed=zero_with_weights(3), **few)
    vllm = config["custom"]["extra"]["rollout_matching"]["vllm"]
    vllm["server"]["servers"].append({"base_url": lost.base_url, "group_port": lost.group_port})
    steps, log = learn(config, processes=2, run=struck_in("server", STRUCK_SERVER=str(lost.process.pid)))
    assert "attempt 1 of 3 at step 1" in log
    assert_same_figures(steps, alone(ALL_WEIGHTS)[1][:FEW])


def test_rank_0_stopped_during_zero_3_push_stops_other_process(config_of, tmp_path):
    unsaved = {"save_strategy": "no"}
    config = config_of(tmp_path, learners="sharded", deepspeed=zero_with_weights(3), training=unsaved, **FULL)
    assert_stopped(tmp_path, struck(tmp_path, config, "push"), "checkpoint-1")


def test_rank_0_failing_during_zero_3_push_ends_other_process(config_of, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config_of(tmp_path, learners="sharded", deepspeed=zero_with_weights(3), **FULL)))
    done = struck_in("fault")(["", "", path], env=dict(os.environ), imports=())
    assert done.returncode == 1
    assert "RuntimeError: a fault of the learner itself" in done.stderr


@pytest.mark.parametrize("stage", [None, 2, 3], ids=["DDP", "ZeRO-2", "ZeRO-3"])
def test_run_resumes_with_different_number_of_processes(alone, together, config_of, tmp_path, stage):
    """It ends as one process does that nothing stops.

    Decayed weights and biases, which are not, have options and counts of steps of their own.
    """
    scope, deepspeed = DORA, {}
    if stage:
        scope, deepspeed = ALL_WEIGHTS, {"deepspeed": zero_with_weights(stage)}

    def go_on(processes, step):
        config = config_of(tmp_path, learners="sharded", **SCOPES[scope], **deepspeed)
        config["training"]["max_steps"] = step
        return learn(config, processes=processes)

    first = 1 if stage else 2
    if stage:
        go_on(2, 1)
    else:  # of two processes that nothing stopped either
        shutil.copytree(together(scope)[0] / "checkpoint-1", tmp_path / "checkpoint-1")
    for step, processes in ((2, 1), (3, 2)):
        steps, log = go_on(processes, step)
        assert f"resuming from {tmp_path / f'checkpoint-{step - 1}'}" in log
    output, expected = alone(scope)
    assert [one["step"] for one in steps] == list(range(first, STEPS + 1))
    assert_same_figures(steps, expected[first - 1 :])
    assert_same_weights(weights(output, STEPS), weights(tmp_path, STEPS), ALIKE)
    assert not list(tmp_path.rglob("*universal")), "the state in one piece is removed"
