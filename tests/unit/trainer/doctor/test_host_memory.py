"""The memory of the host that a process may still take."""

from stage2_trainer.doctor.resources import memory_left


def test_a_container_has_the_memory_that_its_limit_leaves(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 900 kB\nMemAvailable: 500 kB\n")
    assert memory_left(meminfo, tmp_path) == 500 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert memory_left(meminfo, tmp_path) == 500 * 1024
    (tmp_path / "memory.max").write_text("5000\n")
    assert memory_left(meminfo, tmp_path) == 4000
