"""What a push leaves in the log of a real vLLM server, and what it does with weights that vLLM does not load."""

import pytest

from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError
from tests.integration import policies

pytestmark = pytest.mark.in_turns(3, first=1)

PUSHES = 200
EVERY_10_S = "Avg prompt throughput"  # of vLLM, which counts answers to earlier tests too


def test_adapter_push_is_single_line_in_server_log(servers, make_sync, base, token, probe):
    served = servers("vllm")
    policy, sync = policies.adapter_of(base, "dora"), make_sync(served)
    sync.push(policy, version=1)
    before = len(served.log.read_text().splitlines())
    for version in range(2, 2 + PUSHES):
        policies.train_on(policy, 1e-4)
        assert not sync.push(policy, version=version).everything
    lines = [line for line in served.log.read_text().splitlines()[before:] if EVERY_10_S not in line]
    assert len(lines) == PUSHES, "\n".join(lines[:20])
    assert all("16 layers have new weights, and" in line for line in lines), lines[0]
    verify(served, token, policy, probe)


def test_push_fails_when_vllm_does_not_load_some_weights(start_server, make_sync, base, token, probe):
    """A part of a fused layer would leave garbage in the rest, and a layer left out of the first push is random."""
    served = start_server("vllm", prepared=True)
    lost = served.log.with_suffix(".lost")
    policy, sync = policies.adapter_of(base, "lora"), make_sync(served)

    def push_without(name: str, broken: str) -> None:
        lost.write_text(name)
        with pytest.raises(ServerError, match=rf"weights did not reach language_model\.model\.layers\.1\.{broken}, or"):
            sync.push(policy, version=1)
        lost.unlink()

    push_without("layers.1.mlp.down_proj.weight", "mlp.down_proj")
    push_without("layers.1.self_attn.k_proj.weight", "self_attn.qkv_proj")
    sync.push(policy, version=1)
    verify(served, token, policy, probe)
    policies.train_on(policy, 0.02)
    push_without("layers.1.mlp.up_proj.weight", "mlp.gate_up_proj")
    sync.push(policy, version=2)
    verify(served, token, policy, probe)


def verify(served, token, policy, probe) -> None:
    client = ServerClient(served.base_url, token, timeout_s=60)
    policies.verify(policy, probe, [client], tolerance=policies.TOLERANCES["float32"])
