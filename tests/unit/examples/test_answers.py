"""Answers are written as the product writes them, and read back by its parser."""

import pytest

from stage2_trainer.matching.tokens import CoordVocab
from tiny_model.answers import read, truth, write
from tiny_model.scenes import Scene, Shape, make_scene

SCENE = Scene(
    100,
    (255, 255, 255),
    (
        Shape("red", "box", (215, 45, 45), (1, 2, 30, 40)),
        Shape("blue", "triangle", (50, 85, 215), (10, 50, 30, 70), ((10, 50), (30, 50), (20, 70))),
    ),
)
ANSWER = (
    '{"object_1": {"desc": "red box", "bbox_2d": ["<|coord_10|>", "<|coord_20|>", "<|coord_300|>", "<|coord_400|>"]}, '
    '"object_2": {"desc": "blue triangle", "poly": [["<|coord_100|>", "<|coord_500|>"], '
    '["<|coord_300|>", "<|coord_500|>"], ["<|coord_200|>", "<|coord_700|>"]]}}'
)


@pytest.fixture(scope="session")
def read_text(tokenizer):
    vocab = CoordVocab.from_tokenizer(tokenizer)
    return lambda text: read(tokenizer(text)["input_ids"], vocab)


def test_an_answer_is_one_line_of_json_with_coord_tokens_and_polygons_in_pairs():
    assert write(SCENE) == ANSWER


def test_what_is_written_is_read_back(read_text):
    for scene in (SCENE, *(make_scene(7, "train", index) for index in range(50))):
        answer = read_text(write(scene) + "<|im_end|>\n")
        assert answer.well_formed
        assert list(answer.objects) == truth(scene)
        assert answer.text == write(scene)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The shapes are red.",
        ANSWER[:-1],
        ANSWER + " and more",
        ANSWER.replace("desc", "name", 1),
        ANSWER.replace("<|coord_10|>", "10"),
        ANSWER.replace('"<|coord_10|>", ', ""),
    ],
)
def test_an_answer_of_another_form_is_not_well_formed(read_text, text):
    assert not read_text(text).well_formed


def test_what_can_be_read_of_a_broken_answer_is_kept(read_text):
    assert list(read_text(ANSWER.replace("red box", " ")).objects) == truth(SCENE)[1:]
