"""`stage2 report --html OUT --watch SECONDS`: the page is written anew whenever the run has written more."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from stage2_report.html_page import PageRequest, write_html
from stage2_trainer.telemetry.run_log import STEP_LOG


def write_page_of_runs(
    request: PageRequest, *, sleep: Callable[[float], None] = time.sleep, say: Callable[[str], None] = print
) -> None:
    """Write the page; with `refresh`, again and again until it is interrupted. Raises ConfigError.

    The last page does not refresh itself. Where nothing was written meanwhile, neither is a page.
    """
    if request.refresh is None:
        write_html(request)
        say(f"page: {request.output}")
        return
    written: list[int] = []
    try:
        for _ in _rounds(request.refresh, sleep):
            sizes = [_size(run) for run in request.runs]
            if sizes != written:
                write_html(request)
                say(f"page: {request.output}, {time.strftime('%H:%M:%S')}; Ctrl-C ends it")
            written = sizes
    except KeyboardInterrupt:
        write_html(replace(request, refresh=None))


def _rounds(seconds: int, sleep: Callable[[float], None]) -> Iterator[None]:
    while True:
        yield
        sleep(seconds)


def _size(run: Path) -> int:
    log = run / STEP_LOG if os.path.isdir(run) else run
    return log.stat().st_size if os.path.exists(log) else 0
