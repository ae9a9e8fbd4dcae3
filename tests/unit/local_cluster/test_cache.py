"""What the local cluster keeps for the next boot: what of it is superseded, and what must not go."""

import shutil
import subprocess
from pathlib import Path

import pytest

from local_cluster import buildah, cache, images, toolchain
from local_cluster.layout import ClusterError, Layout


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(home=tmp_path / "home", cache=tmp_path / "cache")


def _program(layout: Layout, folder: str) -> Path:
    path = layout.cache / "bin" / folder / "program"
    path.parent.mkdir(parents=True)
    shutil.copy(shutil.which("sleep") or "", path)
    return path


def test_a_program_of_another_key_is_superseded_unless_it_runs(layout: Layout) -> None:
    current = toolchain.path_of(layout, toolchain.PAUSE).parent
    _program(layout, current.name)
    old, running, removed = (_program(layout, name) for name in ("pause-0", "pause-1", "helm-0"))
    process = subprocess.Popen([running, "60"])
    try:
        assert toolchain.superseded(layout, toolchain.PAUSE) == [old.parent]
        assert cache.superseded_programs(layout) == [removed.parent, old.parent]
        cache.prune(layout)
        assert {folder.name for folder in (layout.cache / "bin").iterdir()} == {current.name, "pause-1"}
        with pytest.raises(ClusterError, match="cannot be emptied; `local-cluster down`"):
            cache.empty(layout)
    finally:
        process.kill()
        process.wait()
    cache.empty(layout)
    assert not (layout.cache / "bin").exists()


def test_the_cache_of_a_cluster_that_crashed_cannot_be_emptied(layout: Layout) -> None:
    kept = _program(layout, "pause-0")
    layout.home.mkdir()
    with pytest.raises(ClusterError, match="cannot be emptied"):
        cache.empty(layout)
    assert kept.exists()


def test_every_part_has_a_size(layout: Layout) -> None:
    _program(layout, "helm-0")
    sizes = {part.name: part.size_bytes() for part in cache.parts(layout)}
    assert sizes["programs, superseded"] > 0
    assert sizes["programs"] == sizes["images as built: layers"] == 0


def test_build_steps_use_this_machines_wheels(layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    doubled = buildah.wheels(layout)
    doubled.mkdir(parents=True)
    (doubled / "wheel").touch()
    for _ in range(2):
        buildah.share_wheels(layout)
    (tmp_path / "uv" / "torch").touch()
    assert [path.name for path in doubled.iterdir()] == ["torch"]


def test_snapshots_are_named_by_a_layer_with_all_below_it() -> None:
    first, second = (f"sha256:{digit * 64}" for digit in "12")
    both = "sha256:9932074217c35353d2e03a3f5a86549f7c67bfeb0ba53e23d69f4d4c8f7958f5"
    assert images.chain_ids([first, second]) == [first, both]
