"""What tells the launcher that a checkpoint is written never costs one."""

import pytest

from stage2_trainer.process.writing import LOCK_VARIABLE, is_writing, writing


@pytest.fixture
def lock(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    monkeypatch.setenv(LOCK_VARIABLE, str(path))
    return path


def test_it_is_said_for_the_time_of_the_block(lock):
    lock.touch()
    with writing():
        assert is_writing(lock)
    assert not is_writing(lock)


def test_a_file_that_somebody_has_cleared_away_fails_neither_the_save_nor_the_launcher(lock, caplog):
    with writing():
        assert not is_writing(lock)
    assert "cannot be told" in caplog.text


def test_an_error_of_the_save_is_its_own(lock):
    lock.touch()
    with pytest.raises(OSError, match="full"), writing():
        raise OSError("full")
    assert not is_writing(lock)
