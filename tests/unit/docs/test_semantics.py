"""The semantics page: its keys and defaults match the models, and its examples print what they show."""

import doctest
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stage2_api.runconfig import RunConfig

PAGE = Path(__file__).parents[3] / "docs" / "semantics.md"
TEXT = PAGE.read_text(encoding="utf-8")
TABLE = re.compile(r"^\| key under `([\w.]+)` \| default \|.*\n\|[ |-]+\n((?:\|.*\n)+)", re.MULTILINE)
REQUIRED = "required"
ROW = re.compile(r"^\| `([\w.]+)` \| (`([^`]+)`|required) \|", re.MULTILINE)


def rows() -> dict[str, object]:
    """Return every key of the page's tables, dotted, with its default."""
    found: dict[str, object] = {}
    for section, body in TABLE.findall(TEXT):
        lines = ROW.findall(body)
        assert len(lines) == body.count("\n"), f"a row of {section} has another form"
        found |= {f"{section}.{key}": yaml.safe_load(default) if default else REQUIRED for key, _, default in lines}
    return found


def sections(annotation: object) -> Iterator[type[BaseModel]]:
    """Return the model of a section, null for none; lists of models are values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) is not list:
        for part in typing.get_args(annotation):
            yield from sections(part)


def leaves(model: type[BaseModel], root: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Return every key under a model that holds a value, dotted, with its field."""
    for name, field in model.model_fields.items():
        inside = list(sections(field.annotation))
        if not inside:
            yield f"{root}{name}", field
        for section in inside:
            yield from leaves(section, f"{root}{name}.")


def test_documented_defaults_match_models() -> None:
    fields = dict(leaves(RunConfig))
    promised = rows()
    assert promised.keys() - fields.keys() == set()
    actual = {
        key: REQUIRED if fields[key].is_required() else fields[key].get_default(call_default_factory=True)
        for key in promised
    }
    assert promised == actual


@pytest.mark.parametrize("section", ["custom.extra.rollout_matching", "custom.extra.rollout_server", "rlhf"])
def test_page_documents_every_key_of_section(section: str) -> None:
    every = {key for key, _ in leaves(RunConfig) if key.startswith(f"{section}.")}
    assert len(every) > 10
    assert every - rows().keys() == set()


def test_examples_print_what_page_shows() -> None:
    example = doctest.DocTestParser().get_doctest(TEXT.replace("```", ""), {}, PAGE.name, str(PAGE), 0)
    assert len(example.examples) > 30
    shown: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=shown.append)
    assert "".join(shown) == ""
