"""Imports without garbage collections."""

import gc

import pytest

from stage2_trainer.uncollected import uncollected


def test_nothing_is_collected_in_the_block_alone():
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collections_go_on_after_an_import_that_failed():
    with pytest.raises(ImportError), uncollected():
        raise ImportError
    assert gc.isenabled()


def test_who_collects_nothing_is_left_alone():
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_was_imported_is_left_out_of_later_collections():
    before = gc.get_freeze_count()
    with uncollected():
        pass
    assert gc.get_freeze_count() > before
    gc.unfreeze()
