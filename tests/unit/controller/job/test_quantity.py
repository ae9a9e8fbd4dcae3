"""Quantities as Kubernetes reads them, and nothing else that Python takes for a number."""

from typing import Any

import pytest

from stage2_controller.spec import objects

READ: list[tuple[Any, float]] = [
    ("2", 2.0),
    (2, 2.0),
    (0.5, 0.5),
    (1e20, 1e20),
    ("+1.5", 1.5),
    ("-1", -1.0),
    ("1.", 1.0),
    (".5Gi", 2.0**29),
    ("500m", 0.5),
    ("3E", 3e18),
    ("3e2", 300.0),
    ("3E-2", 0.03),
    ("3Ei", 3 * 2.0**60),
    ("9223372036854775807", 2.0**63),
]
NONE: list[Any] = [
    "nan",
    "inf",
    "infinity",
    "-Infinity",
    "1_000",
    " 1 ",
    "1\n",
    "\u0661",
    "",
    ".",
    "m",
    "1e3k",
    "1kk",
    "0x1",
]
UNBOUNDED: list[Any] = ["1e400", "-1e400", "9" * 400, "9" * 299 + "Ei", float("inf"), float("nan"), 10**5000]


@pytest.mark.parametrize(("written", "amount"), READ)
def test_a_quantity_is_its_amount_in_base_units(written: Any, amount: float) -> None:
    assert objects.parse_quantity(written) == pytest.approx(amount, rel=1e-12)


@pytest.mark.parametrize("written", [*NONE, *UNBOUNDED, True, None], ids=lambda written: type(written).__name__)
def test_what_is_no_quantity_or_has_no_end_is_no_amount(written: Any) -> None:
    assert objects.parse_quantity(written) is None
