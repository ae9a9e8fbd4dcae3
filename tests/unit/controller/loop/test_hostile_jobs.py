"""Jobs that are made to harm the controller: what they cost, where they are read, and that their status is written."""

import copy
import threading
from typing import Any

import pytest

from stage2_api.validation.size import LARGEST
from stage2_controller.children import build
from stage2_controller.job import names
from stage2_controller.loop.work_queue import Broken, RetryLater
from stage2_controller.state import conditions, reasons
from tests.unit.controller import builders as b
from tests.unit.controller.fake_server import KEY, Life, Object
from tests.unit.controller.loop.test_reconcile import life as life  # a fixture

LOOP = threading.current_thread().name


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The thread of each time that a spec is read whole."""
    reported: list[str] = []
    real = build.parse

    def seen(*arguments: Any) -> Any:
        reported.append(threading.current_thread().name)
        return real(*arguments)

    monkeypatch.setattr(build, "parse", seen)
    return reported


def keys(count: int) -> Object:
    """A job with as many keys that nobody knows."""
    made = b.job()
    made["spec"]["config"] |= {f"key_{index}": index for index in range(count)}
    return made


def listed(count: int) -> Object:
    """A job that is valid, with a long list where any may stand."""
    made = copy.deepcopy(b.job())
    made["spec"]["config"]["deepspeed"] = {"train_batch_size": 1, "long": [1] * count}
    return made


def status_of(life: Life) -> Object:
    """The status that the API server holds."""
    found: Object = life.server.objects[names.KIND, KEY.name]["status"]
    return found


def accepted(life: Life) -> Object:
    """The job's condition Accepted."""
    return dict(conditions.find(status_of(life), reasons.ACCEPTED) or {})


@pytest.mark.parametrize("errors", [1, 300, 3_000])
async def test_long_refusal_by_api_server_is_cut_to_fit_status(life: Life, errors: int) -> None:
    one = "spec.template.spec.tolerations[0].effect: Unsupported value: 'Bad': supported values: 'NoExecute', 'NoX'"
    life.server.refused["Deployment"] = f"Deployment is invalid: [{', '.join([one] * errors)}]: mend them all"
    life.server.refused["Service"] = "exceeded quota: small"
    for kind in ("Service", "Deployment"):
        with pytest.raises(RetryLater) as reported:
            await life.one_pass()
        assert kind in str(reported.value)
        assert life.children_applied() == ("False", reasons.CHILD_REFUSED)
        life.server.refused.pop("Service", None)
    status = status_of(life)
    assert "Deployment is invalid" in status["message"]
    assert status["message"].endswith("mend them all")
    life.server.requests.clear()
    with pytest.raises(RetryLater):
        await life.one_pass()
    assert ("apply", "status") not in life.server.requests


@pytest.mark.parametrize("length", [100, 40_000, 400_000])
async def test_long_quota_message_is_cut_to_fit_condition(life: Life, length: int) -> None:
    await life.one_pass()
    there = life.server.objects["Deployment", "job-3v1-rollout"]
    life.server.add({**there, "status": b.refused_by_quota("exceeded quota: " + "x" * length)})
    await life.one_pass()
    reported = conditions.find(status_of(life), reasons.ROLLOUT_READY)
    assert reported is not None
    assert reported["reason"] == reasons.POD_REFUSED
    assert "exceeded quota" in reported["message"]
    assert len(reported["message"]) <= conditions.MESSAGE_CHARS


async def test_invalid_spec_is_parsed_once_for_all_passes(life: Life, readers: list[str]) -> None:
    life.server.add(b.job(learner={"gpus": 1, "template": {"spec": {"hostNetwork": True}}}))
    for _ in range(5):
        await life.one_pass()
    assert len(readers) == 1
    assert accepted(life)["reason"] == reasons.INVALID_SPEC
    life.server.add(b.job(), generation=2)
    await life.one_pass()
    assert len(readers) == 2
    assert accepted(life)["reason"] == reasons.VALID


@pytest.mark.parametrize("make", [keys, listed])
async def test_oversized_spec_is_refused_before_parsing(life: Life, make: Any) -> None:
    life.server.add(make(3 * LARGEST))
    await life.one_pass()
    reported = accepted(life)
    assert reported["reason"] == reasons.INVALID_SPEC
    assert reported["message"].startswith(
        "spec.config: more than 131,072 characters as JSON; the whole spec must have at most"
    )
    assert life.server.events == [reasons.INVALID_SPEC]
    assert not life.server.written()


@pytest.mark.parametrize(("make", "count"), [(keys, 7_000), (listed, 12_000)])
async def test_only_large_spec_is_parsed_outside_event_loop(
    life: Life, readers: list[str], make: Any, count: int
) -> None:
    await life.one_pass()
    assert readers == [LOOP]
    life.server.add(make(count), generation=2)
    for _ in range(3):
        await life.one_pass()
    assert len(readers) == 2
    assert readers[1] != LOOP


async def test_bug_while_parsing_large_spec_is_reported(
    life: Life, readers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(build, "containers", broken)
    life.server.add(listed(12_000))
    with pytest.raises(Broken):
        await life.one_pass()
    assert accepted(life)["reason"] == reasons.INTERNAL_ERROR
    assert "a bug" in accepted(life)["message"]
    assert LOOP not in readers
    assert len(readers) == 1


async def test_many_spec_mistakes_are_cut_to_limit_and_rest_counted(life: Life) -> None:
    life.server.add(keys(5_000))
    await life.one_pass()
    message = accepted(life)["message"]
    assert message.startswith("spec.config.key_0: 0; ")
    assert message.splitlines()[-1] == f"and {5_000 - len(message.splitlines()) + 1} more"
    assert len(message) <= conditions.MESSAGE_CHARS + 100
