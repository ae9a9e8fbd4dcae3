"""What a scraper gets: the last step's figures, sums over the run, and what the learner is doing now."""

from __future__ import annotations

import math
import re
from contextlib import ExitStack

import httpx
import pytest

from stage2_api.pod.layout import METRICS_PORT_VARIABLE
from stage2_api.pod.report import SyncStatus
from stage2_trainer.learner.step_record import StepRecord, rollout_metrics
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.prometheus import COUNTERS, GAUGES, MeteredLog, metered
from stage2_trainer.telemetry.run_log import SilentLog
from stage2_trainer.wire.requests import DraftCounts
from tests.support.ports import free_port

STEP = {"loss": 2.5, "sync/bytes": 100.0, "sync/seconds": 0.5, "rollout/gen_tokens_per_s": 40.0}
SECTION_14 = """
parse_dropped_invalid parse_truncated parse_truncated_rate parse_obj_total parse_obj_valid_frac
parse_obj_drop_frac sample_valid_pred_rate sample_any_match_rate fn_appended gating_rejections gating_rejection_rate
valid_pred_objects gt_objects match_rate precision recall f1 fp fn fp_per_sample fn_per_sample gt_objects_per_sample
valid_pred_objects_per_sample matched_maskiou_mean matched_maskiou_count excluded_rate prefix_coord_targets_total
prefix_coord_targets_per_matched tail_ignore_frac prompt_len_mean prompt_len_p90 rollout_len_mean rollout_len_p90
train_len_mean train_len_p90 append_len_mean append_len_p90 encoded_len_mean encoded_len_p90 prefix_len_mean
decode_greedy decode_beam matched_for_supervision excluded_from_supervision gen_new_tokens_total gen_new_tokens_mean
gen_new_tokens_p90 gen_new_tokens_p99 gen_tokens_per_s
"""
TIMES = "forward_s mask_build_s rollout_generate_s rollout_parse_match_s rollout_teacher_encode_s post_rollout_pack_s"


@pytest.fixture
def served():
    """A log with metrics, its reporter, and a function that scrapes both."""
    reporter = Reporter()
    port = free_port()
    with ExitStack() as stack:
        log = metered(SilentLog(), reporter, {METRICS_PORT_VARIABLE: str(port)}, host="127.0.0.1", stack=stack)

        def scrape() -> dict[str, float]:
            text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
            return {name: float(value) for name, value in re.findall(r"^(\w\S*) (\S+)$", text, re.MULTILINE)}

        yield log, reporter, scrape


def test_gauges_of_last_step_and_counters_over_run_are_served(served):
    log, _, scrape = served
    log.write("step", STEP)
    log.write("evaluation", {"loss": 99.0})
    log.write("step", {**STEP, "loss": 1.5})
    found = scrape()
    assert (found["stage2_loss"], found["stage2_rollout_tokens_per_second"]) == (1.5, 40.0)
    assert (found["stage2_sync_bytes_total"], found["stage2_sync_seconds_total"]) == (200.0, 1.0)


def test_step_phases_and_server_load_are_served(served):
    log, _, scrape = served
    servers = [{"server": "http://a", "busy_share": 0.5, "in_flight": 3.0}]
    log.write("step", {**STEP, "step/wall_s": 4.0, "step/generate_s": 3.0, "servers": servers})
    found = scrape()
    assert (found["stage2_step_seconds"], found['stage2_step_part_seconds{part="generate"}']) == (4.0, 3.0)
    assert found['stage2_server_busy_ratio{server="http://a"}'] == 0.5
    assert found['stage2_server_requests_in_flight{server="http://a"}'] == 3.0


def test_served_draft_metrics_of_each_server_equal_hand_counts(served):
    """At a, two drafts of two tokens: one accepted whole, of the other the first token; at b nothing was drafted."""
    log, _, scrape = served
    counts = [DraftCounts("http://a", 10, 4, 3, (0, 1, 1)), DraftCounts("http://b", 10)]
    log.write("step", {**STEP, "rollout/decode_steps_per_token": 17 / 20, "drafts": [one.figures() for one in counts]})
    found = {name: value for name, value in scrape().items() if "draft" in name or "decode" in name}
    assert found == {
        "stage2_decode_steps_per_token": 17 / 20,
        'stage2_server_decode_steps_per_token{server="http://a"}': 7 / 10,
        'stage2_server_draft_acceptance_ratio{server="http://a"}': 3 / 4,
        'stage2_server_draft_position_ratio{position="1",server="http://a"}': 1.0,
        'stage2_server_draft_position_ratio{position="2",server="http://a"}': 1 / 2,
    }


def test_drafts_of_an_earlier_step_are_not_served(served):
    log, _, scrape = served
    for counts in (DraftCounts("http://a", 10, 4, 3, (0, 1, 1)), DraftCounts("http://a", 10)):
        log.write("step", {**STEP, "rollout/draft_acceptance_rate": None, "drafts": [counts.figures()]})
    found = scrape()
    assert not [name for name in found if name.startswith(("stage2_server_draft", "stage2_server_decode"))]
    assert math.isnan(found["stage2_draft_acceptance_ratio"])


def test_gauge_is_nan_while_metric_is_null(served):
    log, _, scrape = served
    log.write("step", {**STEP, "rollout/f1": 0.5})
    log.write("step", {**STEP, "rollout/f1": None, "rollout/gen_tokens_per_s": None, "sync/bytes": None})
    found = scrape()
    assert math.isnan(found["stage2_rollout_f1"])
    assert math.isnan(found["stage2_rollout_tokens_per_second"])
    assert found["stage2_sync_bytes_total"] == 100.0
    log.write("step", {**STEP, "rollout/f1": 0.25})
    assert scrape()["stage2_rollout_f1"] == 0.25


def test_gauge_is_absent_until_step_has_metric(served):
    """Stage 1 has no F1, which is not an F1 of 0."""
    log, _, scrape = served
    assert {name.partition("{")[0] for name in scrape()} == {"stage2_step", "stage2_max_steps", "stage2_phase"}
    log.write("step", {"loss": 2.5, "supervised/objects": 3.0})
    found = scrape()
    assert found["stage2_loss"] == 2.5
    assert found.keys() & {"stage2_rollout_f1", "stage2_rollout_tokens_total", "stage2_sync_seconds_total"} == set()


def test_tokens_of_reused_rollouts_are_counted_once(served):
    log, _, scrape = served
    for reused in (0.0, 1.0, 1.0, 0.0):
        log.write("step", {**STEP, "rollout/gen_new_tokens_total": 50.0, "rollout/buffer_reuse": reused})
    assert scrape()["stage2_rollout_tokens_total"] == 100.0


def test_current_phase_and_sync_version_are_served(served):
    _, reporter, scrape = served
    sync = SyncStatus(requested_mode="full", effective_mode="full", version=3)
    reporter.update(phase="rollout", step=3, max_steps=9, sync=sync)
    found = scrape()
    assert (found["stage2_step"], found["stage2_max_steps"], found["stage2_sync_version"]) == (3, 9, 3)
    phases = {name: value for name, value in found.items() if name.startswith("stage2_phase")}
    assert phases['stage2_phase{phase="rollout"}'] == 1
    assert sum(phases.values()) == 1


def test_no_metrics_are_served_without_port():
    log = SilentLog()
    with ExitStack() as stack:
        assert metered(log, Reporter(), {}, host="127.0.0.1", stack=stack) is log
        assert not isinstance(log, MeteredLog)


def test_required_log_keys_exist():
    assert {f"rollout/{name}" for name in SECTION_14.split()} <= set(rollout_metrics([], top_k=5, generate_s=0.0))
    assert {f"time/{name}" for name in TIMES.split()} <= set(StepRecord().figures(top_k=5))


def test_prometheus_metrics_use_existing_log_keys():
    known = {
        *rollout_metrics([], top_k=5, generate_s=0.0),
        *StepRecord().figures(top_k=5),
        "loss",
        "memory/peak_bytes",
        "packing/post_rollout_fill",
        "packing/post_rollout_buffer",
    }
    assert {key for key, _ in (*GAUGES.values(), *COUNTERS.values())} <= known
