"""The files of images that annotations name by a path of another machine, an address, or their bytes."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import TypeGuard
from urllib.parse import unquote

from stage2_trainer.data.files import leads_inside
from stage2_trainer.data.images import MOST_BYTES, ImageError, header_of
from stage2_trainer.prepare.annotations import LeftOut, Tally, is_text

SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,20}:/{0,3}|[A-Za-z]:[\\/]")
LOCAL_FILES = re.compile(r"[?&]d=([^&#]*)")  # Label Studio's /data/local-files/?d=PATH
UPLOADED = re.compile(r"[0-9a-f]{8}-(?=.)")  # Label Studio puts it before the name of an uploaded file
MOST_FOLDERS = 16  # of a path that are left out, one after the other
DATA_URL = re.compile(r"data:[^,]{0,200};base64,")

NOT_BASE64 = "its bytes are not base64, or too many"
RELOCATED = (
    "an image was found by the end of its path, or without escapes, address or the mark of an upload; look whether it "
    "is the one that was annotated"
)


def locate(stated: Iterable[str], root: Path, tally: Tally) -> dict[str, Path]:
    """Return the file of each path or address in a data set; the path below root where there is no such file.

    Where several lead to one file only by the ends of their paths, none of them does: any may be another image.
    """
    exact, near = {}, {}
    for one in dict.fromkeys(stated):
        found = _first_file([root / one, root / one.replace("\\", "/")], root)
        if found is not None:
            exact[one] = found
        elif (found := _first_file((root / place for place in _spellings(one)), root)) is not None:
            near[one] = found
    claims = Counter(map(os.path.realpath, chain(exact.values(), near.values())))
    located = dict(exact)
    for one, found in near.items():
        if claims[os.path.realpath(found)] == 1:
            located[one] = found
            tally.change(RELOCATED, f"{one}: {found.name}")
    return {one: located.get(one, root / one) for one in dict.fromkeys(stated)}


def _first_file(paths: Iterable[Path], root: Path) -> Path | None:
    """Return the first path of a file inside a folder or ROOT_IMAGE_DIR, or else the first of a file."""
    there = [path for path in paths if os.path.isfile(path)]  # false for a name that is too long, too
    return next((path for path in there if leads_inside(path, [root])), there[0] if there else None)


def _spellings(stated: str) -> Iterator[str]:
    """Yield the paths that a path or an address may mean below a folder, the longest first."""
    plain = SCHEME.sub("", stated, count=1)
    local = LOCAL_FILES.search(plain)
    without_query = local[1] if local else plain.partition("?")[0].partition("#")[0]
    for text in dict.fromkeys([plain, without_query, unquote(without_query)]):
        names = [name for name in text.replace("\\", "/").split("/") if name not in ("", ".")]
        names = [] if ".." in names else names[-MOST_FOLDERS:]
        for first in range(len(names)):
            yield "/".join(names[first:])
        if names and UPLOADED.match(names[-1]):
            yield UPLOADED.sub("", names[-1], count=1)


def is_address(stated: object) -> TypeGuard[str]:
    """Whether a value is a text that may be an address or a path."""
    return is_text(stated) and bool(stated) and "\0" not in stated


def is_data_url(stated: str) -> bool:
    """Whether a text is the content of an image, not its path."""
    return DATA_URL.match(stated) is not None


def decode_base64(text: str) -> bytes:
    """Return the bytes of an image in base64, or in a data URL of it. Raises LeftOut."""
    match = DATA_URL.match(text)
    start = match.end() if match else 0
    if (len(text) - start) // 4 * 3 > MOST_BYTES:
        raise LeftOut(NOT_BASE64)
    try:
        return base64.b64decode(text[start:], validate=False)
    except (binascii.Error, ValueError) as error:
        raise LeftOut(NOT_BASE64, str(error)) from error


def embedded_name(content: bytes, stem: str | None = None) -> str:
    """Return a name for the file of an image that lies inside a data set; without a stem, one by its bytes."""
    try:
        ending = header_of(content, "image").format.lower()
    except ImageError:
        ending = "unreadable"  # it is left out
    return f"{stem or sha256(content).hexdigest()[:20]}.{'jpg' if ending == 'jpeg' else ending}"
