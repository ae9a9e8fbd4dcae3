"""The controller's HTTP endpoints, and the figures behind them."""

import aiohttp

from stage2_controller import metrics
from stage2_controller.metrics import Metrics

JOB = {
    "metadata": {"namespace": "team-a", "name": "job-3v1"},
    "status": {"phase": "Running", "step": 3, "maxSteps": 10, "loss": 0.5, "sync": {"seconds": 0.2}},
}


async def answers(problem: str | None, not_ready: str | None) -> dict[str, tuple[int, str]]:
    figures = Metrics(lambda: [JOB])
    figures.requested("get", "secrets", 200)
    runner = await metrics.serve(
        problem=lambda: problem, not_ready=lambda: not_ready, figures=figures.text, host="127.0.0.1", port=0
    )
    host, port = runner.addresses[0][:2]
    found = {}
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
        for path in ("/healthz", "/readyz", "/metrics"):
            async with session.get(path) as response:
                found[path] = (response.status, await response.text())
    await runner.cleanup()
    return found


async def test_a_problem_is_reported_with_status_500() -> None:
    found = await answers("the watches are deaf", None)
    assert found["/healthz"] == (500, "the watches are deaf")
    assert found["/readyz"] == (200, "ok")


async def test_a_controller_that_knows_nothing_yet_lives_and_is_not_ready() -> None:
    found = await answers(None, "does not know yet what exists")
    assert (found["/healthz"][0], found["/readyz"][0]) == (200, 500)


async def test_the_figures_report_requests_and_jobs() -> None:
    lines = (await answers(None, None))["/metrics"][1].splitlines()
    assert 'stage2_api_requests_total{code="200",resource="secrets",verb="get"} 1.0' in lines
    assert 'stage2_jobs{phase="Running"} 1.0' in lines
    assert 'stage2_job_step{name="job-3v1",namespace="team-a"} 3.0' in lines
    assert 'stage2_job_sync_seconds{name="job-3v1",namespace="team-a"} 0.2' in lines
