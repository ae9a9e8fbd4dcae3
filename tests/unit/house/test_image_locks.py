"""What the images install is what pyproject.toml allows, each by its hash, and no file says where it comes from."""

from __future__ import annotations

import re
import tomllib
from typing import get_args

import pytest
from hack.lock_images import LOCKS, MACHINES, ROOT, Lock, merged
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stage2_api.runconfig import LOCAL_TRACKERS
from stage2_api.training import Tracker

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
IMAGE = {"python_version": "3.11", "python_full_version": "3.11.2", "sys_platform": "linux"}
ENTRY = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)(?: ; (?P<marker>[^\\]+?))?"
    r"(?P<hashes>(?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n",
    re.M,
)
each_lock = pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)


each_machine = pytest.mark.parametrize("machine", MACHINES)


def required(lock: Lock, machine: str) -> list[Requirement]:
    """What pyproject.toml and the lock itself ask for on a machine, without what is left out."""
    here = {**IMAGE, "platform_machine": machine}
    project = PROJECT["project"]
    lines = [*lock.others, *(project["dependencies"] if lock.extras else ())]
    lines += [line for extra in lock.extras for line in project["optional-dependencies"][extra]]
    lines += [line for group in lock.groups for line in PROJECT["dependency-groups"][group]]
    overrides = [Requirement(line) for line in PROJECT["tool"]["uv"]["override-dependencies"]]
    replaced = {one.name: one for one in overrides}
    found = [replaced.get(one.name, one) for one in map(Requirement, lines)]
    return [one for one in found if one.name not in lock.left_out and (not one.marker or one.marker.evaluate(here))]


def chosen_for(lock: Lock, machine: str) -> dict[str, str]:
    """The versions that a machine installs, by name."""
    here = {**IMAGE, "platform_machine": machine}
    entries = ENTRY.finditer(lock.path.read_text(encoding="utf-8"))
    found = [one for one in entries if not one["marker"] or Marker(one["marker"]).evaluate(here)]
    chosen = {canonicalize_name(one["name"]): one["version"] for one in found}
    assert len(chosen) == len(found), f"{lock.path.name} has two versions of a package for {machine}"
    return chosen


@each_lock
@each_machine
def test_locked_versions_satisfy_requirements(lock: Lock, machine: str) -> None:
    chosen, wanted = chosen_for(lock, machine), required(lock, machine)
    wrong = [str(one) for one in wanted if chosen.get(canonicalize_name(one.name), "") not in one.specifier]
    assert wanted
    assert not wrong, f"{lock.path.name} lacks {wrong}: make lock-images"
    assert not set(lock.left_out) & set(chosen)


@each_lock
def test_lock_file_contains_only_pinned_packages_with_hashes(lock: Lock) -> None:
    rest = ENTRY.sub("", lock.path.read_text(encoding="utf-8"))
    assert rest.strip() == "", f"{lock.path.name}: {rest[:200]}"


def test_gpu_image_has_every_experiment_tracker() -> None:
    (gpu,) = (lock for lock in LOCKS if lock.name == "gpu")
    assert set(get_args(Tracker)) - LOCAL_TRACKERS <= set(gpu.extras)


HASH = " \\\n    --hash=sha256:" + "0" * 64 + "\n"


def test_platform_specific_packages_are_marked_in_merged_lock() -> None:
    both, old, new, own = f"a==1{HASH}", f"b==1{HASH}", f"b==2{HASH}", f"c==3{HASH}"
    text = merged({"x86_64": both + old + own, "aarch64": both + new})
    assert text == (
        both
        + f"b==1 ; platform_machine == 'x86_64'{HASH}"
        + f"b==2 ; platform_machine == 'aarch64'{HASH}"
        + f"c==3 ; platform_machine == 'x86_64'{HASH}"
    )
    assert ENTRY.sub("", text) == ""
