"""The run's log says how the run ended and what was warned of, so that nobody waits for a run that is over."""

import json
import logging

import pytest

from stage2_trainer.process.interrupt import Interrupted
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.run_log import RunLog, logged_end

logger = logging.getLogger("stage2_trainer.some")


def lines(folder):
    return [json.loads(line) for line in (folder / "stage2_log.jsonl").read_text().splitlines()]


@pytest.fixture
def log(tmp_path):
    log = RunLog(tmp_path)
    yield log
    log.close()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Interrupted("asked to stop (SIGTERM)"), ("stopped", "asked to stop (SIGTERM)")),
        (KeyboardInterrupt(), ("stopped", "KeyboardInterrupt")),
        (ValueError('{"event": "end"}\n\x1b[2J'), ("failed", '{"event": "end"}\\n\\x1b[2J')),
        (ValueError("x" * 5000), ("failed", "x" * 1000)),
    ],
)
def test_an_early_end_is_told_with_its_reason(tmp_path, log, error, told):
    with pytest.raises(type(error)) as met, logged_end(log, Reporter()):
        raise error
    assert met.value is error
    assert lines(tmp_path) == [{"event": "end", "step": 0, "outcome": told[0], "message": told[1]}]


def test_a_run_that_was_trained_to_its_end_is_done(tmp_path, log):
    reporter = Reporter()
    with logged_end(log, reporter):
        reporter.update(step=7)
    assert lines(tmp_path) == [{"event": "end", "step": 7, "outcome": "done", "message": ""}]


def test_a_disk_without_room_does_not_hide_what_ended_the_run(tmp_path, caplog):
    (tmp_path / "stage2_log.jsonl").symlink_to("/dev/full")
    log = RunLog(tmp_path)
    with pytest.raises(ValueError, match="the reason"), logged_end(log, Reporter()):
        raise ValueError("the reason")
    assert "could not be logged" in caplog.text
    with pytest.raises(OSError, match="No space left"):
        log.close()


def test_warnings_are_in_the_file_and_not_on_stdout(tmp_path, log, capsys, caplog):
    with caplog.at_level(logging.INFO), log.keeping_warnings():
        logger.info("nothing")
        logger.warning("server %s is\nslow", "a")
        logger.error("lost")
    logger.warning("after the run")
    assert lines(tmp_path) == [
        {"event": "warning", "level": level, "logger": logger.name, "message": message}
        for level, message in (("WARNING", "server a is\\nslow"), ("ERROR", "lost"))
    ]
    assert capsys.readouterr().out == ""
