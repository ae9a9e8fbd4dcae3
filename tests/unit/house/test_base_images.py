"""What the images are built on stands in one file, by digest once a registry was asked, and nowhere otherwise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hack.lock_bases import BASE, LOCK, ROOT, with_bases

DOCKERFILES = sorted(ROOT.glob("images/*.Dockerfile"))
REFERENCE = re.compile(r"[a-z0-9.-]+/[a-z0-9/_.-]+:[\w.-]+(?P<digest>@sha256:[0-9a-f]{64})?")
LOCKED = (ROOT / LOCK).read_text(encoding="utf-8").split()
TAG = "docker.io/library/python:3.11-slim-bookworm"
DIGEST = "sha256:" + "5" * 64


def test_every_base_has_a_digest_as_soon_as_one_has() -> None:
    found = [REFERENCE.fullmatch(line) for line in LOCKED]
    assert LOCKED
    assert all(found), LOCKED
    assert len({bool(one and one["digest"]) for one in found}) == 1


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_is_built_on_what_the_lock_says(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"^FROM .*$", text, re.MULTILINE) == ["FROM $BASE"]
    assert [reference for _, reference in BASE.findall(text)] == [one for one in LOCKED if one in text]
    assert len(BASE.findall(text)) == 1


@pytest.mark.parametrize("before", [TAG, f"{TAG}@sha256:{'4' * 64}"])
def test_a_digest_takes_the_place_of_the_one_before(before: str) -> None:
    text = f"# {before} stays here.\nARG BASE={before}\nFROM $BASE\n"
    assert (
        with_bases(text, {TAG: f"{TAG}@{DIGEST}"}) == f"# {before} stays here.\nARG BASE={TAG}@{DIGEST}\nFROM $BASE\n"
    )


def test_a_base_that_was_not_asked_for_stays() -> None:
    text = "ARG BASE=example.com/other:1\nFROM $BASE\n"
    assert with_bases(text, {TAG: f"{TAG}@{DIGEST}"}) == text
