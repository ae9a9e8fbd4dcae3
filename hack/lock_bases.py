"""What the images are built on, by digest: `make lock-bases` asks the registry which digest each tag has today.

images/bases.txt holds one reference a line, with the digest behind `@` once a registry has told it; `ARG BASE` of each
Dockerfile is one of its lines. skopeo asks, with the mirrors and credentials that it is configured with.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = Path("images", "bases.txt")
MACHINES = frozenset({("linux", "amd64"), ("linux", "arm64")})
BASE = re.compile(r"^(ARG BASE=)(\S+)$", re.MULTILINE)


class NotLockedError(Exception):
    """A base image has no digest to be had; the text says why."""


def main() -> int:
    """Write all digests anew, or nothing; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    parser.add_argument("--registries-conf", type=Path, help="mirrors, as containers-registries.conf(5) says")
    options = parser.parse_args()
    lock = options.root / LOCK
    tags = [tag_of(line) for line in lock.read_text(encoding="utf-8").split()]
    more = [f"--registries-conf={options.registries_conf}"] if options.registries_conf else []
    try:
        locked = {tag: f"{tag}@{digest(tag, more)}" for tag in tags}
    except NotLockedError as error:
        sys.stderr.write(f"lock_bases: {error}\n")
        return 1
    lock.write_text("".join(f"{one}\n" for one in locked.values()), encoding="utf-8")
    for dockerfile in sorted(options.root.glob("images/*.Dockerfile")):
        text = dockerfile.read_text(encoding="utf-8")
        dockerfile.write_text(with_bases(text, locked), encoding="utf-8")
    sys.stdout.write("".join(f"{one}\n" for one in locked.values()))
    return 0


def tag_of(reference: str) -> str:
    """Return a reference without its digest."""
    return reference.partition("@")[0]


def with_bases(dockerfile: str, locked: Mapping[str, str]) -> str:
    """Return a Dockerfile whose base has the digest that was found for its tag."""
    return BASE.sub(lambda found: found[1] + locked.get(tag_of(found[2]), found[2]), dockerfile)


def digest(tag: str, options: Sequence[str]) -> str:
    """Return `sha256:…` of a tag's list of images, one for each machine; options: of skopeo.

    Raise NotLockedError if there is none to be had, or it lacks a machine.
    """
    skopeo = shutil.which("skopeo")
    if skopeo is None:
        raise NotLockedError("skopeo is not on PATH; install your system's package of that name")
    command = [skopeo, *options, "inspect", "--raw", f"docker://{tag}"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise NotLockedError(f"{tag}: {done.stderr.decode(errors='replace').strip()}")
    listed = json.loads(done.stdout).get("manifests") or []
    found = {(one["platform"]["os"], one["platform"]["architecture"]) for one in listed if "platform" in one}
    if missing := sorted("/".join(one) for one in MACHINES - found):
        raise NotLockedError(f"{tag}: has no image for {', '.join(missing)}; its digest would shut such machines out")
    return f"sha256:{hashlib.sha256(done.stdout).hexdigest()}"


if __name__ == "__main__":
    sys.exit(main())
