"""The stub's model: transformers on the CPU, one request at a time, weights that can be overwritten."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from pydantic import BaseModel, Field
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, StoppingCriteria, StoppingCriteriaList

from stage2_trainer.data.images import load_image
from stage2_trainer.matching.closing import LARGEST_BIAS, generation_fields, take_bias
from stage2_trainer.wire.requests import POLICY_MODEL, RepetitionDetection


class ChatRequest(BaseModel):
    """The fields of a chat request that the stub honours; others are ignored."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str | None = None
    max_tokens: int = Field(default=16, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    repetition_penalty: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1
    seed: int | None = None
    repetition_detection: RepetitionDetection | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0)
    return_token_ids: bool = False
    logit_bias: dict[int, float] | None = None


def _bounded(bias: Mapping[int, float]) -> dict[int, float]:
    return {token: max(-LARGEST_BIAS, min(LARGEST_BIAS, value)) for token, value in bias.items()}


class AdapterInfo(BaseModel):
    """The adapter that tensors belong to. config: as in PEFT's adapter_config.json."""

    name: str
    config: dict[str, Any]


def split_images(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Image.Image]]:
    """Replace image parts by the chat template's `{"type": "image"}`, and return the images in order.

    Raises:
        ValueError: an image is no `data:` URL, or cannot be read.
    """
    images: list[Image.Image] = []
    plain = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [_part(part, images) for part in content]
        plain.append({**message, "content": content})
    return plain, images


def _part(part: dict[str, Any], images: list[Image.Image]) -> dict[str, Any]:
    if part["type"] != "image_url":
        return part
    url = part["image_url"]["url"]
    if not url.startswith("data:"):
        raise ValueError(f"an image must be a data: URL, found {url[:80]!r}")
    images.append(load_image(url))
    return {"type": "image"}


PEFT_PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"


class StubAdapters:
    """One adapter over the parameters of a model. Not thread-safe: the caller holds a lock."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._name: str | None = None
        self._deltas: dict[str, Tensor] = {}

    def keep(self, adapter: AdapterInfo, tensors: Mapping[str, Tensor]) -> None:
        """Hold the adapter of these LoRA matrices, named as in PEFT's checkpoints, in place of an older one.

        Raises:
            KeyError: a matrix belongs to no parameter.
        """
        deltas = {}
        for name, down in tensors.items():
            if name.endswith(DOWN):
                layer = name.removesuffix(DOWN)
                target = f"{layer.removeprefix(PEFT_PREFIX)}.weight"
                if target not in self._parameters:
                    raise KeyError(f"{name} belongs to no parameter of the model")
                deltas[target] = _factor(adapter.config, layer) * tensors[f"{layer}{UP}"].float() @ down.float()
        self._name, self._deltas = adapter.name, deltas

    @property
    def names(self) -> list[str]:
        """The adapter's name, if there is one."""
        return [] if self._name is None else [self._name]

    def has(self, name: str | None) -> bool:
        """Whether the adapter of this name is held."""
        return self._name is not None and name == self._name

    def drop(self, name: str) -> bool:
        """Forget the adapter; False if there is none of this name."""
        if not self.has(name):
            return False
        self._name, self._deltas = None, {}
        return True

    @contextmanager
    @torch.no_grad()
    def applied(self, name: str | None) -> Iterator[None]:
        """Add the adapter within the block, if it has this name."""
        deltas = self._deltas if self.has(name) else {}
        plain = {target: self._parameters[target].clone() for target in deltas}
        for target, delta in deltas.items():
            self._parameters[target].copy_(plain[target].float() + delta)
        try:
            yield
        finally:
            for target, values in plain.items():
                self._parameters[target].copy_(values)


def _factor(config: Mapping[str, Any], layer: str) -> float:
    """Return PEFT's factor of an adapter: alpha / rank; a pattern of either may match the end of a layer's name."""

    def value(patterns: str, default: float) -> float:
        return float(next((value for end, value in config[patterns].items() if layer.endswith(f".{end}")), default))

    rank, alpha = value("rank_pattern", config["r"]), value("alpha_pattern", config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config["use_rslora"] else rank)


@dataclass(frozen=True)
class Generated:
    """One answer."""

    token_ids: list[int]
    text: str
    finish_reason: str


class StubModel:
    """A policy that generates, scores prompts, and takes new weights.

    model: checkpoint folder. dtype: torch dtype name, "auto" = the checkpoint's. dummy: random weights instead of the
    checkpoint's. processor_options: pixel limits.
    """

    def __init__(self, model: str, *, dtype: str, dummy: bool, processor_options: dict[str, int]) -> None:
        torch_dtype = dtype if dtype == "auto" else getattr(torch, dtype)
        networks: Any = AutoModelForImageTextToText
        untrusted = {"trust_remote_code": False}
        if dummy:
            network = networks.from_config(
                AutoConfig.from_pretrained(model, **untrusted), dtype=torch_dtype, **untrusted
            )
        else:
            network = networks.from_pretrained(model, dtype=torch_dtype, **untrusted)
        self._network = network.eval()
        take_bias(network.generation_config)  # vLLM does not read it either
        processors: Any = AutoProcessor
        self.processor = processors.from_pretrained(model, **untrusted, **processor_options)
        self._parameters = dict(self._network.named_parameters())
        self._adapters = StubAdapters(self._parameters)
        self._lock = threading.Lock()  # one forward, or one weight update, at a time
        self._abort = threading.Event()

    def encode(self, messages: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Render and tokenize a chat, images expanded; input_ids has shape (1, prompt).

        Raises:
            ValueError: an image cannot be read.
        """
        plain, images = split_images(list(messages))
        text = self.processor.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        return dict(self.processor(text=[text], images=images or None, return_tensors="pt"))

    @torch.inference_mode()
    def generate(self, inputs: dict[str, Tensor], request: ChatRequest) -> Generated:
        """Answer a prompt."""
        prompt_length = inputs["input_ids"].shape[1]
        sampling = (
            {"temperature": request.temperature, "top_p": request.top_p, "top_k": max(request.top_k, 0)}
            if request.temperature > 0
            else {"temperature": None, "top_p": None, "top_k": None}
        )
        stopping = StoppingCriteriaList([_Aborted(self._abort)])
        if request.repetition_detection is not None:
            stopping.append(_Repeated(request.repetition_detection, prompt_length))
        with self._lock, self._adapters.applied(request.model), torch.random.fork_rng(devices=[]):
            if request.seed is not None:
                torch.manual_seed(request.seed)
            output = self._network.generate(
                **inputs,
                max_new_tokens=request.max_tokens,
                do_sample=request.temperature > 0,
                repetition_penalty=request.repetition_penalty,
                stopping_criteria=stopping,
                **generation_fields(_bounded(request.logit_bias or {})),
                **sampling,
            )
        ids: list[int] = output[0, prompt_length:].tolist()
        return Generated(
            token_ids=ids,
            text=self.processor.tokenizer.decode(ids, skip_special_tokens=True),
            finish_reason=self._finish_reason(ids, request),
        )

    @torch.inference_mode()
    def prompt_logprobs(self, inputs: dict[str, Tensor], model: str | None) -> Tensor:
        """Return the log-softmax after each prompt token but the last, shape (prompt - 1, vocabulary), float32."""
        with self._lock, self._adapters.applied(model):
            logits = self._network(**inputs, use_cache=False).logits
        scores: Tensor = logits[0, :-1].float().log_softmax(-1)
        return scores

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite parameters, by their names in the checkpoint. Raises KeyError for a name that is none."""
        with self._lock:
            for name, tensor in tensors:
                self._parameters[name].copy_(tensor)

    def keep_adapter(self, adapter: AdapterInfo, tensors: dict[str, Tensor]) -> None:
        """Serve this adapter instead of any other. Raises KeyError for a layer that there is not."""
        with self._lock:
            self._adapters.keep(adapter, tensors)

    def serves(self, model: str | None) -> bool:
        """Whether `model` is the policy or its adapter."""
        return model in (None, POLICY_MODEL) or self._adapters.has(model)

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that are served."""
        return self._adapters.names

    def unload_adapter(self, name: str) -> bool:
        """Forget the adapter; False if there is none of this name."""
        with self._lock:
            return self._adapters.drop(name)

    def abort(self) -> None:
        """End the answer under way after its next token."""
        self._abort.set()
        with self._lock:
            self._abort.clear()

    def _finish_reason(self, ids: list[int], request: ChatRequest) -> str:
        eos = self._network.generation_config.eos_token_id
        stops = eos if isinstance(eos, list) else [eos]
        if ids and ids[-1] in stops:
            return "stop"
        if self._abort.is_set():
            return "abort"
        return "length" if len(ids) >= request.max_tokens else "repetition"


class _Repeated(StoppingCriteria):
    def __init__(self, check: RepetitionDetection, prompt_length: int) -> None:
        self._check = check
        self._prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.tensor([self._check.ends_in_loop(row[self._prompt_length :].tolist()) for row in input_ids])


class _Aborted(StoppingCriteria):
    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self._event.is_set(), dtype=torch.bool)
