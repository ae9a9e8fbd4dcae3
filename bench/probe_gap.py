"""The distance between vLLM's and the learner's log-probabilities, on equal weights and on others, in bfloat16.

The limits of a proof of sync (`stage2_trainer.sync.fleet.proof`) come from here. For each depth, a real vLLM
engine and transformers hold a model with Qwen3-VL's architecture. Equal weights show the effect of rounding. The
negative controls show what a proof must detect: a tensor redrawn, a layer that kept its old weights, two layers
swapped, a vision tower or everything from before a move. The trained checkpoint of the examples is the first
row of each kind.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from stage2_trainer.data.encode import Encoder
from stage2_trainer.data.messages import chat_messages
from stage2_trainer.data.records import load_records
from stage2_trainer.matching.ground_truth import serialize_objects
from stage2_trainer.rollouts.colocate import ColocateEngine, EngineProver
from stage2_trainer.sync.fleet.proof import Gap, Probe, learner_logprobs, sample_probe, text_tokens, wide_logprobs
from stage2_trainer.wire.requests import Sampling

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "examples" / "tiny-qwen3-vl"
DEPTHS = (0, 4, 12, 24, 36)  # 0: the trained checkpoint, as it is
PROBES = 6
LOGIT_STD = 3.0  # of a random model's answers: about as sure of itself as a trained one
STEPS = (0.001, 0.01)  # a step's size against the weights'
ADAPTED = r".*language_model\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"


class GapTable:
    """One row for each model and kind of weights."""

    def lines(self) -> Iterator[str]:
        """The table's lines; each depth is a process, since an engine takes one for itself."""
        yield "\n## Distance of log-probabilities, bfloat16, vLLM against transformers\n\n"
        yield "| model | the learner's weights | mean | 99th percentile | largest |\n"
        yield "| --- | --- | ---: | ---: | ---: |\n"
        for depth in DEPTHS:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "bench.probe_gap", "--depth", str(depth), "--folder", folder]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            for what, mean, tail, largest in json.loads(done.stdout.splitlines()[-1]):
                yield f"| {name(depth)} | {what} | {mean:.4f} | {tail:.3f} | {largest:.3f} |\n"


def name(depth: int) -> str:
    """A model in words."""
    return f"{depth} layers, random" if depth else "4 layers, trained"


def main() -> None:
    """Measure one depth, and print its rows as JSON on the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    probes = list(make_probes(options.folder))
    model = make_model(options.depth, probes[0])
    path = options.folder / "model"
    model.save_pretrained(path)
    AutoProcessor.from_pretrained(CHECKPOINT).save_pretrained(path)
    print(json.dumps(list(measure(model, engine(path, probes[0]), probes))))


def make_probes(folder: Path) -> Iterator[Probe]:
    """Images of shapes with their true answers."""
    command = [sys.executable, ROOT / "examples/make_shapes.py", folder, "--train", str(PROBES), "--held-out", "1"]
    subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL)
    encoder = Encoder(AutoProcessor.from_pretrained(CHECKPOINT))
    for record in load_records(next(folder.rglob("train*.jsonl"))):
        yield sample_probe(encoder, chat_messages(record, "List the shapes."), serialize_objects(record.objects))


def make_model(depth: int, probe: Probe) -> Any:
    """The trained checkpoint, or a random model of so many layers, in bfloat16."""
    if not depth:
        return AutoModelForImageTextToText.from_pretrained(CHECKPOINT, dtype=torch.bfloat16).eval()
    sys.path.insert(0, str(ROOT / "examples"))
    from tiny_model import model as tiny

    torch.manual_seed(depth)
    config: Any = tiny._config(AutoTokenizer.from_pretrained(CHECKPOINT))
    config.text_config.num_hidden_layers = depth
    config.text_config.layer_types = ["full_attention"] * depth
    model = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        spread = model(**probe.inputs, use_cache=False).logits.std()
        model.model.language_model.norm.weight.mul_(LOGIT_STD / spread)
    return model.to(torch.bfloat16)


def engine(path: Path, probe: Probe) -> ColocateEngine:
    """A started engine; its own proofs are off, since what they would say is what is measured."""
    options = {"model": str(path), "dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 4, "enforce_eager": True}
    options |= {"tensor_parallel_size": 1, "limit_mm_per_prompt": {"image": 1, "video": 0}}
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    unproved = EngineProver(probe, every=0, tolerance=1e9)
    started = ColocateEngine(options, environment, sampling=Sampling(max_new_tokens=1), prover=unproved)
    started.start()
    return started


def _moved(other: Any, *, share: float) -> None:
    step(other.parameters(), share)


def measure(model: Any, served: ColocateEngine, probes: list[Probe]) -> Iterator[tuple[str, float, float, float]]:
    """Rows (weights, mean, 99th percentile, largest): all probes' text tokens together."""

    def gap(found: Tensor, what: str, learner: nn.Module) -> tuple[str, float, float, float]:
        own = text_logprobs(probes, lambda probe: learner_logprobs(learner, probe.inputs))
        distance = Gap.between(found, own)
        return what, distance.mean, distance.tail, float((found - own).abs().max())

    served.sync(model, version=0)
    found = text_logprobs(probes, served.prompt_logprobs)
    yield gap(found, "equal", model)
    yield gap(text_logprobs(probes, lambda probe: wide_logprobs(model, probe.inputs)), "the learner in float32", model)
    yield gap(found, "a tensor redrawn", changed(model, redraw))
    yield gap(found, "two layers swapped", changed(model, swap))
    for share in STEPS:
        moved = changed(model, partial(_moved, share=share))
        yield gap(found, f"all moved by {share:.1%}", moved)
    yield gap(found, "one layer moved by 5 %", changed(model, lambda other: step(middle(other).parameters(), 0.05)))
    yield gap(found, "vision moved by 5 %", changed(model, lambda other: step(other.model.visual.parameters(), 0.05)))
    adapted = adapt(model)
    served.sync(adapted, version=1)
    yield gap(text_logprobs(probes, served.prompt_logprobs), "equal, DoRA not merged", adapted)
    yield gap(text_logprobs(probes, served.prompt_logprobs), "DoRA lost", model)


def text_logprobs(probes: list[Probe], ask: Callable[[Probe], Tensor]) -> Tensor:
    """The log-probabilities of all probes' text tokens, one after the other."""
    return torch.cat([ask(probe)[text_tokens(probe.inputs["mm_token_type_ids"])] for probe in probes])


def changed(model: Any, change: Callable[[Any], object]) -> Any:
    """A copy of the model with a change."""
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        change(other)
    return other


def middle(model: Any) -> Any:
    """The layer halfway up."""
    layers = model.model.language_model.layers
    return layers[len(layers) // 2]


def redraw(model: Any) -> None:
    """Give one matrix other values of the same size."""
    weight = middle(model).self_attn.q_proj.weight
    weight.copy_(torch.randn_like(weight) * weight.float().std().to(weight.dtype))


def swap(model: Any) -> None:
    """Let two neighbouring layers change places."""
    layers = model.model.language_model.layers
    half = len(layers) // 2
    above, below = copy.deepcopy(layers[half].state_dict()), copy.deepcopy(layers[half - 1].state_dict())
    layers[half - 1].load_state_dict(above)
    layers[half].load_state_dict(below)


def step(parameters: Any, share: float) -> None:
    """Move matrices by a share of their size."""
    for parameter in parameters:
        if parameter.dim() > 1:
            parameter.add_(torch.randn_like(parameter) * parameter.float().std().to(parameter.dtype) * share)


def adapt(model: Any) -> Any:
    """The model with a DoRA adapter that has moved."""
    torch.manual_seed(2)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=8, target_modules=ADAPTED, use_dora=True))
    with torch.no_grad():
        for found, parameter in adapted.named_parameters():
            if "lora_B" in found:
                parameter.normal_(0, 0.02)
    return adapted.eval()


TABLE = GapTable()

if __name__ == "__main__":
    main()
