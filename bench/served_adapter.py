"""Tokens of a vLLM engine on a CPU whose weights have the adapter merged, against one that adds it at each token.

Processor time of the engine, which runs in this process. The model is tiny (six layers, 20 million weights), so that
the calls around each layer weigh more, and the products less, than in a large one. Nothing of it was measured on a GPU.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from bench.tables import Row, Table, seconds
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForImageTextToText

from stage2_trainer.rollouts.build import engine_environment

MODEL = Path(__file__).parents[1] / "examples" / "tiny-qwen3-vl"
HIDDEN, WIDE, LAYERS = 512, 1536, 6
RANKS = (8, 64)
NEW_TOKENS = 32
PROMPTS = (1, 8)  # at once
ADAPTED = r".*language_model\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"


def rows() -> Iterator[Row]:
    """So many prompts at once, by the rank of the adapter."""
    for name, value in engine_environment(on_cpu=True, eager=True).items():
        os.environ.setdefault(name, value)
    with TemporaryDirectory() as folder:
        model = written(Path(folder))
        merged, adding = engine(model), engine(model, enable_lora=True, max_lora_rank=max(RANKS))
        for rank in RANKS:
            adapter = request(model, rank)
            for count in PROMPTS:
                tokens = count * NEW_TOKENS
                ours = seconds(lambda: answer(merged, count)) / tokens  # noqa: B023
                idle = seconds(lambda: answer(adding, count)) / tokens  # noqa: B023
                theirs = seconds(lambda: answer(adding, count, lora_request=adapter)) / tokens  # noqa: B023
                what = f"{count} at once, rank {rank}"
                yield Row(what, "native adapter", ours, theirs)
                yield Row(what, "an engine that could take one, and is asked for none", ours, idle)


def written(folder: Path) -> Path:
    """Write a model of random weights, and an adapter of each rank beside it."""
    model = folder / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    config: Any = AutoConfig.from_pretrained(MODEL)
    config.text_config.hidden_size = config.vision_config.out_hidden_size = HIDDEN
    config.text_config.intermediate_size, config.text_config.num_hidden_layers = WIDE, LAYERS
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).to(torch.bfloat16).save_pretrained(model)
    for rank in RANKS:
        base = AutoModelForImageTextToText.from_pretrained(model)
        options = LoraConfig(r=rank, target_modules=ADAPTED, init_lora_weights=False)
        get_peft_model(base, options).save_pretrained(str(folder / f"rank-{rank}"))
    return model


def engine(model: Path, **options: Any) -> Any:
    """Return an engine of this process that computes in bfloat16."""
    import vllm

    limits: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": max(PROMPTS), "seed": 0}
    limits["limit_mm_per_prompt"] = {"image": 0, "video": 0}
    return vllm.LLM(str(model), dtype="bfloat16", enforce_eager=True, **limits, **options)


def request(model: Path, rank: int) -> Any:
    """Return a request for an adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"rank-{rank}", rank, str(model.parent / f"rank-{rank}"))


def answer(asked: Any, count: int, **options: Any) -> None:
    """Let an engine generate for so many prompts."""
    import vllm

    sampling = vllm.SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    chats = [[{"role": "user", "content": f"List {number} shapes."}] for number in range(count)]
    asked.chat(chats, sampling, use_tqdm=False, **options)


TABLE = Table("Tokens by merged weights, and by a native adapter", "ms/token", 1e3, rows)
