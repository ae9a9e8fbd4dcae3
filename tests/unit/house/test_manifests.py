"""hack/check_manifests.py finds what it is for; that the repository's own manifests pass is `make lint`."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hack.check_manifests import Allowed, Finding, Source, exceptions, practice_faults, schema_faults

SERVICE = "{apiVersion: v1, kind: Service, metadata: {name: a}, spec: {ports: [{port: 80}]%s}}"
FINDING = Finding("check", "Job", "render job.yaml", "render job.yaml: a: check: bad")
ALLOWED = Allowed("check", "Job", "render", "because")


def test_valid_manifest_has_no_fault() -> None:
    assert list(schema_faults([Source("chart", SERVICE % "")])) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (SERVICE % ", ipFamly: IPv4", "chart: Service/a: spec: .*'ipFamly' was unexpected"),
        (SERVICE.replace("80", "eighty") % "", "chart: Service/a: spec.ports.0.port: .*'eighty' is not of type"),
    ],
)
def test_unknown_field_or_wrong_type_is_fault(wrong: str, message: str) -> None:
    (fault,) = schema_faults([Source("chart", wrong)])
    assert re.match(message, fault), fault


def test_finding_is_fault_unless_exception_matches_check_kind_and_place() -> None:
    assert list(practice_faults(iter([FINDING]), [ALLOWED])) == []
    for other in (replace(ALLOWED, check="x"), replace(ALLOWED, kind="Pod"), replace(ALLOWED, where="chart")):
        faults = list(practice_faults(iter([FINDING]), [other]))
        assert faults[0] == FINDING.text
        assert faults[1].startswith("manifest-exceptions.yaml: nothing needs the exception")


def test_exceptions_have_reasons() -> None:
    assert all(len(one.why.split()) > 1 for one in exceptions())
