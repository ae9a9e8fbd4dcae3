"""Vocabularies and options for the tests of matching."""

import pytest

from stage2_trainer.matching.tokens import CoordVocab
from tests.unit.trainer.matching.vocabularies import aligned_vocab, fused_vocab


@pytest.fixture(scope="session")
def vocab() -> CoordVocab:
    return aligned_vocab()


@pytest.fixture(scope="session")
def fused() -> CoordVocab:
    return fused_vocab()


@pytest.fixture(scope="session", params=[aligned_vocab, fused_vocab], ids=["aligned", "fused"])
def any_vocab(request: pytest.FixtureRequest) -> CoordVocab:
    return request.param()
