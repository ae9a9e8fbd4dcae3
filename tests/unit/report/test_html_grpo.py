"""`stage2 report --html` of a GRPO run: the answers to a prompt beside its image, with rewards and advantages."""

import json

import pytest

from stage2_report import reward_cards
from stage2_report.html_page import PageRequest, render_page
from stage2_report.reward_cards import answered_rounds, read_groups
from tests.unit.report.reported import HOSTILE, PageParser, answer, page_of, write_grpo_run, write_lines


@pytest.fixture
def run(tmp_path):
    return write_grpo_run(tmp_path / "run")


def views(page, place):
    return [own for own, _ in page.all("div", class_="view") if own["data-view"] == f"{place}"]


def rewarded(page):
    return [text for _, text in page.all("b") if ", advantage " in text]


def test_answers_to_prompt_are_shown_with_image_rewards_and_advantages(run):
    page = page_of(run)
    assert any("2 optimizer steps, 1 evaluation" in text for _, text in page.all("dd"))
    assert [text for own, text in page.all("option")][:3] == [
        "evaluation at step 0",
        "training, step 1",
        "training, step 2",
    ]
    assert [len(views(page, place)) for place in range(3)] == [1, 2, 2]
    assert [own["data-f1"] for own in views(page, 2)] == ["0.55", "0.8"]
    assert len(page.all("image")) == 3  # of the first prompt
    assert sum("cannot be read" in text for _, text in page.all("p", class_="fault")) == 2
    assert rewarded(page)[-2:] == ["0.850, advantage +0.350", "0.750, advantage +0.250"]
    page_text = "".join(part for _, _, texts in page.elements for part in texts)
    assert "mean reward 0.800, spread 0.050" in page_text
    assert "summary.content_f1 0.425" in {text for _, text in page.all("bdi")}
    assert not [own for own, _ in page.all("input") if own.get("id") != "cut"]


def test_only_best_and_worst_prompts_and_answers_are_shown(run):
    lines = [answer(4, prompt, prompt + 0.01 * k, run) for prompt in range(30) for k in range(20)]
    write_lines(run / "rollouts.jsonl", lines)
    page = page_of(run)
    shown = [text for _, text in page.all("bdi") if text.startswith("train.jsonl")]
    assert shown == [f"train.jsonl:{prompt + 1}" for prompt in (0, 1, 2, 3, 4, 27, 28, 29)]
    rewards = [float(text.partition(",")[0]) for text in rewarded(page)[:16]]
    assert rewards == [one / 100 for one in (*range(19, 11, -1), *range(7, -1, -1))]
    assert any("16 answers shown, 4 not" in text for _, text in page.all("p", class_="counts"))
    assert any(text.startswith("8 of 30 prompts") for _, text in page.all("p", class_="note"))


def test_only_sample_of_steps_of_long_run_is_shown(run):
    write_lines(run / "rollouts.jsonl", [answer(step, 0, 0.5, run) for step in range(101)])
    labels = [text for own, text in page_of(run).all("option") if text.startswith("training")]
    assert labels == [f"training, step {step}" for step in (1, 21, 41, 61, 81, 101)]


def test_repeated_step_is_shown_as_last_trained(run):
    again = [answer(1, 0, 0.1, run), answer(2, 0, 0.2, run), answer(1, 0, 0.3, run)]
    write_lines(run / "rollouts.jsonl", again)
    groups = read_groups(run / "stage2_log.jsonl", {("train", 1)})
    assert [one.reward for one in groups["train", 1]["train.jsonl:1"].answers] == [0.3]


def test_answers_of_all_processes_are_shown_together(run):
    write_lines(run / "rank-1-rollouts.jsonl", [answer(1, 0, 0.9, run), answer(1, 0, 0.8, run)])
    with (run / "rank-1-rollouts.jsonl").open("a") as file:
        file.write(json.dumps(answer(1, 0, 0.7, run))[:150])  # still in writing
    group = read_groups(run / "stage2_log.jsonl", {("train", 1)})["train", 1]["train.jsonl:1"]
    assert [one.reward for one in group.answers] == pytest.approx([0.9, 0.8, 0.5, 0.6])


def test_hostile_answers_are_shown_as_text(run):
    lines = [answer(0, 0, 0.5, run, text=f"{HOSTILE} {{{{ 7*7 }}}}\x00", sample_id=HOSTILE, rewards={HOSTILE: 1.0})]
    write_lines(run / "rollouts.jsonl", lines)
    text = render_page(PageRequest([run], run / "page.html"))
    page = PageParser(text)
    assert (len(page.all("script")), page.all("img")) == (1, [])
    assert not {"\u202e", "\x00"} & set(text)
    assert sum("alert(1)" in text for _, text in page.all("bdi")) == 3


def test_long_answers_are_shortened_and_truncated_ones_marked(run):
    write_lines(run / "rollouts.jsonl", [answer(0, 0, 0.5, run, text="x" * 5000, finish_reason="length")])
    page = page_of(run)
    assert [len(text) for _, text in page.all("bdi") if text.startswith("xxx")] == [reward_cards.TEXT_CHARACTERS + 1]
    assert views(page, 0)[0]["data-cut"] == "1"
    assert any("1 cut off" in text for _, text in page.all("p", class_="counts"))


def test_page_without_rollouts_or_of_two_runs_says_no_answers_are_shown(run, tmp_path):
    assert any("a page of one run has them" in text for _, text in page_of(run, run).all("p", class_="empty"))
    (run / "rollouts.jsonl").unlink()
    assert answered_rounds(run / "stage2_log.jsonl") == set()
    assert any("No rewarded answers to show." in text for _, text in page_of(run).all("p", class_="empty"))
