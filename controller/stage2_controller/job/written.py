"""What an author wrote of a spec, by which versions with other defaults tell an edit from an upgrade. Pure.

To write out a default is no edit, and the API server allows it while pods run. Defaults that the API server fills in
stand in every job and are frozen (`stage2_api.crd.FILLED_IN`), so they count as written: a later version may have
others. A default that an author wrote out counts as an edit where a later version has another default for its key, and
the job is edited in the minute of that upgrade.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from stage2_api.crd import FILLED_IN
from stage2_api.validation import key_paths


def without_defaults(written: Mapping[str, Any], parsed: BaseModel, path: str = "") -> dict[str, Any]:
    """Return what was written without the keys that have their defaults. parsed: the same section, as it is read."""
    fields = {info.alias or name: name for name, info in type(parsed).model_fields.items()}
    kept: dict[str, Any] = {}
    for key, value in written.items():
        here = key_paths.joined(path, key)
        read = getattr(parsed, fields[key]) if key in fields else value
        if here in FILLED_IN or key not in fields or read != _default(parsed, fields[key]):
            kept[key] = _inside(value, read, here)
    return kept


def _default(parsed: BaseModel, name: str) -> Any:
    return type(parsed).model_fields[name].get_default(call_default_factory=True)


def _inside(value: Any, read: Any, path: str) -> Any:
    """Return a value that was written, without the defaults in its sections."""
    if isinstance(value, Mapping) and isinstance(read, BaseModel):
        return without_defaults(value, read, path)
    if isinstance(value, Sequence) and isinstance(read, Sequence) and len(value) == len(read) and read != value:
        return [_inside(one, item, f"{path}[]") for one, item in zip(value, read, strict=True)]
    return value
