"""What a killed engine has left in shared memory goes, and what belongs to others stays."""

from stage2_trainer.sync.vllm import vllm_compat


def test_only_the_segments_of_the_own_group_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_compat, "SHARED_MEMORY", tmp_path)
    own = ["-tp:0-[0-1]-cpushm_0", "-tp:0-[0-1]-cpushm_1"]
    others = ["-tp:0-[2-3]-cpushm_0", "51216-tp:0-[0-1]-cpushm_0", "psm_1"]
    for name in (*own, *others):
        (tmp_path / name).touch()
    vllm_compat.free_shared_memory([0, 1])
    vllm_compat.free_shared_memory([0, 1])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
