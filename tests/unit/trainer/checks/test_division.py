"""Other divisions of a job's GPUs, from hand-made logs and from logs that the model of bench/schedule writes."""

import re
from statistics import fmean
from unittest.mock import patch

import pytest
from bench import schedule, slow_servers
from bench.schedule import Job
from bench.timed_learner import OPTIMIZER_S, SYNC_S
from hypothesis import given, settings
from hypothesis import strategies as st

from stage2_trainer.checks.division import LEAST, Division, LoggedStep, SharedRows, check_division, logged_steps
from stage2_trainer.checks.examination import Devices
from stage2_trainer.learner.rows import RowGroup, divided
from tests.unit.trainer.learner.configs import SERVER, run_config

START = {"event": "start", "step": 0, "max_steps": 99, "processes": 1}
FOUR = Devices(3, 1, 1)
EIGHT = SharedRows(8, 48_000.0, 12_000)


def config(*, pipelined=True, learners="one", **training):
    vllm = {"mode": "server", "server": SERVER | {"learners": learners}}
    matching = {"vllm": vllm, "pipeline": {"enabled": pipelined}, "post_rollout_pack_scope": "step"}
    return run_config(matching=matching, training={"packing": True, **training}, global_max_length=12_000)


def step(*, wall=10.0, busy=(0.3, 0.4, 0.5), generate=0.0, forward=3.0, backward=6.0, rows=8, **more):
    """One optimizer step of 32 answers, 500 tokens each; the segments are 1,500 tokens long."""
    return {
        "event": "step",
        "step/wall_s": wall,
        "step/generate_s": generate,
        "step/wait_s": 0.0,
        "step/sync_s": 0.5,
        "step/forward_s": forward,
        "step/backward_s": backward,
        "rollout/gen_new_tokens_total": 16_000.0,
        "rollout/gen_new_tokens_mean": 500.0,
        "rollout/encoded_len_mean": 1_500.0,
        "packing/post_rollout_selected_total_len": 48_000.0 / rows,
        "rollout/decode_steps_per_token": 0.25,
        "rollout/staleness": 1.0,
        "servers": [{"server": f"http://{i}", "busy_share": one, "in_flight": 1.0} for i, one in enumerate(busy)],
        **more,
    }


def log(*steps):
    return [START, step(wall=99.0), *steps]


def of(records, configuration=None, devices=FOUR):
    (found,) = check_division(configuration or config(), devices, records)
    return found


def test_logged_step_has_figures_of_its_record():
    (found,) = logged_steps(log({**step(generate=1.0), "step/wait_s": 1.0}), config())
    assert found == LoggedStep(Division(3, 1), 10.0, 5.0, 8.0, 1.0, 3.0, 6.0, 0.5, EIGHT, 6_000.0, 0.25)


def test_pipelined_step_takes_what_its_slower_half_takes():
    """10 s of the learner, 9 of them passes on 8 rows of at most a quarter of all tokens; servers 5 s, push 0.5."""
    (found,) = logged_steps(log(step()), config())
    assert found.seconds(Division(3, 1), pipelined=True) == (10.0, 10.0)
    assert found.seconds(Division(2, 2), pipelined=True) == pytest.approx((5.5, 8.0)), "5 s of servers, or 7.5"
    assert found.seconds(Division(1, 3), pipelined=True) == pytest.approx((5.5, 15.5))


def test_process_with_most_rows_counts():
    """Three full rows on two processes are two passes of the busier one."""
    (found,) = logged_steps(log(step(rows=3, busy=(0.1,))), config())
    assert found.seconds(Division(1, 2), pipelined=True) == pytest.approx((7.0, 7.0))
    assert found.seconds(Division(1, 9), pipelined=True) == pytest.approx((4.0, 4.0)), "one row is the least"


def test_two_rows_may_be_so_uneven_that_second_process_hardly_helps():
    """24,000 tokens fill two rows of 12,000; of 13,000 the first may have all but 1,000."""
    assert SharedRows(2, 24_000, 12_000).busiest(2) == (0.5, 0.5)
    assert SharedRows(2, 13_000, 12_000).busiest(2) == pytest.approx((0.5, 12 / 13))
    assert SharedRows(2, 13_000, 13_000).busiest(2) == (0.5, 1.0), "nothing bounds a row"


@settings(max_examples=200)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.integers(1, 6))
def test_share_of_busiest_process_is_that_of_rows_as_learner_divides_them(tokens, learners):
    groups = [RowGroup(place, [[range(length)]], {}, []) for place, length in enumerate(tokens)]
    busiest = max(sum(one.tokens for one in share) for share in divided(groups, learners))
    least, most = SharedRows(len(tokens), sum(tokens), 1000).busiest(learners)
    assert least - 1e-9 <= busiest / sum(tokens) <= most + 1e-9


def test_waits_for_anything_but_answers_are_not_saved_by_another_division():
    """Servers 5 s, the learner 5 s, and 10 s of waiting for a server that restarts."""
    waited = {**step(wall=20.0, busy=(0.25,), generate=5.0, forward=1.0, backward=1.0), "step/wait_s": 10.0}
    (found,) = logged_steps(log(waited), config(pipelined=False))
    assert found.seconds(Division(1, 2), pipelined=False)[1] > 17.0
    assert of(log(*[waited] * LEAST), config(pipelined=False), Devices(1, 1, 2)).verdict == "good"


def test_pipelined_step_that_loses_time_may_lose_it_with_other_divisions_or_not():
    """Servers and learner take 6 s each, and the step 9."""
    (found,) = logged_steps(log(step(wall=9.0, busy=(5.5 / 9,), generate=3.0, forward=2.0, backward=3.0)), config())
    assert found.seconds(Division(1, 2), pipelined=True) == pytest.approx((6.0, 9.0))


def test_step_that_is_not_pipelined_takes_both_halves():
    """Servers 5 s, then the learner's 7 s, 6 of them passes of which 2 s may be backward passes made again.

    Of two processes one has at the most 5/8 of the tokens of eight rows that are three quarters full at the most.
    """
    (found,) = logged_steps(log(step(generate=3.0, forward=2.0, backward=4.0)), config(pipelined=False))
    assert found.seconds(Division(2, 2), pipelined=False) == pytest.approx((5 + 4 - 1, 7.5 + 1 + 6 * 5 / 8))
    two = LoggedStep(Division(2, 2), 13.0, 6.0, 7.0, 0.0, 2.0, 4.0, 0.5, EIGHT, None, None)
    assert two.seconds(Division(3, 1), pipelined=False) == pytest.approx((1 + 6 * 8 / 5, 6 + 13)), "4 s to 6; 12 s"


def test_servers_that_are_added_help_at_most_in_proportion():
    found = LoggedStep(Division(2, 2), 10.0, 9.5, 5.0, 0.0, 2.0, 2.0, 0.5, EIGHT, None, None)
    assert found.seconds(Division(3, 1), pipelined=True) == pytest.approx((1 + 4 * 8 / 5, 10.0)), "or as many s"


def test_division_that_is_surely_faster_is_recommended():
    found = of(log(*[step()] * LEAST))
    assert found.verdict == "doubtful"
    assert found.status == (
        "3 + 1 (servers + learner GPUs) took 10.0 s a step (mean of 10): servers 5.0 s (0.25 decode steps a token), the"
        " learner 10.0 s (8.0 rows of 6,000 tokens); 2 + 2 would take 5.5 to 8.0 s"
    )
    assert found.way_out == (
        "set spec.rollout.servers to 2 and spec.learner.gpus to 2, and vllm.server.learners to sharded: the run goes on"
        " from its last checkpoint"
    )
    assert "sharded" not in of(log(*[step()] * LEAST), config(learners="sharded")).way_out


def test_division_that_may_be_slower_is_named_and_not_recommended():
    found = of(log(*[step(busy=(0.7, 0.8, 0.8))] * LEAST))
    assert (found.verdict, found.way_out) == ("good", "")
    assert found.status.endswith("; 2 + 2 would take 8.5 to 12.5 s, so no other division is sure to be faster")


def test_job_that_has_another_division_than_its_log_is_compared_with_it():
    """The learner of 2 + 2 is bound to take 5.5 s, its servers 5.5 to 8; 3 + 1 took 10."""
    found = of(log(*[step()] * LEAST), devices=Devices(2, 1, 2))
    assert found.verdict == "good"
    assert "3 + 1 (servers + learner GPUs) took 10.0 s a step (mean of 10)" in found.status
    assert "; 2 + 2, as the job is now, would take 5.5 to 8.0 s; 3 + 1 would take 10.0 s" in found.status


def test_steps_of_earlier_starts_and_first_of_each_do_not_count():
    """The first step of a start waits for its own rollouts; a start may have another division."""
    again = {**START, "processes": 2}
    records = [*log(*[step(busy=(0.4,))] * 20), again, step(wall=99.0), *[step(busy=(0.1, 0.2))] * (LEAST - 1)]
    found = logged_steps(records, config(learners="sharded"))
    assert [one.division for one in found] == [Division(2, 2)] * (LEAST - 1)
    assert of(records).status == (
        "3 + 1 (servers + learner GPUs); other divisions are compared once its log has 10 steps that count"
    )


def test_pipelined_steps_count_where_answers_are_made_beside_training():
    """Each epoch's first step requests its own answers, and its last none; an evaluation hides the next ones."""
    fresh, evaluation = step(wall=20.0, **{"rollout/staleness": 0.0}), {"event": "evaluation", "step": 9}
    records = [START, fresh, step(), step(), step(wall=3.0), fresh, step(), evaluation, step(wall=4.0), step()]
    assert [one.wall_s for one in logged_steps(records, config())] == [10.0] * 4
    in_turns = [START, *[fresh] * 2, evaluation, fresh]
    assert len(logged_steps(in_turns, config(pipelined=False))) == 2


def test_steps_before_a_server_came_or_went_do_not_count():
    found = logged_steps(log(*[step()] * 20, *[step(busy=(0.6, 0.6))] * 3), config())
    assert [one.division for one in found] == [Division(2, 1)] * 3


def test_steps_that_reuse_rollouts_count_as_often_as_those_that_make_them():
    """The first window of two lacks its first step; of five steps later the last four count."""
    reuse = run_config(matching={"rollout_buffer": {"enabled": True, "m_steps": 2}})
    records = [START, step(), *[step(busy=(0.0,)), step(busy=(0.5,))] * 2, step(busy=(0.0,))]
    assert [one.servers_s for one in logged_steps(records, reuse)] == [5.0, 0.0, 5.0, 0.0]


def test_stage_one_whose_evaluations_alone_need_servers_is_not_judged():
    stage_one = config(eval_strategy="steps", eval_steps=10)
    stage_one = stage_one.model_copy(update={"custom": stage_one.custom.model_copy(update={"trainer_variant": "sft"})})
    assert stage_one.is_supervised
    assert stage_one.makes_rollouts
    assert not list(check_division(stage_one, FOUR, log(*[step(busy=(0.0,))] * LEAST)))


ODD = [None, "x", True, float("nan"), float("inf"), -5, 10**400, 1e308, [], {}]


@pytest.mark.parametrize("odd", [*ODD, 5e-324, 0])
@pytest.mark.parametrize("key", [one for one in step() if one != "event"])
@pytest.mark.parametrize("pipelined", [True, False])
def test_odd_figure_of_a_log_never_becomes_a_claim(key, odd, pipelined):
    (found,) = check_division(config(pipelined=pipelined), FOUR, [START, *[{**step(), key: odd}] * (LEAST + 1)])
    assert not re.search("nan|inf|-[0-9]", found.status)
    if odd not in (0, 5e-324) and key != "rollout/decode_steps_per_token" and (pipelined or "staleness" not in key):
        assert found.status.endswith("steps that count")


@pytest.mark.parametrize("odd", [*ODD, 1.5, 0])
def test_odd_number_of_processes_is_no_number(odd):
    assert not logged_steps([{**START, "processes": odd}, step(), step()], config())


@pytest.mark.parametrize(
    "servers", ["abc", {"a": 1}, [1], ["a"], [None], [[]], *([{"busy_share": odd}] for odd in ODD)], ids=str
)
def test_odd_servers_are_none(servers):
    assert not logged_steps(log({**step(), "servers": servers}), config())


def test_step_without_time_for_the_learner_is_left_out():
    nothing = step(generate=10.0, busy=(0.0,))
    assert not logged_steps(log({**nothing, "step/sync_s": 0.0}), config())


@pytest.mark.parametrize(
    "lacking",
    [
        {"step/wall_s": None},
        {"step/wall_s": 0.0},
        {"servers": []},
        {"servers": [{"server": "http://a"}]},
        {"rollout/gen_new_tokens_mean": None},
        {"rollout/gen_new_tokens_total": 0.0},
        {"rollout/encoded_len_mean": "long"},
    ],
)
def test_steps_without_figures_are_left_out(lacking):
    assert not logged_steps(log({**step(), **lacking}), config())


def test_log_that_does_not_say_how_many_processes_it_is_of_is_not_judged():
    older = {key: value for key, value in START.items() if key != "processes"}
    assert not logged_steps([older, *[step()] * 20], config())


def test_without_rows_of_whole_step_processes_share_micro_steps():
    unpacked = run_config(training={"effective_batch_size": 12, "per_device_train_batch_size": 2})
    (found,) = logged_steps(log(step()), unpacked)
    assert (found.rows.groups, found.row_tokens) == (6, None)
    assert "(6.0 micro-steps)" in of(log(*[step()] * LEAST), unpacked).status


@pytest.mark.parametrize(
    ("devices", "found"),
    [(Devices(0, 1, 4), 0), (Devices(3, 1, 1, on_gpus=False), 0), (Devices(1, 1, 1), 1), (Devices(1, 4, 1), 1)],
    ids=["colocated", "on the CPU", "one server, one GPU", "one server of four GPUs"],
)
def test_only_job_with_gpus_for_servers_and_learner_can_divide_them(devices, found):
    findings = list(check_division(config(), devices, log(*[step(busy=(0.5,))] * LEAST)))
    assert [one.verdict for one in findings] == ["good"] * found
    assert "would take" not in "".join(one.status for one in findings)


def test_gpus_of_server_move_together():
    """Two servers of two GPUs and a learner GPU: no other division uses all five but one server and three GPUs."""
    found = of(log(*[step(busy=(0.2, 0.3))] * LEAST), devices=Devices(2, 2, 1))
    assert "2 + 1 (servers + learner GPUs) took" in found.status
    assert "; 1 + 3 would take" in found.status


ROW = 100  # tokens; so small that processes share passes evenly, as the model does
PLAIN = {"STEP_S": slow_servers.STEP_S, "STEP_S_PER_ANSWER": slow_servers.STEP_S_PER_ANSWER}
DRAFTS = {"STEP_S": 0.186 * 7e-3, "STEP_S_PER_ANSWER": 0.186 * (6e-5 + 12 * 27e-6)}  # of bench/speculation
LAYOUTS = {
    4: [Job("3 + 1", 3, 1, 32), Job("2 + 2", 2, 2, 32)],
    8: [Job("6 + 2", 6, 2, 64), Job("5 + 3", 5, 3, 64), Job("4 + 4", 4, 4, 64)],
}


def step_s(job, number, *, pipelined):
    """Return a step's seconds; where it is not pipelined, one process trains on rows while answers come."""
    whole = schedule.expected_whole if job.learners == 1 else schedule.expected_after
    return (schedule.expected_pipelined if pipelined else whole)(job, number, True)


def modelled(job, *, pipelined, steps):
    """Yield the log of a job by the model of bench/schedule; without overlap where it is not pipelined."""
    for number in steps:
        answers, before = (job.answers(number - back, cut=True) for back in (0, 1))
        trained = sum(schedule.sequences(before if pipelined else answers))
        passes_s, servers_s = job.gpus.train_s(trained), max(job.arrivals(answers))
        learner_s = passes_s + OPTIMIZER_S + SYNC_S
        wall = step_s(job, number, pipelined=pipelined)
        yield {
            **step(wall=wall, busy=(servers_s / wall,) * job.servers, generate=max(0.0, wall - learner_s)),
            "step/forward_s": passes_s / 3,
            "step/backward_s": passes_s * 2 / 3,
            "step/sync_s": SYNC_S,
            "rollout/encoded_len_mean": trained / 32,
            "packing/post_rollout_selected_total_len": float(ROW),
        }


@pytest.mark.parametrize("drafts", [PLAIN, DRAFTS], ids=["without drafts", "with drafts"])
@pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "in turns"])
@pytest.mark.parametrize("gpus", LAYOUTS)
def test_interval_holds_what_model_of_schedule_says_of_each_division(gpus, pipelined, drafts):
    steps = range(1, 13)
    with patch.multiple(slow_servers, **drafts):
        mean_s = {job: fmean(step_s(job, number, pipelined=pipelined) for number in steps) for job in LAYOUTS[gpus]}
        known = [job for job in LAYOUTS[gpus] if pipelined or job.learners > 1]  # the model has no times of an overlap
        logs = {job: list(modelled(job, pipelined=pipelined, steps=steps)) for job in known}
    for job, records in logs.items():
        found = logged_steps([{**START, "processes": job.learners}, step(), *records], config(learners="sharded"))
        assert len(found) == len(steps)
        for other, truth_s in mean_s.items():
            division = Division(other.servers, other.learners)
            ends = zip(*(one.seconds(division, pipelined=pipelined) for one in found), strict=True)
            least, most = map(fmean, ends)
            assert 0.99 * least <= truth_s <= 1.01 * most, f"{job.name} to {other.name}"


def test_model_with_drafts_is_told_to_take_two_learner_gpus():
    """Docs/gpu.md, "How GPUs are divided": 11.4 s with 3 + 1 and 7.5 with 2 + 2; without drafts it hardly matters."""
    verdicts = []
    for drafts in (PLAIN, DRAFTS):
        with patch.multiple(slow_servers, **drafts):
            records = [START, step(), *modelled(LAYOUTS[4][0], pipelined=True, steps=range(1, 41))]
        verdicts.append(of(records))
    assert [one.verdict for one in verdicts] == ["good", "doubtful"]
    assert "spec.learner.gpus to 2" in verdicts[1].way_out
