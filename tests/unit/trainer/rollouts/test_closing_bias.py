"""A bias against closing the list does the same to answers of transformers, of the learner and of the stub server.

The oracle is the model's own logits: a list is closed exactly where closing leads by more than the bias.
"""

from __future__ import annotations

import json
import shutil
from itertools import pairwise

import pytest
import torch
from PIL import Image
from transformers import GenerationConfig

from stage2_api.errors import ConfigError
from stage2_trainer.data.encode import PromptCache
from stage2_trainer.data.images import image_url
from stage2_trainer.matching.closing import closing_bias, closing_tokens, generation_fields, take_bias
from stage2_trainer.rollouts.hf import Decoding, HfBackend, left_padded
from stage2_trainer.serve.stub.model import ChatRequest, StubModel
from stage2_trainer.wire.chat import bias_fields, infer_request
from stage2_trainer.wire.requests import RolloutRequest, SeedPlan
from tiny_model.answers import PROMPT
from tiny_model.scenes import draw, make_scene

LONGEST = 150
CLOSE = 0.01  # nats; float32 logits of the same model differ by less


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A question about a picture in which the tiny model finds several shapes."""
    path = tmp_path_factory.mktemp("scene") / "scene.png"
    scene = next(one for one in (make_scene(5, "held-out", i) for i in range(50)) if len(one.shapes) == 3)
    Image.fromarray(draw(scene)).save(path)
    content = [{"type": "image_url", "image_url": {"url": image_url(str(path))}}, {"type": "text", "text": PROMPT}]
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def stub(model_path):
    return StubModel(str(model_path), dtype="float32", dummy=False, processor_options={})


@pytest.fixture(params=["transformers", "learner", "stub"])
def answer(request, model, encoder, stub, chat):
    """Return the ids of the greedy answer under a bias."""

    def by_transformers(bias):
        inputs = asked(encoder, chat)
        options = {"max_new_tokens": LONGEST, "do_sample": False, **generation_fields(bias)}
        return model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :].tolist()

    def by_learner(bias):
        backend = HfBackend(model, encoder, Decoding(max_new_tokens=LONGEST), cache=PromptCache(encoder, 0))
        (rollout,) = backend.generate([RolloutRequest(chat, bias=bias)], seed_plan=SeedPlan(0, 0, 0))
        return rollout.token_ids

    def by_stub(bias):
        body = {"messages": chat, "max_tokens": LONGEST, "temperature": 0.0, **bias_fields(bias)}
        return stub.generate(stub.encode(chat), ChatRequest.model_validate_json(json.dumps(body))).token_ids

    return {"transformers": by_transformers, "learner": by_learner, "stub": by_stub}[request.param]


def asked(encoder, chat):
    return left_padded([encoder.prompt(chat)], 0)


def log_probabilities(model, encoder, chat, ids):
    """Return the model's log-probabilities of the token behind a question and the first tokens of its answer."""
    prompt = encoder.prompt(chat)
    sequence = torch.cat([prompt.input_ids, torch.tensor(ids)])[None]
    types = torch.cat([prompt.mm_token_type_ids, torch.zeros(len(ids), dtype=torch.int64)])[None]
    pixels = {"pixel_values": prompt.pixel_values, "image_grid_thw": prompt.image_grid_thw}
    with torch.no_grad():
        return model(input_ids=sequence, mm_token_type_ids=types, **pixels).logits[0, -1].log_softmax(-1)


def objects(encoder, ids):
    return encoder.tokenizer.decode(ids).count('"object_')


def test_bias_delays_closing_only_where_its_lead_is_smaller_than_bias(answer, model, encoder, chat):
    (closing,) = closing_tokens(encoder.encode)
    plain = answer({})
    end = plain.index(closing)
    (first, second), tokens = torch.topk(log_probabilities(model, encoder, chat, plain[:end]), 2)
    assert tokens[0] == closing
    assert answer(closing_bias(encoder.encode, float(first - second) - CLOSE)) == plain
    longer = answer(closing_bias(encoder.encode, float(first - second) + CLOSE))
    assert longer[: end + 1] == [*plain[:end], int(tokens[1])]
    assert objects(encoder, longer) > objects(encoder, plain)


def test_huge_bias_never_closes_list(answer, encoder):
    (closing,) = closing_tokens(encoder.encode)
    assert closing not in answer(closing_bias(encoder.encode, 100.0))


def test_closing_token_is_second_most_likely_token_after_each_object(model, encoder, chat, stub):
    """Behind an object, the token that closes the list comes next to the one that goes on."""
    body = ChatRequest(messages=chat, max_tokens=LONGEST, temperature=0.0)
    plain = stub.generate(stub.encode(chat), body).token_ids
    (closing,), goes_on = closing_tokens(encoder.encode), encoder.encode(', "object_2')[0]
    places = [i for i, pair in enumerate(pairwise(plain)) if pair == (goes_on, encoder.encode("object_")[0])]
    assert len(places) == 2
    for place in places:
        _, tokens = torch.topk(log_probabilities(model, encoder, chat, plain[:place]), 2)
        assert tokens.tolist() == [goes_on, closing]


def test_bias_shifts_only_logit_of_closing_token(model, encoder, chat):
    """As transformers adds it: the scores of each step are the logits, less the bias at one token."""
    inputs = asked(encoder, chat)
    bias = closing_bias(encoder.encode, 1.5)
    done = model.generate(
        **inputs, max_new_tokens=5, do_sample=False, output_scores=True, output_logits=True,
        return_dict_in_generate=True, **generation_fields(bias),
    )  # fmt: skip
    shift = torch.stack(done.scores) - torch.stack(done.logits)
    (closing,) = bias
    expected = torch.zeros(shift.shape[-1])
    expected[closing] = -1.5
    assert torch.allclose(shift, expected.expand_as(shift), atol=1e-5)


def test_bias_in_generation_config_does_not_affect_requests_without_bias(model_path, tmp_path, encoder, chat, stub):
    folder = tmp_path / "biased"
    shutil.copytree(model_path, folder)
    file = folder / "generation_config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | generation_fields(closing_bias(encoder.encode, 100.0))))
    biased = StubModel(str(folder), dtype="float32", dummy=False, processor_options={})
    body = ChatRequest(messages=chat, max_tokens=LONGEST, temperature=0.0)
    assert biased.generate(biased.encode(chat), body) == stub.generate(stub.encode(chat), body)


def test_take_bias_removes_single_token_bias_from_generation_config():
    settings = GenerationConfig(sequence_bias=[[[99], -1.5], [[4, 5], 2.0]])
    assert take_bias(settings) == {99: -1.5}
    assert settings.sequence_bias is None
    assert take_bias(settings) == {}


def test_bias_for_swift_server_is_refused():
    with pytest.raises(ConfigError, match="servers of `swift rollout` take no bias"):
        infer_request(RolloutRequest([], bias={99: -1.5}))
