"""What an author wrote of a job: which keys others filled in, and what differs from the defaults. Pure.

No version of stage2 fills in what an older one does not know (`stage2_api.crd.FILLED_IN`); others may. The API server
keeps who owns each field, and kubectl what was applied. Neither tells what `kubectl create` sent from what was filled
in at that moment, so that all of it counts as written.

Versions with other defaults tell an edit from an upgrade by what was written. To write out a default is no edit, and
the API server allows it while pods run. Defaults that the API server fills in stand in every job and are frozen, so
they count as written: a later version may have others. A default that an author wrote out counts as an edit where a
later version has another default for its key, and the job is edited in the minute of that upgrade.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from stage2_api.crd import FILLED_IN
from stage2_api.job import RolloutMatchingJob
from stage2_api.validation import key_paths
from stage2_api.validation.validate import Location, unknown_keys

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_CLIENT_SIDE_APPLY = "kubectl-client-side-apply"  # owns what the API server filled in, too
_MOST = 100  # unknown keys; a spec with more is no job


def without_filled_in(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the job without the unknown keys that no author wrote, and their dotted paths."""
    unknown = unknown_keys(RolloutMatchingJob, raw)
    filled_in = [place for place in unknown if not _is_written(raw, place)] if len(unknown) <= _MOST else []
    if not filled_in:
        return raw, ()
    known = copy.deepcopy(dict(raw))
    for place in filled_in:
        *sections, key = place
        here: Any = known
        for part in sections:
            here = here[part]
        here.pop(key)
    return known, tuple(map(key_paths.dotted, filled_in))


def _is_written(raw: Mapping[str, Any], place: Location) -> bool:
    metadata = raw["metadata"]
    applied = _parsed((metadata.get("annotations") or {}).get(LAST_APPLIED, ""))
    entries = [one for one in metadata.get("managedFields") or () if not one.get("subresource")]
    if applied is None and not entries:
        return True
    if applied is not None and _holds(applied, raw, place):
        return True
    authors = [one for one in entries if applied is None or one.get("manager") != _CLIENT_SIDE_APPLY]
    return any(_owns(one.get("fieldsV1") or {}, raw, place) for one in authors)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _holds(applied: Any, raw: Any, place: Location) -> bool:
    """Return whether a manifest has the key at `place` of the object; items of a list are found by their names."""
    for part in place:
        if isinstance(part, int):
            raw = raw[part]
            named = [one for one in applied if _name(one) == _name(raw)] if isinstance(applied, list) else []
            if not named:
                return False
            applied = named[0]
        elif isinstance(applied, Mapping) and part in applied:
            applied, raw = applied[part], raw[part]
        else:
            return False
    return True


def _name(item: Any) -> Any:
    return item.get("name") if isinstance(item, Mapping) else item


def _owns(fields: Mapping[str, Any], raw: Any, place: Sequence[int | str]) -> bool:
    """Return whether a manager's fields (fieldsV1) have the key at `place`, or own what is around it as a whole."""
    for part in place:
        raw = raw[part]
        inside = fields.get(f"f:{part}") if isinstance(part, str) else _item(fields, raw)
        if inside is None:
            return False
        if not inside:
            return True
        fields = inside
    return True


def _item(fields: Mapping[str, Any], item: Any) -> Mapping[str, Any] | None:
    """Return the fields of a list's item, which its key names: `k:{"name":"data"}`."""
    for label, inside in fields.items():
        key = _parsed(label[2:]) if label.startswith("k:") else None
        if isinstance(key, Mapping) and isinstance(item, Mapping) and key.items() <= item.items():
            found: Mapping[str, Any] = inside
            return found
    return None


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
