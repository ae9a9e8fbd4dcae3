"""The lock that shows the launcher a save in progress never costs a checkpoint."""

import pytest

from stage2_trainer.process.checkpoints import LOCK_VARIABLE, is_saving, save_lock


@pytest.fixture
def lock(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    monkeypatch.setenv(LOCK_VARIABLE, str(path))
    return path


def test_the_lock_is_held_while_the_block_runs(lock):
    lock.touch()
    with save_lock():
        assert is_saving(lock)
    assert not is_saving(lock)


def test_a_file_that_somebody_has_cleared_away_fails_neither_the_save_nor_the_launcher(lock, caplog):
    with save_lock():
        assert not is_saving(lock)
    assert "cannot see" in caplog.text


def test_an_error_of_the_save_is_its_own(lock):
    lock.touch()
    with pytest.raises(OSError, match="full"), save_lock():
        raise OSError("full")
    assert not is_saving(lock)
