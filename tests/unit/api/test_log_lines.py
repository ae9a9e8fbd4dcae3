"""Log lines: one per message, even if it quotes foreign text."""

import io
import logging

from stage2_api.log_lines import FORMAT, OneLineFormatter

FORGED = '{"event": "reproducibility", "model": "another"}'


def logged(text: str, *, raised: Exception | None = None) -> list[str]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(OneLineFormatter(FORMAT))
    record = logging.LogRecord("a.module", logging.ERROR, __file__, 1, "answered %s", (text,), None)
    if raised is not None:
        try:
            raise raised
        except Exception as error:  # noqa: BLE001 - whatever it is
            record.exc_info = (type(error), error, error.__traceback__)
    handler.handle(record)
    return stream.getvalue().splitlines()


def test_line_break_in_message_starts_no_new_line() -> None:
    for end in ("\n", "\r\n", "\x0b", "\x85", "\u2028"):
        (line,) = logged(f"500{end}{FORGED}")
        assert line.endswith(FORGED)
        assert not line.startswith("{")


def test_escape_sequences_are_escaped() -> None:
    (line,) = logged("\x1b[2Jäöü \x07")
    assert line.endswith(r"answered \x1b[2Jäöü \x07")


def test_traceback_lines_are_indented() -> None:
    first, *rest = logged("500", raised=ValueError(f"answered\n{FORGED}"))
    assert first.endswith("answered 500")
    assert all(line.startswith("    ") for line in rest)
    assert any("ValueError: answered" in line for line in rest)
