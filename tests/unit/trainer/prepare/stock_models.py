"""Inputs of `stage2 prepare` and `stage2 init`: untrained stock models, as small as possible, and a data file."""

import json

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import AutoProcessor, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from tiny_model.checkpoint import save
from tiny_model.model import build_model, build_processor
from tiny_model.tokenizer import build_tokenizer

SEED = 7


def annotated(folder, sizes, boxes=lambda number, size: [[0, 0, size[0] / 2, size[1] / 2]]):
    """Write images of these sizes and a data file of their boxes, x y width height; images are numbered from 1."""
    (folder / "images").mkdir(parents=True)
    records = []
    for number, (width, height) in enumerate(sizes, start=1):
        Image.new("RGB", (width, height), (number, 0, 0)).save(folder / "images" / f"{number}.png")
        corners = [[x, y, x + wide, y + high] for x, y, wide, high in boxes(number, (width, height))]
        record = {"sample_id": str(number), "images": [f"images/{number}.png"], "width": width, "height": height}
        records.append({**record, "units": "pixels", "objects": [{"desc": "cat", "bbox_2d": box} for box in corners]})
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder / "train.jsonl"


def stock(folder, *, tied=True, extra=()):
    """Make an untrained model with a plain vocabulary."""
    tokenizer = build_tokenizer(SEED, plain=True)
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token, special in extra])
    model = build_model(tokenizer, SEED)
    if not tied:
        model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    save(folder, model, build_processor(tokenizer))
    return folder


def mixture_of(plain, folder, *, intermediate=48):
    """Make a mixture of experts of the same shapes, as untrained, in the layout of the stock checkpoints: (E, in, out).

    With 48 no two sides of an expert are equally long: a tensor that is turned around has another shape.
    """
    written = json.loads((plain / "config.json").read_text())
    written["model_type"], written["vision_config"]["model_type"] = "qwen3_vl_moe", "qwen3_vl_moe"
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": intermediate, "mlp_only_layers": []}
    experts["norm_topk_prob"] = True  # as the stock ones say
    written["text_config"] |= {"model_type": "qwen3_vl_moe_text", "decoder_sparse_step": 1, **experts}
    model = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(**written))
    model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name, width in (("gate_up_proj", 2 * intermediate), ("down_proj", 128)):
        for found in [one for one in tensors if one.endswith(f".experts.{name}")]:
            assert tensors[found].shape[1] == width, "as transformers holds it: (E, out, in)"
            tensors[found] = tensors[found].transpose(1, 2).contiguous()
    save_file(tensors, file, {"format": "pt"})
    AutoProcessor.from_pretrained(plain).save_pretrained(folder)
    return folder
