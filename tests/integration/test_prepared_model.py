"""What `stage2 prepare` has saved is served by a real vLLM, whose answers keep the coordinate tokens as text."""

import pytest
import torch
from transformers import AutoProcessor

from stage2_api.coordinates import COORD_TOKEN
from stage2_trainer.matching import CoordVocab
from stage2_trainer.prepare.coordinate_tokens import prepare
from stage2_trainer.sync.fleet.proof import FLOAT32_TOLERANCE
from stage2_trainer.wire.chat import CHAT_ROUTE, chat_body
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.requests import RolloutRequest, Sampling
from tests.integration import policies
from tests.unit.trainer.prepare.stock_models import mixture_of, stock

pytestmark = pytest.mark.in_turns(3)

NEW_TOKENS = 64


@pytest.mark.vllm
def test_answers_of_prepared_model_keep_coordinate_tokens_as_text(tmp_path, start_server, token):
    prepare(str(stock(tmp_path / "stock")), tmp_path / "prepared")
    vocab = CoordVocab.from_tokenizer(AutoProcessor.from_pretrained(tmp_path / "prepared").tokenizer)
    served = start_server("vllm", model=tmp_path / "prepared", load_format="auto")
    request = RolloutRequest(messages=[{"role": "user", "content": "Where is it?"}])
    client = ServerClient(served.base_url, token, timeout_s=60)
    body = chat_body(request, Sampling(max_new_tokens=NEW_TOKENS, temperature=2.0), seed=1)
    (choice,) = client.post(CHAT_ROUTE, "test", body=body)["choices"]
    answered = [vocab.bin_of(one) for one in choice["token_ids"] if vocab.bin_of(one) is not None]
    assert len(answered) > NEW_TOKENS // 4  # an untrained model answers with any token, and most of them are these
    assert [int(found) for found in COORD_TOKEN.findall(choice["message"]["content"])] == answered


@pytest.mark.vllm
def test_prepared_moe_model_answers_in_vllm_like_in_transformers(tmp_path, start_server, token):
    torch.manual_seed(3)
    prepare(str(mixture_of(stock(tmp_path / "stock"), tmp_path / "mixture")), tmp_path / "prepared")
    served = start_server("vllm", model=tmp_path / "prepared", load_format="auto")
    probe = policies.grey_probe(tmp_path / "prepared", tmp_path)
    client = ServerClient(served.base_url, token, timeout_s=60)
    (gap,) = policies.verify(
        policies.load(tmp_path / "prepared"), probe, [client], tolerance=FLOAT32_TOLERANCE
    ).values()
    assert gap.tokens > 0
