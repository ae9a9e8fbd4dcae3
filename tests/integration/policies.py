"""Learners for the contract tests: the tiny model as it is, adapted, or trained in full, and what it says itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from stage2_trainer.data.encode import Encoder
from stage2_trainer.data.images import image_url
from stage2_trainer.sync.fleet.proof import (
    BF16_TOLERANCE,
    FLOAT32_TOLERANCE,
    Probe,
    judge,
    learner_logprobs,
    sample_probe,
    server_logprobs,
    text_tokens,
)

ADAPTED = r".*language_model\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"
VISION = r".*visual\.(blocks\.\d+\.(attn\.(qkv|proj)|mlp\.linear_fc(1|2))|.*merger.*\.linear_fc(1|2))"
TOLERANCES = {"float32": FLOAT32_TOLERANCE, "bfloat16": BF16_TOLERANCE}
"""How far log-probabilities of a server may be from the learner's, by the number format."""
KINDS = ("lora", "dora", "full")
ADAPTERS = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora and patterns": {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 3}},
    "dora with vision": {"use_dora": True, "target_modules": f"({ADAPTED})|({VISION})"},
    "one projection": {"target_modules": r".*language_model\.layers\.1\.self_attn\.k_proj"},
    "embedding": {"target_modules": ["embed_tokens"]},
    "dora with rows of tokens": {"use_dora": True, "trainable_token_indices": {"embed_tokens": [*range(300, 400), 7]}},
    "module trained whole": {"use_dora": True, "modules_to_save": ["merger"]},
}


def load(path, dtype=torch.float32):
    return AutoModelForImageTextToText.from_pretrained(path, dtype=dtype).eval()


def trained(base, kind, *, amount=0.02):
    """A policy that a step has moved away from `base`, which stays as it is."""
    torch.manual_seed(11)
    model = copy.deepcopy(base)
    if kind == "full":
        _move(model.parameters(), amount)
        return model
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=ADAPTED, use_dora=kind == "dora"))
    _move((p for name, p in adapted.named_parameters() if "lora_" in name), amount)
    return adapted.eval()


def adapter_of(base, kind):
    """A policy with an adapter that has not trained yet; `kind` is one of ADAPTERS."""
    torch.manual_seed(13)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ADAPTED, **ADAPTERS[kind]}
    return get_peft_model(copy.deepcopy(base), LoraConfig(**options)).eval()


def partly_trained(base, kind):
    """A policy of which a part trains, before its first step; `kind` says which part."""
    model = copy.deepcopy(base)
    if kind == "vision":
        model.requires_grad_(False)
        model.model.visual.requires_grad_(True)
        return model
    targets = r".*language_model\.layers\.1\.self_attn\.k_proj" if kind == "one-projection" else ADAPTED
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, use_dora=kind == "dora")).eval()


def train_on(policy, amount=0.05):
    """Move what trains, as a step does."""
    _move((p for p in policy.parameters() if p.requires_grad), amount)


def looping(base):
    """A policy of random weights: its greedy answers soon repeat themselves."""
    torch.manual_seed(1)
    model = copy.deepcopy(base)
    with torch.no_grad():
        for parameter in model.model.language_model.layers.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.1)
    return model


def with_other_vision(base):
    """A policy whose vision tower alone has moved."""
    torch.manual_seed(12)
    model = copy.deepcopy(base)
    _move(model.model.visual.parameters(), 0.05)
    return model


@torch.no_grad()
def greedy(model, inputs, max_new_tokens):
    """The model's own greedy answer, as ids."""
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


@torch.no_grad()
def _move(parameters, amount):
    for parameter in parameters:
        parameter.add_(torch.randn_like(parameter) * amount)


def grey_probe(model_path: Path, folder: Path) -> Probe:
    """A prompt with a grey image, by which servers and a learner are compared."""
    chat = image_chat(folder / "image.png", np.full((64, 96, 3), 200, dtype=np.uint8))
    return sample_probe(Encoder(AutoProcessor.from_pretrained(model_path)), chat)


def image_chat(path: Path, pixels: np.ndarray | None = None) -> list[dict[str, Any]]:
    """The chat about an image, which is written first where its pixels are given."""
    if pixels is not None:
        Image.fromarray(pixels).save(path)
    image = {"type": "image_url", "image_url": {"url": image_url(str(path))}}
    return [{"role": "user", "content": [image, {"type": "text", "text": "List the shapes."}]}]


def verify(model, probe, clients, *, tolerance, adapter=None, ask=server_logprobs):
    """Compare every server with the learner, once; a doubt is an error too. Returns the gap of each."""
    text = text_tokens(probe.inputs["mm_token_type_ids"])
    own = learner_logprobs(model, probe.inputs).cpu()[text]
    found = {f"server {client.base_url}": ask(client, probe, adapter=adapter)[text] for client in clients}
    return judge(found, own, None, tolerance=tolerance)
