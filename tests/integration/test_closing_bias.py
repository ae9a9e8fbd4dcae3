"""A bias against closing the list on served models: the answers of transformers with the same bias, vLLM's and ours."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from stage2_api.pod.layout import TOKEN_FILE_VARIABLE
from stage2_trainer.data.encode import Encoder, PromptCache
from stage2_trainer.data.question import Question
from stage2_trainer.infer.served import Server
from stage2_trainer.matching.closing import closing_bias
from stage2_trainer.rollouts.hf import Decoding, HfBackend
from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.wire.requests import RolloutRequest, Sampling, SeedPlan
from tiny_model.answers import PROMPT
from tiny_model.scenes import draw, make_scene

LONGEST = 150
NATS = 6.0
PLAN = SeedPlan(5, 0, 0)


@pytest.fixture(scope="module", params=["stub", pytest.param("vllm", marks=pytest.mark.vllm)])
def served(request, servers):
    return servers(request.param, load_format="auto", speculation="none")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    for i in range(4):
        Image.fromarray(np.asarray(draw(make_scene(5, "held-out", i)))).save(folder / f"{i}.png")
    return sorted(map(str, folder.iterdir()))


@pytest.fixture(scope="module")
def expected(model_path, images):
    """Answers of the learner's model, without a bias and with one."""
    encoder = Encoder(AutoProcessor.from_pretrained(model_path))
    model = Qwen3VLForConditionalGeneration.from_pretrained(model_path, dtype=torch.float32)
    backend = HfBackend(model, encoder, Decoding(max_new_tokens=LONGEST), cache=PromptCache(encoder, 0))

    def texts(bias):
        requests = [RolloutRequest(Question(PROMPT).messages(one), bias=bias) for one in images]
        return [one.text for one in backend.generate(requests, seed_plan=PLAN)]

    return {nats: texts(closing_bias(encoder.encode, nats)) for nats in (0.0, NATS)}, closing_bias(encoder.encode, NATS)


def test_bias_of_request_lengthens_server_answers_like_learner_answers(served, token, images, expected):
    texts, bias = expected
    assert texts[NATS] != texts[0.0]
    with ServerBackend([served.base_url], token=token, sampling=Sampling(LONGEST), timeout_s=120) as backend:
        for nats, biased in ((0.0, {}), (NATS, bias)):
            requests = [RolloutRequest(Question(PROMPT).messages(one), bias=biased) for one in images]
            assert [one.text for one in backend.generate(requests, seed_plan=PLAN)] == texts[nats]


def test_infer_with_longer_option_asks_server_for_closing_tokens(served, token_file, images, expected):
    texts, _ = expected
    server = Server(served.base_url, {TOKEN_FILE_VARIABLE: str(token_file)}, longer=NATS)
    question = Question(PROMPT, max_new_tokens=LONGEST)
    assert [server.answer(question, one)[0] for one in images] == texts[NATS]
