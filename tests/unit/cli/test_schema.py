"""`stage2 schema`: what editors check files by."""

import json

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from stage2_cli.main import app


@pytest.mark.parametrize(
    ("words", "name", "title"),
    [([], "job", "RolloutMatchingJob"), (["training"], "training", "Training configuration of stage2")],
)
def test_schemas_are_valid_and_named(words: list[str], name: str, title: str) -> None:
    schema = json.loads(CliRunner().invoke(app, ["schema", *words]).stdout)
    Draft202012Validator.check_schema(schema)
    assert (schema["$id"], schema["title"]) == (f"https://stage2.dev/v1alpha1/{name}.json", title)
