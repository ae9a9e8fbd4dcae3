"""`stage2 report`: the tables of a run, and that a long log is not kept in memory."""

import io
import json
import tracemalloc

import pytest
from PIL import Image
from rich.console import Console

from stage2_api.errors import ConfigError
from stage2_report import picture
from stage2_report.html_page import PageRequest, render_page
from stage2_report.tables import EvaluationRows, StepRows, print_records, report_runs
from stage2_trainer.data.drawing import draw_bar
from stage2_trainer.telemetry.timeline import PARTS, ServerTime, StepTime
from stage2_trainer.wire.requests import DraftCounts

STEPS = 10_000
LONG = {"event": "evaluation_sample", "step": 1, "text": "x" * 200_000}
SERVERS = [ServerTime("http://127.0.0.1:8000", 0.75, 10.5)]
OLD_EVALUATION = {"event": "evaluation", "step": 3} | {
    f"eval_rollout_{name}": 0.25
    for name in ("precision", "recall", "f1", "matched_maskiou_mean", "recall_iou50", "f1_iou50")
}


def timed_step(number, wall, *, servers=SERVERS, **parts):
    time = StepTime(wall, {**dict.fromkeys(PARTS, 0.0), **parts}, servers)
    named = [{"server": one.server, "busy_share": one.busy_share, "in_flight": one.in_flight} for one in servers]
    return {"event": "step", "step": number, "loss": 1.0, **time.figures(), "servers": named}


def grpo_step(number):
    figures = {"loss": -0.02, "reward": 0.2 * number, "reward_std": 0.25, "completions/mean_length": 40.0}
    rewards = {"rewards/summary.format/mean": 0.25 * number, "rewards/summary.format/std": 0.1}
    return {"event": "step", "step": number, "sync/seconds": 0.1, **figures, **rewards}


def write_log(folder, records):
    path = folder / "stage2_log.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def printed_lines(capsys):
    return [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]


def test_times_are_shown_as_mean_per_step(tmp_path, capsys):
    idle = [ServerTime("http://127.0.0.1:8000", 0.25, 0.5)]
    steps = [
        timed_step(1, 4.0, generate=3.0, forward=1.0),
        timed_step(2, 6.0, servers=idle, generate=1.0, backward=5.0),
    ]
    report_runs([write_log(tmp_path, steps)])
    lines = printed_lines(capsys)
    assert "generate 2.00 40%" in lines
    assert "backward 2.50 50%" in lines
    assert "whole step 5.00 100%" in lines
    assert not any(line.startswith("cpu") for line in lines)
    assert "learner idle 40%" in lines, "all but forward and backward"
    assert "http://127.0.0.1:8000 busy, 4.5 requests at once 45%" in lines, "of 10 seconds, and not of two steps"


def test_drafts_are_shown_over_all_steps_by_server_and_position(tmp_path, capsys):
    """a: 10 + 30 tokens with 3 + 2 accepted of 4 + 6; first tokens of 2 + 1 of 2 + 2 drafts; b drafted nothing."""
    first = [DraftCounts("http://a", 10, 4, 3, (0, 1, 1)), DraftCounts("http://b", 10)]
    reuses, second = [{"rollout/buffer_reuse": value} for value in (1.0, 0.0)]
    later = [DraftCounts("http://a", 30, 6, 2, (1, 0, 1))]
    steps = [(first, {}), (first, reuses), (later, second)]
    drafted = [
        {**timed_step(number, 4.0), **more, "drafts": [one.figures() for one in counts]}
        for number, (counts, more) in enumerate(steps, start=1)
    ]
    report_runs([write_log(tmp_path, drafted)])
    lines = printed_lines(capsys)
    assert "decode steps for each token 0.875" in lines
    assert "of drafted tokens, accepted 50%" in lines
    assert "of drafts, first 1 accepted 75%" in lines
    assert "of drafts, first 2 accepted 50%" in lines


def test_no_table_of_drafts_is_shown_where_nothing_was_drafted(tmp_path, capsys):
    rates = {"server": "http://a", "decode_steps_per_token": 0.5}  # of an earlier version
    drafts = [[DraftCounts("http://a", 10).figures()], [rates], []]
    report_runs([write_log(tmp_path, [{**timed_step(n, 4.0), "drafts": one} for n, one in enumerate(drafts, 1)])])
    assert "Drafts" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("step", "has_times"),
    [
        ({"event": "step", "step": 1, "loss": 1.0}, False),
        ({**timed_step(1, 4.0, servers=(), generate=3.0), "reward": 0.5, "reward_std": 0.25}, True),
    ],
    ids=["of an older log", "of GRPO, without servers"],
)
def test_steps_without_times_or_servers_are_accepted(tmp_path, capsys, step, has_times):
    report_runs([write_log(tmp_path, [step])])
    assert ("Where the time went" in capsys.readouterr().out) == has_times


def test_grpo_run_shows_mean_of_each_reward(tmp_path, capsys):
    evaluation = {"event": "evaluation", "step": 3, "eval_reward": 0.625, "eval_rewards/summary.format/mean": 1.0}
    report_runs([write_log(tmp_path, [*map(grpo_step, (1, 2, 3)), evaluation])])
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("format", "0.600", "0.75", "0.625"))
    assert "matched" not in shown


@pytest.mark.parametrize("evaluations", [[], [{"event": "evaluation", "step": 1, "eval_reward": 0.5}]])
def test_grpo_run_has_no_picture_and_error_suggests_html(evaluations, tmp_path):
    with pytest.raises(ConfigError, match=r"--picture.*needs held-out rollouts.*--html"):
        report_runs([write_log(tmp_path, [grpo_step(1), *evaluations])], picture=tmp_path / "out.png")


def test_skipped_samples_are_counted_with_first_reasons(tmp_path, capsys):
    bad = [{"event": "bad_sample", "sample_id": f"s{k % 5}", "reason": f"[{k % 5}] is cut off"} for k in range(9)]
    write_log(tmp_path, [timed_step(1, 2.0), *bad])
    report_runs([tmp_path])
    sentence = "5 samples set aside (s0: [0] is cut off; s1: [1] is cut off; s2: [2] is cut off; …)"
    assert sentence in capsys.readouterr().out
    assert sentence in render_page(PageRequest([tmp_path], tmp_path / "page.html"))


def test_json_option_prints_every_record_of_log(tmp_path, capsys):
    log = write_log(tmp_path, [grpo_step(number) for number in range(1, 60)])
    log.write_text("a line of a library\n" + log.read_text())
    print_records([log])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["run"], one["step"]) for one in found] == [(str(log), number) for number in range(1, 60)]
    log.write_text("")
    with pytest.raises(ConfigError, match="no step record"):
        print_records([log])


def test_log_without_steps_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no step record"):
        report_runs([write_log(tmp_path, [])])


def test_long_run_is_not_kept_in_memory(tmp_path, capsys):
    records = [
        record
        for number in range(1, STEPS + 1)
        for record in (timed_step(number, 4.0, generate=3.0, forward=1.0), *([LONG] if number % 100 == 0 else []))
    ]
    log = write_log(tmp_path, records)
    del records
    report_runs([log])  # one-off imports and caches are not measured
    tracemalloc.start()
    try:
        report_runs([log])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert log.stat().st_size > 20_000_000
    assert peak < 3_000_000
    lines = printed_lines(capsys)
    shown = [line.partition(" ")[0] for line in lines if line.endswith("1.000") or line.startswith("…")]
    numbers = [*range(1, 21), "…", *range(STEPS - 19, STEPS + 1)]
    assert shown == [str(one) for one in numbers] * 2
    assert lines.count("generate 3.00 75%") == 2


@pytest.mark.parametrize("count", [1, 20, 21, 40, 41, 60])
def test_first_and_last_twenty_steps_are_shown(count):
    rows = StepRows()
    for number in range(1, count + 1):
        rows.add({"event": "step", "step": number, "loss": 1.0})
    shown = [*rows.table().columns[0].cells]
    every = [str(number) for number in range(1, count + 1)]
    assert shown == (every if count <= 40 else [*every[:20], "…", *every[-20:]])


@pytest.mark.parametrize("with_class", [True, False], ids=["a new log", "an older log"])
def test_evaluation_table_has_class_f1_only_if_logged(with_class):
    new = {"eval_rollout_f1_class_iou50": 0.125, "eval_rollout_ap": 0.0625}
    rows = EvaluationRows()
    rows.add({**OLD_EVALUATION, **(new if with_class else {})})
    console = Console(width=100, file=io.StringIO())
    console.print(rows.table())
    shown = " ".join(console.file.getvalue().replace("┃", " ").split())
    assert [text in shown for text in ("0.125", "0.062")] == [with_class] * 2
    assert "figures of training's matching, but for F1 with class and AP" in shown
    assert "@0.5" not in shown, "a label of `stage2 evaluate`, which matches otherwise"


RED, GREEN, BLUE = (200, 0, 0), (0, 200, 0), (0, 0, 200)


def evaluated(folder, answers, *, samples=("better", "same", "worse")):
    """Write a log with one step and these answers: those of each sample, by evaluated step."""
    truth = [{"desc": "cup", "kind": "bbox", "bins": [100, 100, 900, 900]}]
    box = [f"<|coord_{value}|>" for value in (100, 100, 900, 900)]
    right, wrong = (json.dumps({"object_1": {"desc": name, "bbox_2d": box}}) for name in ("cup", "cat"))
    lines = [{"event": "step", "step": 1, "loss": 1.0}]
    for step, found in answers.items():
        for index, (name, is_right) in enumerate(zip(samples, found, strict=True)):
            text = right if is_right else wrong
            sample = {"sample_id": name, "record_index": index, "image": f"{name}.png", "width": 20, "height": 10}
            sample["ground_truth"] = truth
            lines.append({"event": "evaluation_sample", "step": step, **sample, "text": text})
        lines.append(OLD_EVALUATION | {"step": step})
    folder.mkdir()
    return write_log(folder, lines)


@pytest.fixture
def images(tmp_path):
    for name, color in {"better": GREEN, "same": BLUE, "worse": RED}.items():
        Image.new("RGB", (20, 10), color).save(tmp_path / f"{name}.png")
    return tmp_path


def test_picture_shows_start_and_end_of_first_run_and_end_of_second(tmp_path, images):
    one = evaluated(tmp_path / "one", {3: (0, 1, 1), 5: (0, 0, 0), 9: (1, 1, 0)})
    other = evaluated(tmp_path / "other", {3: (0, 1, 1), 8: (0, 0, 0)})
    sizes = []
    for runs in ([one], [one, other]):
        report_runs(runs, picture=tmp_path / "out.png", images=images)
        with Image.open(tmp_path / "out.png") as image:
            sizes.append(image.size)
    assert sizes[0][0] / 3 == pytest.approx(sizes[1][0] / 4, abs=4)
    strange = evaluated(tmp_path / "strange", {1: (0,)}, samples=("unknown",))
    with pytest.raises(ConfigError, match="the same held-out records"):
        report_runs([one, strange], picture=tmp_path / "out.png", images=images)


def test_image_missing_from_log_is_white_in_picture(tmp_path, images):
    log = evaluated(tmp_path / "one", {3: (0, 0, 1)})
    log.write_text(log.read_text().replace('"better.png"', "null"))
    report_runs([log], picture=tmp_path / "out.png", images=images)
    with Image.open(tmp_path / "out.png") as image:
        assert sorted(image.getpixel((150, top)) for top in (140, 290, 440)) == [BLUE, RED, (255, 255, 255)]


def test_picture_starts_with_largest_gain_and_shows_shares_of_all_images(tmp_path, images):
    log = evaluated(tmp_path / "one", {3: (0, 0, 1), 9: (1, 0, 0)})
    report_runs([log], picture=tmp_path / "out.png", images=images)
    with Image.open(tmp_path / "out.png") as image:
        rows = [image.getpixel((150, top)) for top in (140, 290, 440)]
        before, after = (
            sum(image.getpixel((left + x, 30)) == (26, 127, 55) for x in range(288)) for left in (300, 594)
        )
    assert rows == [GREEN, BLUE, RED]
    assert (before, after) == (pytest.approx(96, abs=2),) * 2


def test_bar_label_shows_shares_of_found_and_of_named_objects(tmp_path, images, monkeypatch):
    labels = []

    def labelled(share, label, color):
        labels.append(label)
        return draw_bar(share, label, color)

    monkeypatch.setattr(picture, "draw_bar", labelled)
    log = evaluated(tmp_path / "one", {3: (0, 0, 1), 9: (1, 1, 0)})
    report_runs([log], picture=tmp_path / "out.png", images=images)
    assert labels == ["3 objects: 100% found, 33% named", "3 objects: 100% found, 67% named"]


def test_match_columns_count_gated_pairs_and_null_figures_are_blank(tmp_path, capsys):
    counts = {"valid_pred_objects": 3.0, "matched_maskiou_count": 1.0, "following": 1.0, "fn": 4.0, "fn_appended": 0.0}
    figures = {f"rollout/{name}": value for name, value in counts.items()}
    nulls = {key: None for key in OLD_EVALUATION if key.startswith("eval_")}
    evaluations = [{**OLD_EVALUATION, "step": 0}, {**OLD_EVALUATION, **nulls}]
    report_runs([write_log(tmp_path, [{**timed_step(1, 4.0), **figures}, *evaluations])])
    lines = printed_lines(capsys)
    assert any("parsed matched following missed" in line.replace("┃ ", "") for line in lines)
    assert any(line.startswith("1 1.000 3 1 1 4") for line in lines)
    assert "0 0.250 0.250 0.250 0.250 0.250 0.250" in lines
    assert "3" in lines, "a row of blanks"
