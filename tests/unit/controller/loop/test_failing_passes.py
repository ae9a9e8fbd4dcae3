"""A pass whose write Kueue has overtaken."""

import pytest

from stage2_controller.plan import Plan
from stage2_controller.spec.names import Key
from tests.unit.controller.loop.test_deleted_mid_pass import Stage
from tests.unit.controller.loop.test_reconcile import KEY


async def test_a_job_whose_workload_kueue_wrote_at_the_same_time_has_another_pass_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage()

    async def overtaken(key: Key, made: Plan) -> bool:
        return False

    monkeypatch.setattr(stage.leader, "_patch_workload", overtaken)
    assert await stage.leader(KEY) == 1
