"""`stage2 report --html`: what the page holds, that hostile texts stay texts, and that it stays small."""

import json

import pytest
from PIL import Image

from stage2_api.errors import ConfigError
from stage2_cli.main import report
from stage2_report import html_page, sample_cards
from stage2_report.charts import averaged, decimated, run_charts
from stage2_report.html_page import PageRequest, render_page, write_html
from stage2_report.run_history import read_history
from tests.unit.cli.test_light_start import HEAVY, stage2
from tests.unit.report.reported import HOSTILE, PageParser, evaluation, page_of, rollout, step, write_lines, write_run
from tests.unit.trainer.scores.scenes import box

pytestmark = pytest.mark.in_turns(3, apart=True)


def test_page_has_figures_curves_and_rollouts(tmp_path):
    page = page_of(write_run(tmp_path / "run"))
    titles = [text for own, text in page.all("figcaption")]
    assert titles[:3] == ["Loss", "Where the time of a step goes, in seconds", "Held-out: scores"]
    assert "Staleness of rollouts, in steps" in titles
    assert len(page.all("polygon", class_="area")) == 3  # parts of a step's time
    assert [text for own, text in page.all("option") if own["value"] in ("0", "1")] == ["step 0", "step 2"]
    cards = page.all("article")
    assert [json.loads(own["data-classes"]) for own, _ in cards] == [["cat", "dog"]] * 3
    assert len(page.all("image")) == 2  # one sample's file is not there, and the page says so
    assert any("cannot be read" in text for own, text in page.all("p", class_="fault"))


def test_page_and_picture_can_be_written_together(tmp_path):
    run = write_run(tmp_path / "run")
    Image.new("RGB", (64, 48)).save(run / "1.png")
    report([run], html=tmp_path / "page.html", picture=tmp_path / "picture.png")
    assert {one.name for one in tmp_path.iterdir()} == {"run", "page.html", "picture.png"}


def test_worst_sample_comes_first_with_its_counts(tmp_path):
    page = page_of(write_run(tmp_path / "run"))
    assert [text for own, text in page.all("bdi") if text.startswith("val")] == [f"val.jsonl:{n}" for n in (3, 2, 1)]
    views = [own for own, _ in page.all("div", class_="view") if own["data-view"] == "1"]
    assert [(own["data-wrong"], own["data-misses"]) for own in views] == [("2", "0"), ("1", "0"), ("0", "0")]
    first = [own for own, _ in page.all("div", class_="view") if own["data-view"] == "0"]
    assert {(own["data-duplicates"], own["data-misses"]) for own in first} == {("1", "1")}
    assert all("hidden" in own for own in first)


def test_change_is_shown_with_confidence_interval(tmp_path):
    page = page_of(write_run(tmp_path / "run"))
    assert [text for _, text in page.all("th")][:4] == ["", "step 0", "step 2", "change"]
    cells = [text.strip() for own, text in page.all("td")]
    assert cells[:2] == ["0.500", "0.800"]  # of 6 true objects 3, then 6 with 3 wrong ones
    assert page.all("td", class_="better")


def test_two_runs_are_shown_side_by_side(tmp_path):
    one, other = write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run", steps=(1, 2, 3))
    page = page_of(one, other)
    assert page.all("title")[0][1] == "A: run and B: run – stage2 report"
    captions = [text for own, text in page.all("b")]
    assert "A: run, step 2" in captions
    assert "B: run, step 2" in captions
    assert [text for _, text in page.all("th")][3] == "difference"
    legends = [text for own, text in page.all("span", class_="name")]
    assert legends[:2] == ["A: run", "B: run"]


@pytest.mark.parametrize("where", ["names", "text"])
def test_hostile_text_is_shown_as_text(tmp_path, where):
    run = write_run(tmp_path / HOSTILE.replace("/", ""), hostile=where == "names")
    with (run / "rollouts.jsonl").open("a") as file:
        line = rollout(2, 0, [box("cat", 0, 0, 9, 9)], [], text=f"{HOSTILE}\x00 \ud800 {{{{ 7*7 }}}}")
        file.write(json.dumps(line) + "\n")
    text = render_page(PageRequest([run], run / "page.html"))
    page = PageParser(text)
    assert len(page.all("script")) == 1
    assert page.all("img") == []
    assert "\u202e" not in text
    assert "\x00" not in text
    assert "\ud800" not in text
    assert not any(name.startswith("on") for _, own, _ in page.elements for name in own)
    text_shown = "".join(text for _, text in page.all("bdi"))
    assert "alert(1)" in text_shown
    assert "{{ 7*7 }}" in text_shown


def test_page_loads_nothing_external_and_runs_only_its_own_script(tmp_path):
    page = page_of(write_run(tmp_path / "run"))
    links = [own[name] for _, own, _ in page.elements for name in ("src", "href", "xlink:href") if own.get(name)]
    assert all(link.startswith(("#", "data:image/jpeg;base64,")) for link in links)
    (policy,) = [own["content"] for own, _ in page.all("meta") if own.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert not any("style" in own for _, own, _ in page.elements)


@pytest.mark.parametrize(("record", "points"), [(None, 0), ("other output", 0), (step(1), 2), (evaluation(0), 4)])
def test_run_that_just_started_has_page(tmp_path, record, points):
    line = "" if record is None else f"{json.dumps(record)}\n"
    (tmp_path / "stage2_log.jsonl").write_text(line + '{"event": "st')
    page = page_of(tmp_path)
    assert page.all("p", class_="empty")
    assert len(page.all("circle")) == points


def test_log_without_rollout_file_shows_its_evaluation_samples(tmp_path):
    run = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    (run / "rollouts.jsonl").unlink()
    with (run / "stage2_log.jsonl").open("a") as log:
        for line in lines:
            log.write(
                json.dumps({"event": "evaluation_sample", **{k: v for k, v in line.items() if k != "event"}}) + "\n"
            )
    assert len(page_of(run).all("article")) == 3


def test_rollouts_of_all_processes_are_read(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "rank-1-rollouts.jsonl").write_text(
        "".join(json.dumps(rollout(n, 7, [box("cat", 0, 0, 9, 9)], [])) + "\n" for n in (0, 2))
    )
    assert "val.jsonl:8" in {text for _, text in page_of(run).all("bdi")}


def test_page_of_long_run_stays_within_size_limits(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", samples=5, steps=range(1, 1300), evaluated=range(0, 1300, 100))
    page = page_of(run)
    lines = [own["points"].count(",") for own, _ in page.all("polyline")]
    assert max(lines) <= 600
    assert len([own for own, text in page.all("option") if text.startswith("step")]) == html_page.MOST_STEPS
    monkeypatch.setattr(html_page, "MOST_CARD_BYTES", 30_000)
    fewer = page_of(write_run(tmp_path / "short", samples=5, evaluated=range(6))).all("article")
    assert 0 < len(fewer) < 5


def test_worst_best_and_intermediate_samples_are_chosen():
    scores = {f"{n}": n / 1000 for n in range(1000)}
    chosen = sample_cards.choose_samples(scores)
    assert chosen[:24] == [f"{n}" for n in range(24)]
    assert chosen[-12:] == [f"{n}" for n in range(988, 1000)]
    assert len(set(chosen)) == 48


def test_thinned_curve_keeps_its_peaks():
    points = [(step, 1000.0 if step == 7777 else float(step % 7)) for step in range(20_000)]
    fewer = decimated(points, 600)
    assert len(fewer) <= 600
    assert (7777, 1000.0) in fewer
    assert (fewer[0], fewer[-1]) == (points[0], points[-1])
    broken = [(step, float("nan")) for step in range(2000)]
    assert len(decimated(broken, 600)) <= 600
    assert len(averaged(points, 100)) == 100


def test_existing_file_that_is_not_report_is_not_overwritten(tmp_path):
    run, other = write_run(tmp_path / "run"), tmp_path / "notes.html"
    other.write_text("<p>mine</p>")
    with pytest.raises(ConfigError, match="no page of"):
        write_html(PageRequest([run], other))
    assert other.read_text() == "<p>mine</p>"
    for _ in range(2):
        write_html(PageRequest([run], tmp_path / "out" / "page.html"))
    assert [one.name for one in (tmp_path / "out").iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("runs", "options", "message"),
    [
        (["lost"], {"html": "page.html"}, "must be a run's output folder"),
        (["run"] * 3, {"html": "page.html"}, "one run, or two"),
        (["run"] * 3, {}, "must be one or two"),
        (["lost"], {}, "must be a run's output folder"),
    ],
)
def test_wrong_options_are_refused_in_single_sentence(tmp_path, runs, options, message):
    write_run(tmp_path / "run")
    html = tmp_path / options["html"] if "html" in options else None
    with pytest.raises(ConfigError, match=message):
        report([tmp_path / name for name in runs], html=html)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_html_command_imports_nothing_heavy(tmp_path):
    write_run(tmp_path / "run")
    done, loaded = stage2(tmp_path, "report", "run", "--html", "page.html")
    assert done.returncode == 0, done.stderr
    assert PageParser((tmp_path / "page.html").read_text()).all("article")
    assert loaded & HEAVY == set()
    table, _ = stage2(tmp_path, "report", "run")
    assert "Training steps" in table.stdout


def test_null_is_gap_in_curve_and_isolated_point_is_marked(tmp_path):
    folder = write_run(tmp_path / "run", steps=())
    values = [0.5, 0.25, None, 0.75, None, *([0.5] * 60)]
    lines = [step(number, **{"rollout/precision": value}) for number, value in enumerate(values, 1)]
    write_lines(folder / "stage2_log.jsonl", lines)
    (chart,) = [one for one in run_charts([read_history(folder)]) if one.title == "Training rollouts: matches"]
    (line,) = chart.lines
    assert [len(part.split()) for part in line.stretches] == [2, 1, 60]
    assert ([f"{x},{y}" for x, y in line.marks], line.last) == ([line.stretches[1]], "0.5")


def test_empty_answer_to_image_without_objects_has_no_f1_and_ranks_best(tmp_path):
    folder = write_run(tmp_path / "run", samples=2)
    right = rollout(2, 7, [], [])
    write_lines(
        folder / "rollouts.jsonl",
        [*map(json.loads, (folder / "rollouts.jsonl").read_text().splitlines()), {**right, "step": 0}, right],
    )
    page = page_of(folder)
    notes = [text for _, text in page.all("span") if ", F1 " in text]
    assert [note for note in notes if note.startswith("0 objects")] == ["0 objects, F1 –"] * 2
    assert [text for _, text in page.all("bdi") if text.startswith("val")][-1] == "val.jsonl:8"


def test_evaluation_without_true_objects_is_still_shown(tmp_path):
    folder = write_run(tmp_path / "run")
    write_lines(folder / "stage2_log.jsonl", [step(1), evaluation(0, None), step(2), evaluation(2, None)])
    history = read_history(folder)
    assert (history.evaluated, history.num_evaluations) == ([0, 2], 2)
    page = page_of(folder)
    assert [text for own, text in page.all("option") if own["value"] in ("0", "1")] == ["step 0", "step 2"]
