"""Names of the chart's objects, by the API server's rules, whatever release and values are called."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

Template = Callable[..., dict[tuple[str, str], dict[str, Any]]]

PART = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN = re.compile(rf"{PART}(\.{PART})*")
SERVICE = re.compile("[a-z]([-a-z0-9]*[a-z0-9])?")  # DNS-1035
PARTS = ("serviceMonitor", "podMonitor", "prometheusRule", "dashboard")
EVERYTHING = [f"metrics.{part}.enabled=true" for part in PARTS]
LONG = "a" * 59
MOST = 63  # characters of a label's value, and of a Service's name


@pytest.mark.parametrize("release", ["stage2", "my.rel", "1a", f"{'r' * 52}s", f"1.{'r' * 50}s", "1"])
@pytest.mark.parametrize("more", [(), (f'nameOverride="{LONG}-b.c"',), (f'fullnameOverride="{LONG}---bcd"',)])
def test_every_name_is_one_that_the_api_server_takes(template: Template, release: str, more: tuple[str, ...]) -> None:
    namespace = "n" * 63
    wide = template(*EVERYTHING, *more, release=release, namespace=namespace)
    narrow = template(*EVERYTHING, *more, 'controller.namespaces=["team-a"]', release=release, namespace=namespace)
    for kind, name in [*wide, *narrow]:
        rule, most = (SERVICE, MOST) if kind == "Service" else (SUBDOMAIN, 253)
        assert rule.fullmatch(name), (kind, name)
        assert len(name) <= most, (kind, name)
    for labels in (one["metadata"].get("labels", {}) for one in wide.values()):
        assert all(len(value) <= MOST and value[-1:].isalnum() for value in labels.values()), labels


@pytest.mark.parametrize("release", ["stage2", "my.rel", "1a", "r" * 53])
def test_the_alert_asks_for_the_service_under_the_name_that_it_has(template: Template, release: str) -> None:
    made = template(*EVERYTHING, release=release)
    (service,) = (name for kind, name in made if kind == "Service")
    (rules,) = (one["spec"] for (kind, _), one in made.items() if kind == "PrometheusRule")
    assert f'job="{service}"' in yaml.safe_dump(rules, width=1000)


def test_long_releases_of_two_names_in_one_long_namespace_have_cluster_roles_of_their_own(template: Template) -> None:
    def roles(release: str) -> set[str]:
        made = template('controller.namespaces=["team-a"]', release=release, namespace="n" * 63)
        return {name for kind, name in made if kind == "ClusterRole"}

    assert roles("stage2-a").isdisjoint(roles("stage2-b"))


@pytest.mark.parametrize("word", ["123", "1e3", "0x1f", "null", "true", "1.5"])
def test_a_name_that_yaml_takes_for_something_else_stays_text(template: Template, word: str) -> None:
    values = (f'fullnameOverride="{word}"', f'serviceAccount.name="{word}"', f'controller.priorityClassName="{word}"')
    for more in ((), (f'controller.namespaces=["{word}"]',) if word.isalnum() else ()):
        made = template(*EVERYTHING, *values, *more, namespace="123")
        for (kind, _), one in made.items():
            _only_text(one["metadata"], kind)
            _only_text(one.get("subjects", []), kind)
            _only_text(one.get("roleRef", {}), kind)
        assert ("Deployment", word) in made
        (pod,) = (one["spec"]["template"]["spec"] for (kind, _), one in made.items() if kind == "Deployment")
        assert (pod["serviceAccountName"], pod["priorityClassName"]) == (word, word)
        (lease,) = (one["rules"][1] for (kind, name), one in made.items() if name.endswith("-lease") and kind == "Role")
        assert lease["resourceNames"] == [word]


def _only_text(value: object, kind: str) -> None:
    if isinstance(value, dict):
        for inner in value.values():
            _only_text(inner, kind)
    elif isinstance(value, list):
        for inner in value:
            _only_text(inner, kind)
    else:
        assert isinstance(value, str), (kind, value)
