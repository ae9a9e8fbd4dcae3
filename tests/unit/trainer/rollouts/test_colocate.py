"""A colocated engine: what the configuration makes of it, whose requests it answers, and when it must prove itself.

In several processes a contradiction of one ends all, and all together prove a step.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from transformers import Qwen3VLForConditionalGeneration

from stage2_api.errors import ConfigError
from stage2_trainer.model.offload import DeviceMover, StateOffloader
from stage2_trainer.model.transformers_compat import disable_cache
from stage2_trainer.process.interrupt import Interrupt, Interrupted
from stage2_trainer.rollouts import colocate
from stage2_trainer.rollouts.build import engine_environment, engine_options
from stage2_trainer.rollouts.colocate import ColocateEngine, EngineProver, TensorParallel, _Call, groups, own_slice
from stage2_trainer.rollouts.errors import VersionError
from stage2_trainer.rollouts.in_process import ColocateRollouts
from stage2_trainer.rollouts.rollout_source import GenerationRequest, require_version
from stage2_trainer.sync.fleet.proof import FLOAT32_TOLERANCE, Probe, learner_logprobs
from stage2_trainer.sync.fleet.report import ProofError, ProvedStep
from stage2_trainer.sync.tensors.merge import WeightEntry, WeightSource, held_after, stale_names
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.requests import UNSYNCED, RolloutRequest, Sampling, SeedPlan
from tests.unit.trainer.conftest import TINY_MODEL
from tests.unit.trainer.learner.configs import run_config
from tests.unit.trainer.learner.processes import run_members

pytestmark = pytest.mark.in_turns(2, apart=True)
COLOCATE = {"mode": "colocate", "max_model_len": 1024}


def options(*, world_size=1, on_cpu=True, **vllm):
    config = run_config(matching={"vllm": {**COLOCATE, **vllm}}, template={"max_pixels": 9216})
    return engine_options(config, world_size=world_size, on_cpu=on_cpu)


def test_default_options_suit_shared_gpu():
    found = options(on_cpu=False)
    assert found["gpu_memory_utilization"] == 0.45
    assert found["load_format"] == "dummy"
    assert found["enable_prefix_caching"] is True
    assert found["enable_sleep_mode"] is False
    assert found["tensor_parallel_size"] == 1
    assert "distributed_executor_backend" not in found


def test_four_processes_share_one_engine_by_default():
    assert options(world_size=4)["tensor_parallel_size"] == 4
    assert options(world_size=4, tensor_parallel_size=2)["tensor_parallel_size"] == 2
    assert options(world_size=8)["tensor_parallel_size"] == 1
    assert options(world_size=4)["distributed_executor_backend"] == "external_launcher"


def test_image_normalization_on_device_is_disabled_for_dummy_weights():
    assert options()["mm_device_do_normalize"] is False
    assert "mm_device_do_normalize" not in options(load_format="auto")


def test_image_limits_and_user_options_reach_engine():
    found = options(max_num_batched_tokens=64, limit_mm_per_prompt={"image": 2}, swap_space=1.0)
    assert found["mm_processor_kwargs"] == {"max_pixels": 9216}
    assert (found["max_num_batched_tokens"], found["limit_mm_per_prompt"]) == (64, {"image": 2})
    assert "swap_space" not in found


def test_packing_settings_do_not_change_engine_options():
    packed = run_config(
        matching={"vllm": COLOCATE}, training={"packing": True}, global_max_length=512, template={"max_pixels": 9216}
    )
    assert engine_options(packed, world_size=1, on_cpu=True) == options()


def test_cpu_engine_runs_in_same_process():
    assert engine_environment(on_cpu=True, eager=True)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_eager_cpu_engine_disables_compilation():
    assert engine_environment(on_cpu=True, eager=True)["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in engine_environment(on_cpu=True, eager=False)
    assert "TORCHDYNAMO_DISABLE" not in engine_environment(on_cpu=False, eager=True)


def test_gpu_engine_disables_flashinfer_sampler_that_needs_nvcc():
    assert engine_environment(on_cpu=False, eager=True)["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in engine_environment(on_cpu=True, eager=True)


def test_adjacent_processes_form_tensor_parallel_groups():
    assert groups(4, 1) == [[0], [1], [2], [3]]
    assert groups(8, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("counts", [[3], [2, 0, 3], [0, 0], [1, 4]])
def test_slices_of_all_members_cover_everything_once(counts):
    everything = list(range(sum(counts)))
    parts = [everything[own_slice(counts, place)] for place in range(len(counts))]
    assert [len(part) for part in parts] == counts
    assert [item for part in parts for item in part] == everything


def test_tensor_parallel_group_of_one_needs_no_communication():
    assert TensorParallel(1).together(["a", "b"]) == (["a", "b"], slice(0, 2))


class Llm:
    """An engine that does as it is told."""

    def sleep(self, *, level):
        pass

    def reset_prefix_cache(self):
        return True


def engine(**fields):
    made = ColocateEngine({}, {}, sampling=Sampling(max_new_tokens=1), prover=None, **fields)
    made._llm = Llm()
    return made


@pytest.mark.parametrize(("level", "stale"), [(0, set()), (1, set()), (2, {"w"})])
def test_engine_after_sleep_level_2_is_sent_all_weights(level, stale):
    weights = WeightSource((WeightEntry("w", torch.zeros(2), None, trains=False),))
    made = engine(sleep_level=level)
    made._held = held_after(weights)
    made._sleep()
    assert stale_names(made._held, weights) == stale


class ForgetfulLlm(Llm):
    """Stands in for vLLM: it answers with the weights that it holds, and loses them in a sleep of level 2."""

    def __init__(self):
        self.held, self.awake, self.loads = {}, {"weights", "kv_cache"}, 0

    def sleep(self, *, level):
        self.awake = set()
        if level == 2:
            self.held = {name: torch.zeros_like(tensor) for name, tensor in self.held.items()}

    def wake_up(self, *, tags):
        assert not self.awake & set(tags), "vLLM ignores the whole call"
        self.awake |= set(tags)

    def apply_model(self, load):
        assert "weights" in self.awake
        self.loads += 1
        load(self)


class Reload:
    """Stands in for `LayerReload`: loads weights into the stand-in's dict."""

    def __init__(self, model, config):
        self._model = model

    def load(self, weights):
        self._model.held |= {name: tensor.clone() for name, tensor in weights}

    def require_whole(self):
        pass

    def finish(self):
        pass


class ForgetfulEngine(ColocateEngine):
    """The real engine class over the stand-in; an answer's text has the sum of all weights that it was made with."""

    def start(self):
        if self._llm is None:
            self._parallel, self._llm = TensorParallel(1), ForgetfulLlm()
            self._llm.model_config = None
            self._sleep()

    def _generate_part(self, requests):
        assert self._llm.awake == {"weights", "kv_cache"}
        total = sum(float(tensor.double().abs().sum()) for tensor in self._llm.held.values())
        choice = SimpleNamespace(token_ids=[1], text=str(total), finish_reason="stop", spec_decode_metrics=None)
        return [SimpleNamespace(outputs=[choice], prompt_token_ids=[1], request_id="0") for _ in requests]


@pytest.fixture
def colocated(monkeypatch):
    """A function that returns rollouts by a forgetful engine."""
    monkeypatch.setattr(colocate, "LayerReload", Reload)
    monkeypatch.setattr(colocate, "drop_image_caches", lambda llm: None)

    def make(**fields):
        prover = SimpleNamespace(after_sync=lambda model, logprobs, step: None, gap=0.0)
        engine = ForgetfulEngine({}, {}, sampling=Sampling(max_new_tokens=1), prover=prover, **fields)
        offload = StateOffloader(DeviceMover(torch.device("cpu")), model=False, optimizer=False)
        known = {"sync_mode": "full", "seed": 17, "reporter": Reporter(), "interrupt": Interrupt()}
        return ColocateRollouts(engine, offload, **known), engine

    return make


def asked_at(source, model, step):
    """Ask for one rollout by the weights of a step; returns the answer and the sync before it."""
    chat = [{"role": "user", "content": "List the shapes."}]
    batch = source.generate(GenerationRequest(model, [chat], step, 0, Stopwatch()))
    return batch.rollouts[0], batch.sync


@pytest.mark.parametrize("level", [0, 1, 2])
def test_every_answer_comes_from_weights_of_its_step_at_any_sleep_level(colocated, model, level):
    """An evaluation after step 1 asks first, then the rollouts of that step, and then those of the next."""
    source, _ = colocated(sleep_level=level)
    answers = []
    for step in (0, 0, 1, 1, 1, 0):
        with torch.no_grad():
            next(iter(model.parameters())).fill_(step + 1.0)
        answers.append((step, *asked_at(source, model, step)))
    texts = {step: {answer.text for at, answer, _ in answers if at == step} for step in (0, 1)}
    assert len(texts[0]) == len(texts[1]) == 1, "all answers of a step are alike"
    assert texts[0] != texts[1]
    assert "0.0" not in texts[0] | texts[1]
    assert [answer.version for _, answer, _ in answers] == [0, 0, 1, 1, 1, 0]
    synced = [sync.version if sync else None for *_, sync in answers]
    assert synced == ([0, 0, 1, 1, 1, 0] if level == 2 else [0, None, 1, None, None, 0])


def test_engine_that_slept_between_requests_is_synced_again(colocated, model):
    source, engine = colocated(sleep_level=2)
    first, _ = asked_at(source, model, 3)
    engine._wake("weights", "kv_cache")
    engine._sleep()
    again, sync = asked_at(source, model, 3)
    assert (again.text, again.version, sync.version) == (first.text, 3, 3)


class Card(DeviceMover):
    """A card that learner and engine share: what is on it, and each that comes and goes, in order."""

    def __init__(self, engine):
        super().__init__(torch.device("cpu"))
        self._engine, self.moved, self.there = engine, [], [{"learner"}]

    def away(self, tensor):
        self.moved.append("away")

    def back(self, tensor):
        self.moved.append("back")

    def note(self):
        """Note what is on the card now."""
        learner = set() if self.moved and self.moved[-1] == "away" else {"learner"}
        self.there.append(learner | self._engine._llm.awake)


@pytest.mark.parametrize("proves", [True, False])
@pytest.mark.parametrize("level", [1, 2])
def test_learner_weights_and_kv_cache_are_never_on_gpu_together(colocated, model, level, proves):
    source, engine = colocated(sleep_level=level)
    engine.start()
    card = Card(engine)
    source._offload = StateOffloader(card, model=True, optimizer=False)
    wake, done = engine._llm.wake_up, []

    def waking(*, tags):
        wake(tags=tags)
        card.note()

    def after_sync(learner, logprobs, *, step):
        assert learner is model
        done.append("the learner computes its side")
        card.note()
        if proves:
            logprobs(Probe([], {}))

    engine._llm.wake_up = waking
    engine._prover.after_sync = after_sync
    engine.prompt_logprobs = lambda probe: (card.note(), done.append("the engine computes its side"))
    asked_at(source, model, 1)
    both = {"weights", "kv_cache"}
    assert {frozenset(one) for one in card.there} == {
        frozenset(one) for one in ({"learner"}, {"learner", "weights"}, both)
    }
    assert done == ["the learner computes its side", "the engine computes its side"][: 1 + proves]
    count = len(list(model.parameters()))
    assert card.moved == (["away"] * count + ["back"] * count) * 2, "for the engine's start, and for proof and answers"
    assert engine._llm.awake == set()


@pytest.mark.parametrize(
    ("tag", "path"),
    [
        ("weights", "tensor_parallel_size: 1; must leave room on the GPU for the engine's weights"),
        ("kv_cache", "gpu_memory_utilization: 0.45; must leave room on the GPU for the engine's kv_cache"),
    ],
)
def test_out_of_memory_error_of_waking_engine_names_setting_to_lower(colocated, model, tag, path):
    source, engine = colocated(sleep_level=1)
    engine._options = {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.45}
    engine.start()
    wake = engine._llm.wake_up

    def waking(*, tags):
        if tag in tags:
            raise RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:139")
        wake(tags=tags)

    engine._llm.wake_up = waking
    with pytest.raises(ConfigError, match=re.escape(path)) as raised:
        asked_at(source, model, 1)
    assert "offload.enabled" in str(raised.value)
    assert "cumem_allocator" in str(raised.value), "vLLM's own words"


def test_other_error_of_waking_engine_is_not_reported_as_out_of_memory(colocated, model):
    source, engine = colocated(sleep_level=1)
    engine.start()

    def waking(*, tags):
        raise RuntimeError("CUDA Error: invalid argument")

    engine._llm.wake_up = waking
    with pytest.raises(RuntimeError, match="invalid argument"):
        asked_at(source, model, 1)


def test_learner_weights_return_to_gpu_after_failed_proof(colocated, model):
    source, engine = colocated(sleep_level=1)
    engine.start()
    card = Card(engine)
    source._offload = StateOffloader(card, model=True, optimizer=False)

    def after_sync(learner, logprobs, *, step):
        logprobs(Probe([], {}))

    def prompt_logprobs(probe):
        raise ProofError("other ids")

    engine._prover.after_sync, engine.prompt_logprobs = after_sync, prompt_logprobs
    with pytest.raises(ProofError):
        asked_at(source, model, 1)
    assert card.moved.count("away") == card.moved.count("back") > 0


def test_answer_from_other_weight_version_stops_run(colocated, model):
    source, engine = colocated()
    asked_at(source, model, 3)
    generate = engine.generate

    def stale(requests, *, seed_plan):
        engine.version = 2
        return generate(requests, seed_plan=seed_plan)

    engine.generate = stale
    with pytest.raises(VersionError) as found:
        asked_at(source, model, 3)
    assert str(found.value).startswith("step 3: an answer of colocate comes from weights of step 2, not from those of")
    engine.generate = generate
    engine.version = 3
    assert asked_at(source, model, 3)[0].version == 3


def test_answers_of_engine_that_was_never_synced_are_refused(colocated):
    _, engine = colocated()
    engine.start()
    (answer,) = engine.generate([RolloutRequest([])], seed_plan=SeedPlan(17, 0, 0))
    assert answer.version == UNSYNCED
    with pytest.raises(VersionError, match="comes from weights that this run has not sent"):
        require_version([answer], 0)


def test_each_request_has_its_bias_and_seed_in_sampling_params():
    asked, made = [], engine()
    made._llm.chat = lambda chats, sampling, use_tqdm: asked.extend(sampling) or chats
    made._chat([_Call([], 5, {99: -1.5}), _Call([], 6, {})])
    assert [(one.seed, one.logit_bias) for one in asked] == [(5, {99: -1.5}), (6, None)]


def test_engine_drops_image_caches_when_vision_weights_change(monkeypatch):
    dropped = []
    monkeypatch.setattr(colocate, "drop_image_caches", lambda llm: dropped.append("images"))
    for vision in (False, True, False):
        engine()._forget(vision=vision)
    assert dropped == ["images"]


@pytest.fixture
def probe(model, encoder, chats):
    disable_cache(model)
    prompt = encoder.prompt(chats[0])
    inputs = {
        "input_ids": prompt.input_ids[None],
        "mm_token_type_ids": prompt.mm_token_type_ids[None],
        "pixel_values": prompt.pixel_values,
        "image_grid_thw": prompt.image_grid_thw,
    }
    return Probe(messages=chats[0], inputs=inputs)


def test_engine_with_different_weights_fails_proof(model, probe):
    def right(asked):
        return learner_logprobs(model, asked.inputs)

    def wrong(asked):
        return right(asked) + 0.01

    EngineProver(probe, every=1).after_sync(model, right, step=1)
    with pytest.raises(ProofError, match=r"differ from the learner.s by 0\.01 in the mean"):
        EngineProver(probe, every=1).after_sync(model, wrong, step=1)
    with pytest.raises(ProofError):
        EngineProver(probe, every=1).after_sync(model, lambda asked: right(asked) * torch.nan, step=1)


IN_DOUBT = 2 * FLOAT32_TOLERANCE
STOP = None
"""In the place of a distance: answers are not wanted any more."""


def member(rank, folder, every, syncs):
    """syncs: how far the engines of both processes are off, sync by sync."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    ids = torch.arange(2, 60).unsqueeze(0)
    probe = Probe(messages=[], inputs={"input_ids": ids, "mm_token_type_ids": torch.zeros_like(ids)})
    model = Qwen3VLForConditionalGeneration.from_pretrained(TINY_MODEL, dtype=torch.float32)
    disable_cache(model)
    proved, found, message = ProvedStep(), [], ""
    prover = EngineProver(probe, every=every, proved=proved)

    def answered(asked, off):
        if off is STOP:
            raise Interrupted("asked to stop")
        return learner_logprobs(model, asked.inputs) + off

    try:
        for step, off in enumerate(syncs):
            prover.after_sync(model, lambda asked, off=off: answered(asked, off[rank]), step=step)
            found.append(proved.step)
    except (ProofError, Interrupted) as error:
        message = str(error)
    Path(folder, f"{rank}.json").write_text(json.dumps([found, message]))


def run(folder, every, *syncs):
    """The proved steps after each sync, and the last words, of both processes."""
    run_members(member, folder, str(folder), every, syncs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_failed_proof_in_one_process_stops_both_and_doubtful_proof_counts_in_neither(tmp_path):
    first, second = run(tmp_path, 1, (0.0, 0.0), (0.0, IN_DOUBT), (0.0, 0.0), (0.0, 1.0))
    assert first == second
    assert first[0] == [0, 0, 2]
    assert first[1].startswith("learner process 1: after the weight sync, log-probabilities")


def test_both_processes_repeat_proof_together_after_doubt_in_one(tmp_path):
    calm = (0.0, 0.0)
    first, second = run(tmp_path, 3, (0.0, IN_DOUBT), *[calm] * 6)
    assert first == second
    assert first[0] == [None, 1, 1, 1, 4, 4, 4]


def test_process_stopped_during_proof_does_not_block_others(tmp_path):
    (steps, message), (other_steps, other_said) = run(tmp_path, 1, (0.0, 0.0), (STOP, 0.0))
    assert (steps, message) == ([0], "asked to stop")
    assert (other_steps, other_said) == ([0, 0], "")


COUNTS = (2, 0, 1, 3)


def gathering(rank, folder):
    """One of two groups of two processes, each with requests of its own."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=len(COUNTS))
    mine = [f"{rank}.{i}" for i in range(COUNTS[rank])]
    everyone, own = TensorParallel(2).together(mine)
    Path(folder, f"{rank}.json").write_text(json.dumps([mine, everyone, everyone[own]]))


def test_each_member_gathers_requests_of_its_group_and_keeps_its_own_slice(tmp_path):
    run_members(gathering, tmp_path, str(tmp_path), count=len(COUNTS))
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(len(COUNTS))]
    assert all(mine == kept for mine, _, kept in found)
    assert found[0][1] == found[1][1] == ["0.0", "0.1"]
    assert found[2][1] == found[3][1] == ["2.0", "3.0", "3.1", "3.2"]
