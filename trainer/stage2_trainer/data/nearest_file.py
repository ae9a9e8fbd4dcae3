"""Finds the file that a missing path probably means, and says in what its name differs."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from itertools import islice
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from stage2_trainer.data.files import files_below, name_below

MOST_FILES = 200_000  # that are listed
MOST_COMPARED = 10_000  # names whose letters are compared, at some 20,000 a second

_SPELLINGS: Mapping[str, Callable[[str], str]] = {
    "backslashes": lambda name: name.replace("\\", "/"),
    "percent signs": lambda name: unquote(name.partition("?")[0]),
    "the form of its Unicode (NFC or NFD)": lambda name: unicodedata.normalize("NFC", name),
    "upper and lower case": str.casefold,
}


class FilesBelow:
    """The files of a folder and below, by their plain path, name and stem."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._by_path: dict[str, str] = {}
        self._by_name: dict[str, str] = {}
        self._by_stem: dict[str, str] = {}
        for file in sorted(islice(files_below(root), MOST_FILES)):
            place = str(file.relative_to(root))
            plain = PurePosixPath(_plain(place))
            self._by_path.setdefault(str(plain), place)
            self._by_name.setdefault(plain.name, place)
            self._by_stem.setdefault(plain.stem, place)

    def nearest(self, path: Path) -> tuple[Path, str] | None:
        """Return the file that is most like a missing path, and how it differs; None where none is.

        Its path differs in spelling only, or it has the same name in another folder, or another ending, or a similar
        name.
        """
        wanted = name_below(path, self._root)
        name = PurePosixPath(_plain(wanted)).name
        if (near := self._by_path.get(_plain(wanted))) is not None:
            return self._root / near, f"its name differs in {_differences(wanted, near)}"
        if (near := self._by_name.get(name)) is not None:
            differences = _differences(_last(wanted), _last(near))
            return (
                self._root / near,
                f"it is in another folder{f', and differs in {differences}' if differences else ''}",
            )
        if (near := self._by_stem.get(PurePosixPath(name).stem)) is not None:
            return self._root / near, "its ending differs"
        similar = get_close_matches(PurePosixPath(name).stem, islice(self._by_stem, MOST_COMPARED), n=1)
        return (self._root / self._by_stem[similar[0]], "its name is similar") if similar else None


def _last(path: str) -> str:
    """Return the last part of a path, with slashes or backslashes."""
    return PurePosixPath(path.replace("\\", "/")).name


def _plain(name: str, *, without: str = "") -> str:
    """Return a name in the one spelling that all its spellings share; `without` names one that is left as it is."""
    for spelling, change in _SPELLINGS.items():
        if spelling != without:
            name = change(name)
    return name


def _differences(wanted: str, there: str) -> str:
    return ", ".join(how for how in _SPELLINGS if _plain(wanted, without=how) != _plain(there, without=how))
