"""The benchmarks compare like with like, and their tables are Markdown."""

import dataclasses
import os
import signal

import numpy as np
import pytest
import torch
from bench import raw_gloo, scale_model, scale_step, scale_sync, sparse_pushes, sync_model
from bench.__main__ import BENCHMARKS, header, main
from bench.assignment import looped_assignment, looped_candidates
from bench.loss import everything, peak_bytes, portions
from bench.scenes import scene
from bench.slow_servers import SCALE_VARIABLE
from bench.tables import Row, Table
from cryptography.exceptions import InvalidTag
from torch import nn

from stage2_trainer.matching.assign import assign, candidate_pairs
from stage2_trainer.matching.geometry import aabbs

pytestmark = pytest.mark.in_turns(3, first=1)


def test_plain_python_loops_match_library_results():
    pred, gt = (aabbs(side) for side in scene(20, 0.5))
    assert looped_candidates(pred.tolist(), gt.tolist(), 4) == candidate_pairs(pred, gt, 4).tolist()
    costs = np.random.default_rng(0).random((20, 20))
    found = [side.tolist() for side in assign(costs, fp_cost=1.0, fn_cost=1.0)]
    assert looped_assignment(costs.tolist()) == found


def test_table_shows_values_in_unit_and_ratio():
    table = Table("Speed", "ms", 1e3, lambda: iter([Row("all", "peer", 0.002, 0.01, "0")]))
    assert list(table.lines())[-1] == "| all | peer | 2.00 | 10.00 | 5.00 | 0 |\n"


def test_chunked_loss_uses_less_than_half_of_memory():
    shape = (4096, 65536, 8)
    assert peak_bytes(portions, shape) * 2 < peak_bytes(everything, shape)


def test_unknown_benchmark_is_refused_with_known_names(capsys):
    with pytest.raises(SystemExit):
        main(["speed"])
    assert ", ".join(BENCHMARKS) in capsys.readouterr().err


def test_header_shows_versions():
    assert f"numpy {np.__version__}" in header()


def test_sealed_gloo_message_opens_only_with_right_key_and_number():
    plain, opened = torch.arange(300, dtype=torch.int32).to(torch.uint8), torch.zeros(300, dtype=torch.uint8)
    sealed = torch.zeros(300 + raw_gloo.TAG_BYTES, dtype=torch.uint8)
    raw_gloo.seal(plain, sealed, 3, raw_gloo.KEYS[1])
    raw_gloo.unseal(sealed, opened, 3, raw_gloo.KEYS[1])
    assert torch.equal(opened, plain)
    assert not torch.equal(sealed[:300], plain)
    for number, key in ((4, raw_gloo.KEYS[1]), (3, raw_gloo.KEYS[2])):
        with pytest.raises(InvalidTag):
            raw_gloo.unseal(sealed, opened, number, key)


def test_sync_model_counts_bytes_of_8b_adapter():
    """PEFT on Qwen3-8B's shapes (its config.json) has as many: 43.6 million numbers of A and B, 1.4 of magnitudes."""
    assert sync_model.adapter_bytes() == 4 * 36 * (16 * 75_776 + 38_912)
    assert sync_model.touched_weights() == 36 * 192_937_984


def test_sync_model_is_bound_by_network_or_merge():
    free = dataclasses.replace(sync_model.MEASURED, control_s=0.0, link=float("inf"))
    sizes = 2 * sync_model.touched_weights() / sync_model.adapter_bytes()
    for servers in (1, 3):
        assert sync_model.modelled(1e6, servers, float("inf"), free).ratio == pytest.approx(sizes)
    bound = sync_model.modelled(float("inf"), 1, 1, free)
    assert bound.learner == pytest.approx(sync_model.touched_weights() * 1e-9 * free.merge_ns)
    assert bound.ratio < 1
    slow = [sync_model.modelled(network, 1, 16).ratio for network in sync_model.NETWORKS.values()]
    assert slow == sorted(slow, reverse=True)


def test_scale_model_finds_server_count_at_which_sync_takes_tenth_of_step():
    for link in scale_model.LINKS.values():
        servers = scale_model.enough_for(32, link, step_s=73.0)
        assert scale_model.adapter_s(servers, 32, link) <= 7.3 < scale_model.adapter_s(servers + 1, 32, link)


def test_scale_sync_over_tls_survives_killed_receiver():
    layers = scale_sync.Policy()
    with scale_sync.saved(layers) as (policy, folder, _):
        whole, lost, regained = scale_sync.struck(policy, folder, 3, signal.SIGKILL)
        assert max(whole, lost, regained) < scale_sync.PATIENCE_S


def test_two_learner_processes_share_step_of_slow_servers():
    with scale_sync.environment(tls=True):
        os.environ[SCALE_VARIABLE] = "100"
        spent, requests = scale_step.run(scale_step.Layout(2, 2, 1, 100.0))
    assert len(spent) == 2
    assert len(spent[0].steps) == scale_step.STEPS
    assert requests > 1


class Served(nn.Module):
    """A server's model of one layer, which loads as vLLM's do."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)

    def load_weights(self, weights):
        ((name, weight),) = weights
        self.weight.copy_(weight)
        return {name}


def test_patch_of_changed_weights_gives_server_same_bits_also_after_missed_push():
    weight_patches = pytest.importorskip("vllm.model_executor.model_loader.checkpoint_weight_patch")
    torch.manual_seed(0)
    wide = 0.02 * torch.randn(64, 32)
    wide[0] = 0.0  # becomes -0, which equals 0 and has other bits
    held, missed, now = (wide.bfloat16(), (wide + 1e-4).bfloat16(), (wide + 2e-4).bfloat16())
    now[0] = -0.0
    for before, after in ((held, now), (missed, now)):
        server, sent = Served(before), sparse_pushes.patch("weight", before, after)
        weight_patches.load_checkpoint_weight_patches(server, [sent])
        assert torch.equal(server.weight.view(torch.int16), after.view(torch.int16))
        changed = int(sparse_pushes.differs(before, after).sum())
        assert 0 < sparse_pushes.patch_bytes(sent) == 6 * changed < 6 * after.numel()


def test_expected_share_of_changed_weights_equals_simulated_share():
    torch.manual_seed(0)
    weights, updates = 0.02 * torch.randn(1_000_000), torch.randn(1_000_000)
    for rate in sparse_pushes.RATES:
        changed = sparse_pushes.differs(weights.bfloat16(), (weights + rate * updates).bfloat16()).double().mean()
        for binades in (sparse_pushes.binades_of(weights), sparse_pushes.normal_binades(0.02)):
            found = sparse_pushes.expected_share(rate, updates.abs(), binades)
            assert found == pytest.approx(float(changed), rel=0.05)


def test_full_training_changes_more_weights_the_more_pushes_a_server_misses():
    pytest.importorskip("vllm", reason="a push is made by vLLM's patches")
    run = sparse_pushes.trained(sparse_pushes.RATES[0], steps=sparse_pushes.COUNTED + 1)
    assert 0 < run.share() < run.share(sparse_pushes.COUNTED) < 1
    assert run.wide_share() > 0.9


def test_sparse_and_dense_push_take_equal_time_at_break_even_share():
    shape, network = sparse_pushes.an_8b(), sparse_pushes.NETWORKS["100 Gbit/s"]
    for costs in sparse_pushes.COSTS.values():
        even = shape.even_share(network, costs)
        assert shape.sparse_s(even, network, costs) == pytest.approx(shape.dense_s(network, costs))
        assert shape.sparse_s(even / 2, network, costs) < shape.dense_s(network, costs)
