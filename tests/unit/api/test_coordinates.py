"""Coordinate tokens and their bins; similar texts are not tokens."""

import pytest

from stage2_api.coordinates import BINS, MAX_BIN, coord_bin, coord_token


def test_every_bin_has_own_token() -> None:
    assert [coord_bin(coord_token(k)) for k in range(BINS)] == list(range(MAX_BIN + 1))
    assert (coord_token(0), coord_token(MAX_BIN)) == ("<|coord_0|>", "<|coord_999|>")


@pytest.mark.parametrize(
    "text", ["<|coord_1000|>", "<|coord_007|>", "<|coord_-1|>", "<|coord_7|>\n", "7", "<|coord_٧|>"]
)
def test_text_similar_to_coordinate_token_is_not_token(text: str) -> None:
    assert coord_bin(text) is None
