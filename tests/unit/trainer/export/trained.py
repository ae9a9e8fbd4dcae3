"""Checkpoints of the tiny Qwen3-VL as runs leave them: an adapter or a whole model, moved away from its base."""

import json
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText, AutoProcessor

from stage2_trainer.export.trained_checkpoint import with_adapter
from stage2_trainer.model.checkpoints import create_staging, publish, write_course

LANGUAGE = r".*language_model\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"
ROWS = [7, 44, 900]
KINDS = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True, "rank_pattern": {"q_proj": 2}},
    "merger trained whole": {"use_dora": True, "modules_to_save": ["merger"]},
    "table trained whole": {"modules_to_save": ["embed_tokens"]},
    "head trained whole": {"modules_to_save": ["lm_head"]},
    "both trained whole": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "rows of the table": {"use_dora": True, "trainable_token_indices": {"embed_tokens": ROWS}},
    "rows of table and head": {"trainable_token_indices": {"embed_tokens": ROWS, "lm_head": ROWS}},
    "full": None,
}
SEED = 5
AMOUNT = 0.02
IDS = torch.tensor([[5, 100, 321, 7, 200, 44, 3, 90]])


def load(folder, dtype=torch.float32):
    """The model of a folder."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()


def learner_model(opened):
    """The model as the learner has it, in float32."""
    model = load(opened.values)
    return model if opened.adapter is None else with_adapter(model, opened).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def untied_base(source: Path, folder: Path) -> Path:
    """Save the tiny model with an output head of its own."""
    model = load(source, torch.bfloat16)
    model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = False
    torch.manual_seed(SEED)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.05)
    model.save_pretrained(folder)
    AutoProcessor.from_pretrained(source).save_pretrained(folder)
    return folder


def trained(base: Path, kind: str):
    """The learner's model in float32, a step away from its base."""
    torch.manual_seed(SEED)
    model = load(base)
    if (options := KINDS[kind]) is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tied tables, one of which is trained
            model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=LANGUAGE, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * AMOUNT)
    return model.eval()


def saved(model, base: Path, run: Path, *, step: int = 3, course=None, log_history=()) -> Path:
    """Write the checkpoint of a learner's model."""
    staged = create_staging(run) / f"checkpoint-{step}"
    model.save_pretrained(staged)
    AutoProcessor.from_pretrained(base).save_pretrained(staged)
    state = {"global_step": step, "max_steps": 9, "epoch": 0.5, "log_history": list(log_history)}
    (staged / "trainer_state.json").write_text(json.dumps(state))
    if course is not None:
        write_course(course, staged)
    return publish(staged, run)
