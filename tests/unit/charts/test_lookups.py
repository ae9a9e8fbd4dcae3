"""What the chart finds on the cluster before anything is made, and what it then refuses."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.charts.api_server import namespace, serving

Template = Callable[..., dict[tuple[str, str], dict[str, Any]]]


def test_a_namespace_that_does_not_exist_is_named_before_anything_is_made(template: Template) -> None:
    with serving(namespace("default"), namespace("team-a")) as server:
        assert template('controller.namespaces=["team-a"]', server=server)
        with pytest.raises(ValueError, match=r"controller\.namespaces: there is no namespace team-b; create it first"):
            template('controller.namespaces=["team-a","team-b"]', server=server)


def test_without_a_server_no_namespace_is_missed(template: Template) -> None:
    assert template('controller.namespaces=["team-b"]')
