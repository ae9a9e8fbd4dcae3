"""Learners that make their own rollouts, as real processes: one, several, with DeepSpeed, stopped and gone on with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stage2_trainer.learner.evaluate import METRICS
from stage2_trainer.sync.vllm.vllm_compat import SHARED_MEMORY, free_shared_memory
from tests.integration.runs import adapter, learn
from tests.support import forked
from tests.support.shapes import make_shapes

pytestmark = pytest.mark.in_turns(3, apart=True)

ROOT = Path(__file__).parents[2]
STEPS = 4
FEW = 2  # steps of the runs that are compared with the first ones of the run alone
ROUNDING = 1e-4  # float32, other orders of additions over several steps


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return make_shapes(tmp_path_factory.mktemp("shapes"), train=12, held_out=4)


def configuration(shapes, output, *, training=None, matching=None, **top):
    return {
        "global_max_length": 512,
        "model": {"model": str(ROOT / "examples/tiny-qwen3-vl"), "torch_dtype": "float32", "attn_impl": "sdpa"},
        "tuner": {"train_type": "lora", "use_dora": True, "lora_rank": 4, "lora_dropout": 0.0, "freeze_vit": True},
        "training": {
            "output_dir": str(output),
            "max_steps": STEPS,
            "per_device_train_batch_size": 1,
            "per_device_eval_batch_size": 4,
            "effective_batch_size": 2,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",  # the first steps of a run are those of a shorter one
            "adam_epsilon": 1e-2,  # a step in proportion to the gradient: rounding of a tiny one cannot turn it around
            "gradient_checkpointing": False,
            "seed": 17,
            "save_steps": 2,
            "packing": True,
            "packing_min_fill_ratio": 0.01,
            **(training or {}),
        },
        "custom": {
            "train_jsonl": str(shapes / "train.jsonl"),
            "val_jsonl": str(shapes / "held-out.jsonl"),
            "user_prompt": "List the shapes.",
            "extra": {
                "rollout_matching": {
                    "rollout_backend": "hf",
                    "rollout_generate_batch_size": 4,
                    "max_new_tokens": 100,
                    "maskiou_gate": 0.0,
                    **(matching or {}),
                }
            },
        },
        **top,
    }


def executed(command, *, env, imports):
    """Run a command line as it is, with all that it imports."""
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def losses(steps):
    return [step["loss"] for step in steps]


def assert_same_weights(one, other, tolerance):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor - other[name]).abs().max() <= tolerance, name


@pytest.fixture(scope="module")
def alone(shapes, tmp_path_factory):
    """One process on four steps, with evaluations: the run that the others are compared with."""
    output = tmp_path_factory.mktemp("alone")
    best = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_rollout_f1"}
    steps, _ = learn(configuration(shapes, output, training=best))
    return output, steps


def test_best_checkpoint_has_best_f1(alone):
    output, _ = alone
    state = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    found = {one["step"]: one["eval_rollout_f1"] for one in state["log_history"] if "eval_rollout_f1" in one}
    saved = {step: f1 for step, f1 in found.items() if step > 0}
    assert state["best_metric"] == max(saved.values())
    assert Path(state["best_model_checkpoint"]).name == f"checkpoint-{max(saved, key=saved.get)}"


def assert_scored_as_by_the_learner(alone, config, *, imports=(), **environment):
    """Score two checkpoints by the command: it has the figures that the run logged at their steps."""
    output, _ = alone
    checkpoints = [f"--checkpoint={output / f'checkpoint-{step}'}" for step in (STEPS, 2)]
    command = [forked.STAGE2, "evaluate", config, *checkpoints, "--resamples=20", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = forked.run(command, imports=(*imports, *forked.LEARNER), env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    logged = [json.loads(line) for line in (output / "stage2_log.jsonl").read_text().splitlines()]
    by_step = {one["step"]: one for one in logged if one["event"] == "evaluation"}
    evaluations = [
        {name: by_step[step][f"eval_rollout_{key}"] for name, key in METRICS.items()} for step in (STEPS, 2, 0)
    ]
    assert [{name: one[name] for name in METRICS} for one in found["files"]] == evaluations[:2]
    assert evaluations[0] != evaluations[1] != evaluations[2], "other weights would score otherwise"
    assert found["differences"][0]["of"] == str(output / "checkpoint-2")


def test_evaluate_command_scores_checkpoint_like_learner(alone):
    assert_scored_as_by_the_learner(alone, alone[0] / "config.yaml")


def test_best_closing_bias_of_checkpoint_is_found_on_separate_records(alone, shapes, tmp_path):
    """Without a bias the figures are those of a plain evaluation; a huge one lists more, and never closes."""
    output, _ = alone
    records = tmp_path / "complete.jsonl"
    records.write_text("".join((shapes / "held-out.jsonl").read_text().splitlines(keepends=True)[:2]))
    (tmp_path / "images").symlink_to(shapes / "images")
    command = [forked.STAGE2, "evaluate", output / "config.yaml", "--checkpoint", output / f"checkpoint-{STEPS}"]
    command += ["--records", records, "--resamples=20", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ROOT_IMAGE_DIR": str(shapes)}

    def evaluated(*words):
        done = forked.run(list(map(str, [*command, *words])), imports=forked.LEARNER, env=environment)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout)

    plain, curve = evaluated(), evaluated("--longer", "0,90", "--picture", tmp_path / "curve.png")
    shortest, longest = curve["files"]
    assert (plain["images"], shortest["longer"], longest["longer"]) == (2, 0.0, 90.0)
    assert {name: shortest[name] for name in METRICS} == {name: plain[name] for name in METRICS}
    assert longest["predictions"] > shortest["predictions"]
    assert longest["parse_rate"] == 0.0
    assert curve["best"] in (0.0, 90.0)
    assert (tmp_path / "curve.png").is_file()


def test_two_processes_train_like_one(alone, shapes, tmp_path):
    output, steps = alone
    together, _ = learn(configuration(shapes, tmp_path, training={"max_steps": FEW}), processes=2, run=executed)
    assert losses(together) == pytest.approx(losses(steps)[:FEW], rel=ROUNDING)
    assert [step["rollout/gt_objects"] for step in together] == [step["rollout/gt_objects"] for step in steps[:FEW]]
    assert_same_weights(adapter(output, FEW), adapter(tmp_path, FEW), ROUNDING)


def test_two_processes_share_odd_epoch_without_duplicate_samples(shapes, tmp_path):
    epoch = {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 2, "effective_batch_size": 4}
    config = configuration(shapes, tmp_path, training={**epoch, "learning_rate": 0.0, "save_strategy": "no"})
    config["custom"]["train_sample_limit"] = 5  # batches of 2, 1, 1, 1
    learn(config, processes=2)
    written = [path.read_text().splitlines() for path in tmp_path.glob("*rollouts.jsonl")]
    names = [json.loads(line)["sample_id"] for lines in written for line in lines]
    assert len(written) == 2
    assert len(names) == len(set(names)) == 5


def zero(stage):
    pytest.importorskip("deepspeed")
    return {
        "zero_optimization": {"stage": stage, "overlap_comm": False, "contiguous_gradients": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


WHOLE = {
    # Steps in proportion to whole gradients; DeepSpeed would compile an Adam of its own for what it offloads.
    "training": {
        "max_steps": FEW,
        "save_strategy": "no",
        "effective_batch_size": 8,
        "optim": "sgd",
        "max_grad_norm": 0.0,
    },
    "matching": {"post_rollout_pack_scope": "step"},
    "global_max_length": 256,  # several rows a step and process
}


@pytest.fixture(scope="module")
def whole(shapes, tmp_path_factory):
    """One process on whole steps."""
    return learn(configuration(shapes, tmp_path_factory.mktemp("whole"), **WHOLE))[0]


@pytest.mark.parametrize(("stage", "offloaded"), [(2, ["optimizer"]), (3, [])])
def test_whole_step_losses_do_not_depend_on_processes_or_deepspeed(whole, shapes, tmp_path, stage, offloaded):
    one, sharded = whole, zero(stage)
    sharded["zero_optimization"] |= {f"offload_{part}": {"device": "cpu"} for part in offloaded}
    two, _ = learn(configuration(shapes, tmp_path, deepspeed=sharded, **WHOLE), processes=2)
    assert two[0]["packing/post_rollout_segments"] < 4, "a process's four records are several rows"
    assert losses(two) == pytest.approx(losses(one), rel=ROUNDING)
    assert [step["rollout/gt_objects"] for step in two] == [step["rollout/gt_objects"] for step in one]


@pytest.fixture
def left_by_a_killed_engine(no_other_engine):
    """Shared memory as a killed engine leaves it; a forked one, which no C++ exit handler ends, leaves its own too."""
    (SHARED_MEMORY / "-tp:0-[0-1]-cpushm_0").touch()
    yield
    free_shared_memory([0, 1])


COLOCATE = {
    "mode": "colocate",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "limit_mm_per_prompt": {"image": 1, "video": 0},
    "mm_encoder_tp_mode": "data",
    "sync": {"verify_every": 1},
}


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("processes", "tensor_parallel", "stage"),
    [(1, 1, None), (2, 2, None), (2, 1, 3)],
    ids=["one process", "an engine of two processes", "two processes and engines, ZeRO-3"],
)
def test_colocated_engine_answers_with_weights_of_every_step(
    alone, shapes, tmp_path, left_by_a_killed_engine, processes, tensor_parallel, stage
):
    matching = {"rollout_backend": "vllm", "vllm": {**COLOCATE, "tensor_parallel_size": tensor_parallel}}
    few = {"max_steps": FEW, "save_strategy": "no"}
    sharded = {} if stage is None else {"deepspeed": zero(stage)}
    config = configuration(shapes, tmp_path, training=few, matching=matching, **sharded)
    imports = (*forked.VLLM, *forked.LEARNER)
    steps, output = learn(config, processes=processes, imports=imports)
    # each sync is proved: log-probabilities of a prompt with an image, against the learner's own
    assert output.count("proved: the colocated engine has the learner's log-probabilities") == FEW * processes
    assert [step["sync/version"] for step in steps] == list(range(FEW))
    assert losses(steps) == pytest.approx(losses(alone[1])[:FEW], rel=ROUNDING), "it answers as the learner itself"
    assert "drafts of up to 24 tokens by FrameProposer" in output
    assert 0 < steps[0]["rollout/decode_steps_per_token"] < 1, "frames are drafted"
    if stage is None:
        assert steps[0]["sync/bytes"] > steps[1]["sync/bytes"] > 0, "later syncs carry what trains"


def forgetful(command, *, env, imports):
    """Learn as the command would, with an engine that loses its weights in each sleep."""
    code = "import sys; from tests.integration.forgetful_engine import learn; sys.exit(learn(sys.argv[1]))"
    return forked.run([sys.executable, "-c", code, str(command[2])], imports=imports, env=env)


@pytest.mark.vllm
def test_colocated_engine_with_sleep_level_2_answers_with_weights_of_each_step(
    alone, shapes, tmp_path, no_other_engine
):
    """An evaluation of each step comes first, and the engine sleeps after it: the step's rollouts need a sync too."""
    vllm = {**COLOCATE, "tensor_parallel_size": 1, "sleep_level": 2}
    few = {"max_steps": FEW, "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 1}
    config = configuration(shapes, tmp_path, training=few, matching={"rollout_backend": "vllm", "vllm": vllm})
    steps, output = learn(config, run=forgetful, imports=(*forked.VLLM, *forked.LEARNER))
    assert losses(steps) == pytest.approx(losses(alone[1])[:FEW], rel=ROUNDING), "it answers as the learner itself"
    evaluations = FEW + 1  # one before the first step
    assert output.count("proved: the colocated engine has the learner's log-probabilities") == FEW + evaluations
    assert [step["sync/version"] for step in steps] == list(range(FEW))
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert {(line["step"], line["version"]) for line in lines} == {(step, step) for step in range(evaluations)}
    assert len({step["sync/bytes"] for step in steps}) == 1, "each sync sends all weights"


@pytest.mark.vllm
@pytest.mark.parametrize("mode", ["server", "colocate"])
def test_evaluate_command_with_vllm_scores_checkpoint_like_learner(alone, shapes, tmp_path, servers, token_file, mode):
    vllm = COLOCATE
    if mode == "server":
        served = servers("vllm")
        address = {"base_url": served.base_url, "group_port": served.group_port}
        vllm = {**COLOCATE, "mode": "server", "server": {"servers": [address]}}
    config = configuration(shapes, tmp_path / "out", matching={"rollout_backend": "vllm", "vllm": vllm})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    imports = forked.VLLM if mode == "colocate" else ()
    assert_scored_as_by_the_learner(alone, tmp_path / "config.yaml", imports=imports, STAGE2_TOKEN_FILE=str(token_file))
    assert not (tmp_path / "out").exists()


@pytest.mark.vllm
def test_engine_that_fails_to_start_suggests_hf_backend(shapes, tmp_path):
    vllm = {**COLOCATE, "mm_encoder_tp_mode": "weights", "max_num_batched_tokens": 1}
    config = configuration(shapes, tmp_path, matching={"rollout_backend": "vllm", "vllm": vllm})
    with pytest.raises(AssertionError, match="rollout_backend: hf"):
        learn(config, imports=(*forked.VLLM, *forked.LEARNER))
