"""Base models of exports: the tiny one, whose output head is its embedding table, and one with a head of its own."""

import pytest

from tests.unit.trainer.export.trained import saved, trained, untied_base


@pytest.fixture(scope="module")
def bases(model_path, tmp_path_factory):
    return {"tied": model_path, "untied": untied_base(model_path, tmp_path_factory.mktemp("untied"))}


@pytest.fixture(scope="module")
def dora(model_path, tmp_path_factory):
    """A checkpoint of DoRA adapters."""
    return saved(trained(model_path, "dora"), model_path, tmp_path_factory.mktemp("dora"))
