"""How a container ended, in one line."""

import pytest

from stage2_controller.place.diagnose import last_words
from tests.unit.controller import builders as b

TRACEBACK = """  File "engine.py", line 1431, in wait
    raise RuntimeError(
RuntimeError: the engine did not start
"""


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        ({"exitCode": 1, "message": TRACEBACK}, "exit code 1: RuntimeError: the engine did not start"),
        (
            {"exitCode": 64, "message": "a: 1; too small\nb: 2; too large"},
            "exit code 64: a: 1; too small b: 2; too large",
        ),
        ({"exitCode": 75, "message": b.termination(message="lost server-1")}, "exit code 75: lost server-1"),
        ({"exitCode": 137, "reason": "OOMKilled"}, "exit code 137: OOMKilled"),
        ({"exitCode": 2}, "exit code 2: no message"),
    ],
    ids=["a traceback", "broken rules", "a report", "only a reason", "nothing"],
)
def test_last_words(ended: dict[str, object], words: str) -> None:
    assert last_words(ended) == words
