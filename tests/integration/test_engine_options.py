"""A real vLLM with options of its own (`vllm.engine`): pushes reach weights that it holds in 8 bits."""

import pytest

from stage2_api.vllm import EIGHT_BIT_TOLERANCE
from stage2_trainer.sync.fleet.report import ProofError
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.identity import ENGINE, IDENTITY_ROUTE
from tests.integration import policies

pytestmark = pytest.mark.in_turns(3, first=2)


@pytest.fixture(scope="module")
def dtype():
    return "bfloat16"


def test_push_reaches_server_with_quantized_weights(start_server, make_sync, base, probe, token, dtype):
    engine = {"quantization": "fp8_per_channel", "max_logprobs": 1}
    served = start_server("vllm", dtype=dtype, engine=engine)
    client = ServerClient(served.base_url, token, timeout_s=60)
    assert client.get(IDENTITY_ROUTE, "identity")[ENGINE].startswith("model runner V1, attention backend ")
    policy, sync = policies.adapter_of(base, "dora"), make_sync(served)
    sync.push(policy, version=1)
    policies.verify(policy, probe, [client], tolerance=EIGHT_BIT_TOLERANCE)
    policies.train_on(policy, 0.2)
    with pytest.raises(ProofError):
        policies.verify(policy, probe, [client], tolerance=EIGHT_BIT_TOLERANCE)
    assert not sync.push(policy, version=2).everything
    policies.verify(policy, probe, [client], tolerance=EIGHT_BIT_TOLERANCE)
