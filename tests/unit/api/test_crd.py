"""The CustomResourceDefinition as a product: described, bounded, structural; and the generated files are fresh."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stage2_api import crd, job
from stage2_api.crd import FROZEN, custom_resource_definition
from stage2_api.rules.job import JOB_RULES
from stage2_api.rules.run import RUN_RULES
from stage2_api.runconfig import RunConfig
from stage2_api.validation import key_paths

ROOT = Path(__file__).parents[3]
Schema = dict[str, Any]
SCHEMA: Schema = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SPEC: Schema = SCHEMA["properties"]["spec"]


def fields(schema: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    """Every field under a schema with its path, lists and mappings looked into."""
    for key, value in schema.get("properties", {}).items():
        here = f"{path}.{key}"
        yield here, value
        yield from fields(value.get("items", value), here)


FIELDS = [*fields(SPEC, "spec"), *fields(SCHEMA["properties"]["status"], "status")]


def nodes(schema: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    """Every node of a schema: fields, items of lists, values of mappings."""
    yield path, schema
    for key, value in schema.get("properties", {}).items():
        yield from nodes(value, f"{path}.{key}")
    for inner in ("items", "additionalProperties"):
        if inner in schema:
            yield from nodes(schema[inner], f"{path}[]")


NODES = [*nodes(SPEC, "spec"), *nodes(SCHEMA["properties"]["status"], "status")]


def test_fields_are_described_in_sentences() -> None:
    undescribed = [path for path, schema in FIELDS if not re.fullmatch(r"[A-Z].+\.", schema.get("description", ""))]
    assert undescribed == []


def test_strings_lists_and_mappings_are_bounded() -> None:
    unbounded = [
        path
        for path, schema in NODES
        if (schema.get("type") == "string" and "maxLength" not in schema and "enum" not in schema)
        or (schema.get("type") == "array" and "maxItems" not in schema)
        or (schema.get("type") == "object" and "properties" not in schema and "maxProperties" not in schema)
    ]
    assert unbounded == []


def test_integers_are_bounded_unless_non_positive_means_unlimited() -> None:
    open_ended = {
        path.rpartition(".")[2]
        for path, schema in FIELDS
        if schema.get("type") == "integer" and "minimum" not in schema
    }
    assert open_ended == {"infer_batch_size", "version"}


def test_unknown_keys_are_preserved_for_controller_to_refuse() -> None:
    sections = [("", SCHEMA), *((path, schema) for path, schema in NODES if path.startswith("spec"))]
    dropping = [
        path
        for path, schema in sections
        if "properties" in schema and schema.get("x-kubernetes-preserve-unknown-fields") is not True
    ]
    assert len(sections) > 100
    assert dropping == []


def test_schema_is_structural() -> None:
    forbidden = {"$ref", "$defs", "anyOf", "oneOf", "allOf", "not", "const", "title", "nullable", "propertyNames"}
    assert [(path, key) for path, schema in NODES for key in schema if key in forbidden] == []
    untyped = [path for path, schema in NODES if "type" not in schema]
    assert {path.removesuffix("[]").rpartition(".")[2] for path in untyped} == {
        "deepspeed",
        "limits",
        "requests",
        "sizeLimit",
    }


def test_only_third_party_keys_accept_anything() -> None:
    open_paths = {
        path
        for path, schema in NODES
        if schema.get("x-kubernetes-preserve-unknown-fields") and "properties" not in schema
    }
    assert open_paths == {
        "spec.rollout.template",
        "spec.learner.template",
        "spec.config.deepspeed",
        "spec.config.custom.extra.rollout_matching.desc_monitor",
        "spec.config.custom.extra.rollout_matching.monitor_dump",
        "spec.config.custom.extra.rollout_matching.vllm.engine",
        "spec.config.custom.extra.rollout_server.vllm_engine_kwargs",
        "status.reproducibility",
    }


def test_training_config_gets_no_defaults() -> None:
    filled = {path for path, schema in FIELDS if "default" in schema}
    assert filled
    assert not [path for path in filled if path.startswith(("spec.config", "status"))]


def test_settings_with_few_values_are_enums() -> None:
    choices = {path.rpartition(".")[2] for path, schema in FIELDS if "enum" in schema}
    assert {"mode", "phase", "decode_mode", "ot_cost", "train_type", "imagePullPolicy", "rollout_backend"} <= choices


def test_cel_rules_have_advice_and_existing_field_path() -> None:
    for model, schema in ((job.JobSpec, SPEC), (RunConfig, SPEC["properties"]["config"])):
        for validation in schema["x-kubernetes-validations"]:
            assert "; " in validation["message"]
            assert len(validation["message"]) <= 2048
            assert key_paths.field_at(model, validation["fieldPath"].strip(".").split(".")) is not None


def test_cel_rules_read_existing_keys() -> None:
    for model, rules in ((job.JobSpec, JOB_RULES), (RunConfig, RUN_RULES)):
        missing = [
            path for rule in rules for path in rule.keys_read() if key_paths.field_at(model, path.split(".")) is None
        ]
        assert missing == []


def test_frozen_fields_include_everything_pods_are_made_from() -> None:
    assert set(FROZEN) < set(SPEC["properties"])
    assert {"rollout", "learner", "config", "volumes"} <= set(FROZEN)


def test_default_in_cel_rule_comes_from_model() -> None:
    assert crd.expression(RunConfig, "$(training.packing)") == "self.?training.?packing.orValue(false)"
    assert crd.expression(RunConfig, "$(global_max_length, 1) > 0") == "self.?global_max_length.orValue(1) > 0"
    assert crd.expression(RunConfig, "$?(global_max_length)") == "self.?global_max_length.hasValue()"
    with pytest.raises(LookupError, match="global_max_length"):
        crd.expression(RunConfig, "$(global_max_length)")


def test_printer_columns_read_status_fields() -> None:
    version = custom_resource_definition()["spec"]["versions"][0]
    columns = {column["name"]: column["jsonPath"] for column in version["additionalPrinterColumns"]}
    assert list(columns) == ["Phase", "Step", "Rollout", "Node", "Queue", "Reason", "Age"]
    known = SCHEMA["properties"]["status"]["properties"]
    of_status = [re.split(r"[.\[]", path)[2] for path in columns.values() if path.startswith(".status")]
    assert set(of_status) == {"phase", "progress", "rollout", "node", "conditions"} <= set(known)


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "hack" / "generate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_files_are_up_to_date() -> None:
    assert generator().stale(ROOT) == "", "run python hack/generate.py"


def test_check_shows_diff_of_outdated_files(tmp_path: Path) -> None:
    difference = generator().stale(tmp_path)
    assert "+kind: CustomResourceDefinition" in difference
    assert "+# Reference" in difference
