"""The warm-up: its schedule, its loss, and a step that learns."""

import math

import pytest
import torch

from tiny_model.answers import COORD_TOKENS, write
from tiny_model.batches import IGNORED, Batches, encode_prompts
from tiny_model.scenes import make_scene
from tiny_model.warm_up import Recipe, answer_loss, rate, train

COORD_IDS = torch.arange(100, 1100)


def _coord_loss(logits: torch.Tensor, true_bin: int, sigma: float) -> float:
    """The loss of one coordinate alone: its structure token is predicted with certainty."""
    certain = torch.full((1, 1100), -1e4)
    certain[0, 3] = 0.0
    labels = torch.tensor([[3, 100 + true_bin]])
    return answer_loss(torch.stack([certain[0], logits])[None], labels, COORD_IDS, sigma=sigma).item()


def test_uniform_logits_give_documented_coordinate_loss():
    soft_ce, w1, gate = 6.907755, 0.248438, math.log(1100 / 1000)
    assert _coord_loss(torch.zeros(1100), 500, sigma=2) == pytest.approx(soft_ce + w1 + gate, abs=1e-5)


def test_coordinate_loss_is_lower_for_near_bin_than_for_far_one():
    def certain(true_bin):
        logits = torch.full((1100,), -30.0)
        logits[100 + true_bin] = 30.0
        return logits

    assert _coord_loss(certain(505), 500, sigma=8) < _coord_loss(certain(600), 500, sigma=8)


def test_probability_outside_coordinate_tokens_raises_loss():
    astray = torch.zeros(1100)
    astray[:100] = 5.0
    assert _coord_loss(astray, 500, sigma=8) > _coord_loss(torch.zeros(1100), 500, sigma=8) + 2


def test_padding_adds_no_loss():
    logits, labels = torch.randn(1, 4, 1100), torch.tensor([[3, 150, 7, 160]])
    padded = torch.cat([logits, torch.randn(1, 2, 1100)], dim=1), torch.tensor([[3, 150, 7, 160, IGNORED, IGNORED]])
    assert answer_loss(*padded, COORD_IDS, sigma=8) == answer_loss(logits, labels, COORD_IDS, sigma=8)


@pytest.mark.parametrize(("step", "fraction"), [(0, 0.01), (99, 1.0), (550, 0.51), (1100, 0.02)])
def test_learning_rate_rises_then_follows_cosine(step, fraction):
    assert rate(step, Recipe(steps=1100, warm_up_steps=100)) == pytest.approx(fraction, abs=0.02)


def test_padded_batch_gives_same_logits_as_single_answers(model, processor):
    scenes = [make_scene(7, "warm-up", index) for index in range(4)]
    batch = Batches(processor, model, seed=7, size=4).batch(scenes)
    model.eval()
    with torch.no_grad():
        together = model(**batch.inputs).logits
        for row, scene in enumerate(scenes):
            prompt = encode_prompts(processor, [scene])
            answer = torch.tensor([processor.tokenizer(write(scene) + "<|im_end|>\n")["input_ids"]])
            alone = model(
                input_ids=torch.cat([prompt["input_ids"], answer], dim=1),
                mm_token_type_ids=torch.cat([prompt["mm_token_type_ids"], torch.zeros_like(answer)], dim=1),
                pixel_values=prompt["pixel_values"],
                image_grid_thw=prompt["image_grid_thw"],
            ).logits[0, prompt["input_ids"].shape[1] - 1 : -1]
            assert batch.labels[row, : answer.shape[1]].tolist() == answer[0].tolist()
            assert (batch.labels[row, answer.shape[1] :] == IGNORED).all()
            torch.testing.assert_close(together[row, : answer.shape[1]], alone, atol=1e-4, rtol=0)


def test_few_steps_lower_loss_reproducibly_from_seed(tokenizer, processor):
    from tiny_model.model import build_model

    def losses() -> list[float]:
        seen: list[float] = []
        recipe = Recipe(steps=8, batch_size=2, warm_up_steps=2)
        train(build_model(tokenizer, 7), processor, recipe, seed=7, on_step=lambda _, loss: seen.append(loss))
        return seen

    first = losses()
    assert first[-1] < first[0] - 0.5
    assert losses() == pytest.approx(first, rel=1e-4)


def test_neighbouring_coordinate_embeddings_start_close(model, tokenizer):
    table = model.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids(COORD_TOKENS)]
    near = (table[1:] - table[:-1]).norm(dim=-1).mean()
    far = (table[100:] - table[:-100]).norm(dim=-1).mean()
    assert near < far / 4
