"""A computation that keeps the event loop is measured."""

import asyncio
import time

import pytest

from stage2_controller.loop import controller


async def test_a_block_is_measured_and_a_long_one_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(controller, "LOGGED_LAG_S", 0.2)
    late: asyncio.Queue[float] = asyncio.Queue()
    watching = asyncio.create_task(controller.measure_lag(late.put_nowait))
    await late.get()
    time.sleep(0.5)
    while await late.get() < 0.3:
        pass
    watching.cancel()
    assert "stood still" in caplog.text
