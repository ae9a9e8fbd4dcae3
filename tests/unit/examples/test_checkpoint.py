"""The checkpoint as transformers' auto classes load it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoProcessor

from stage2_trainer.data.encode import Encoder
from stage2_trainer.data.images import image_url
from tiny_model.answers import PROMPT, truth, write
from tiny_model.checkpoint import save
from tiny_model.evaluate import greedy_answers, measure
from tiny_model.model import build_model
from tiny_model.scenes import make_scene

LARGEST = 4_000_000
PROMPT_TOKENS = 50


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory, tokenizer, processor) -> Path:
    folder = tmp_path_factory.mktemp("tiny-random")
    save(folder, build_model(tokenizer, 7), processor)
    return folder


@pytest.fixture(params=["random", "shipped"])
def checkpoint(request, random_checkpoint, shipped) -> Path:
    return random_checkpoint if request.param == "random" else shipped


def test_weights_are_bfloat16_and_folder_is_small(checkpoint):
    with safe_open(checkpoint / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118
    assert sum(file.stat().st_size for file in checkpoint.iterdir()) <= LARGEST


def test_checkpoint_files_are_world_readable(random_checkpoint):
    assert {file.stat().st_mode & 0o444 for file in random_checkpoint.iterdir()} == {0o444}


def test_loaded_tokenizer_matches_built_one(checkpoint, tokenizer):
    loaded = AutoProcessor.from_pretrained(checkpoint).tokenizer
    texts = [write(make_scene(7, "train", index)) for index in range(20)]
    assert loaded(texts)["input_ids"] == tokenizer(texts)["input_ids"]
    assert loaded.get_vocab() == tokenizer.get_vocab()


def test_learner_encodes_prompt_with_36_image_tokens_and_turn_end(checkpoint, tmp_path):
    from PIL import Image

    from tiny_model.scenes import draw

    Image.fromarray(draw(make_scene(7, "train", 0))).save(tmp_path / "a.png")
    content = [
        {"type": "image_url", "image_url": {"url": image_url(str(tmp_path / "a.png"))}},
        {"type": "text", "text": PROMPT},
    ]
    encoder = Encoder(AutoProcessor.from_pretrained(checkpoint))
    ids = encoder.prompt([{"role": "user", "content": content}]).input_ids
    image_id, end_id = encoder.tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|im_end|>"])
    assert len(ids) == PROMPT_TOKENS
    assert (ids == image_id).sum() == 36
    assert encoder.end_of_turn_ids[0] == end_id


def test_generation_is_greedy_and_stops_at_turn_end(checkpoint):
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    tokenizer = AutoProcessor.from_pretrained(checkpoint).tokenizer
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.do_sample is False


def test_saving_does_not_change_precision_of_model_in_memory(model, processor, tmp_path):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save(tmp_path, model, processor)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_shipped_model_matches_its_model_card(shipped):
    model = AutoModelForImageTextToText.from_pretrained(shipped, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(shipped)
    scenes = [make_scene(7, "held-out", index) for index in range(50)]
    quality = measure(greedy_answers(model, processor, scenes), [truth(scene) for scene in scenes])
    card = json.loads((shipped / "metrics.json").read_text())["held_out"]["bfloat16"]
    assert quality.parse_rate >= 0.9
    # 50 of the card's 200 images, some 120 objects: their figures lie within 0.15 of those of all.
    for name in ("recall_at_30", "recall_at_50", "mean_iou", "desc_exact"):
        assert abs(getattr(quality, name) - card[name]) < 0.15, name


def test_shipped_model_leaves_room_for_stage_2(shipped):
    card = json.loads((shipped / "metrics.json").read_text())["held_out"]["bfloat16"]
    assert 0.3 < card["recall_at_50"] < 0.7
