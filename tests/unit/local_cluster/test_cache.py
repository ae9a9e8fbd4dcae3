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


def test_outdated_program_is_removed_unless_it_runs(layout: Layout) -> None:
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


def test_cache_of_crashed_cluster_cannot_be_emptied(layout: Layout) -> None:
    kept = _program(layout, "pause-0")
    layout.home.mkdir()
    with pytest.raises(ClusterError, match="cannot be emptied"):
        cache.empty(layout)
    assert kept.exists()


def test_every_cache_part_has_size(layout: Layout) -> None:
    _program(layout, "helm-0")
    sizes = {part.name: part.size_bytes() for part in cache.parts(layout)}
    assert sizes["programs, superseded"] > 0
    assert sizes["programs"] == sizes["images as built: layers"] == 0


def test_image_build_uses_wheel_cache_of_host(layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    doubled = buildah.wheels(layout)
    doubled.mkdir(parents=True)
    (doubled / "wheel").touch()
    for _ in range(2):
        buildah.share_wheels(layout)
    (tmp_path / "uv" / "torch").touch()
    assert [path.name for path in doubled.iterdir()] == ["torch"]


def test_snapshot_name_depends_on_layer_and_all_below() -> None:
    first, second = (f"sha256:{digit * 64}" for digit in "12")
    both = "sha256:9932074217c35353d2e03a3f5a86549f7c67bfeb0ba53e23d69f4d4c8f7958f5"
    assert images.chain_ids([first, second]) == [first, both]
