"""What the images install is what pyproject.toml allows, each by its hash, and no file says where it comes from."""

from __future__ import annotations

import re
import tomllib

import pytest
from hack.lock_images import LOCKS, ROOT, Lock
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
IMAGE = {
    "python_version": "3.11",
    "python_full_version": "3.11.2",
    "sys_platform": "linux",
    "platform_machine": "x86_64",
}
ENTRY = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)(?: ; [^\\]+)?(?P<hashes>(?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n",
    re.M,
)
each_lock = pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)


def asked(lock: Lock) -> list[Requirement]:
    """What pyproject.toml and the lock itself ask for, without what is left out."""
    project = PROJECT["project"]
    lines = [*lock.others, *(project["dependencies"] if lock.extras else ())]
    lines += [line for extra in lock.extras for line in project["optional-dependencies"][extra]]
    overrides = [Requirement(line) for line in PROJECT["tool"]["uv"]["override-dependencies"]]
    replaced = {one.name: one for one in overrides}
    found = [replaced.get(one.name, one) for one in map(Requirement, lines)]
    return [one for one in found if one.name not in lock.left_out and (not one.marker or one.marker.evaluate(IMAGE))]


@each_lock
def test_every_requirement_is_met_by_a_version_that_it_allows(lock: Lock) -> None:
    text = lock.path.read_text(encoding="utf-8")
    chosen = {canonicalize_name(match["name"]): match["version"] for match in ENTRY.finditer(text)}
    wrong = [str(one) for one in asked(lock) if chosen.get(canonicalize_name(one.name), "") not in one.specifier]
    assert asked(lock)
    assert not wrong, f"{lock.path.name} lacks {wrong}: make lock-images"
    assert not set(lock.left_out) & set(chosen)


@each_lock
def test_every_package_has_a_version_and_hashes_and_nothing_else_stands_there(lock: Lock) -> None:
    rest = ENTRY.sub("", lock.path.read_text(encoding="utf-8"))
    assert rest.strip() == "", f"{lock.path.name}: {rest[:200]}"
