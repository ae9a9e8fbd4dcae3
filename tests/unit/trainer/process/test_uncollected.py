"""Imports without garbage collections."""

import gc

import pytest

from stage2_trainer.process.uncollected import uncollected


def test_garbage_collection_is_disabled_only_within_block():
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_garbage_collection_is_enabled_again_after_failed_import():
    with pytest.raises(ImportError), uncollected():
        raise ImportError
    assert gc.isenabled()


def test_garbage_collection_disabled_before_stays_disabled():
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_imported_objects_are_frozen_out_of_later_collections():
    before = gc.get_freeze_count()
    with uncollected():
        pass
    assert gc.get_freeze_count() > before
