"""`stage2 report RUN [RUN] --html OUT`: one page of what a run, or each of two runs, wrote down.

Texts of answers and data files are hostile: the templates escape all of them, and the page's own policy allows only the
page's own script and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from stage2_api.errors import counted, refused
from stage2_report.charts import run_charts
from stage2_report.held_out import EvaluatedStep, figure_table, read_evaluations
from stage2_report.reward_cards import TEXT_CHARACTERS, RewardSamples, reward_card, reward_samples
from stage2_report.run_history import REWARD, RunHistory, folder_of_images, read_history
from stage2_report.sample_cards import StepChoice, choose_samples, sample_card
from stage2_report.terminal import Terminal
from stage2_trainer.data.files import aside_of, check_file, check_place
from stage2_trainer.process.activity import ACTIVITY
from stage2_trainer.scores.image_counts import rank_of, sample_f1

MOST_RUNS, MOST_STEPS = 2, 6
MOST_CARD_BYTES = 9_000_000
"""Bytes of all cards together; the rest of a page is below 1 MB."""
MARK = "<!doctype html><!-- stage2 report -->"


@dataclass(frozen=True)
class PageRequest:
    """The page to write. images: the folder of the held-out images, where it has moved."""

    runs: Sequence[Path]
    output: Path
    images: Path | None = None


@dataclass(frozen=True)
class _Samples:
    """The held-out samples of a page: choices of steps, the names of those shown, and how many there are."""

    choices: Sequence[StepChoice]
    names: Sequence[str]
    of: int


def write_html(request: PageRequest) -> None:
    """Write the page under a temporary name, rename it, and print its path. Raises ConfigError."""
    _check(request)
    with ACTIVITY.doing(f"drawing {request.output}"):
        text = render_page(request)
    request.output.parent.mkdir(parents=True, exist_ok=True)
    aside = aside_of(request.output)
    aside.write_bytes(text.encode("utf-8", errors="replace"))
    aside.replace(request.output)
    Terminal().print(f"page: {request.output}")


def render_page(request: PageRequest) -> str:
    """Return the page. Raises ConfigError where a run has no log."""
    runs = _with_distinct_names([read_history(path) for path in request.runs])
    is_grpo = any(REWARD in run.steps.keys() for run in runs)  # noqa: SIM118 - no mapping
    samples = None if is_grpo else _samples(runs)
    rewards = reward_samples(runs[0].log) if is_grpo and len(runs) == 1 else None
    images = request.images or folder_of_images(*(run.log for run in runs))
    cards = _cards(samples, images) if samples else _reward_cards(rewards, images) if rewards else []
    style, script = _package_text("page.css"), _package_text("page.js")
    return _environment().get_template("page.html.j2").render(
        mark=Markup(MARK),
        style=Markup(style),
        script=Markup(script),
        policy=_policy(style, script),
        runs=runs,
        charts=run_charts(runs),
        table=figure_table(_table_columns(samples, runs)) if samples else None,
        choices=[choice.label for choice in samples.choices] if samples else rewards.labels if rewards else [],
        cards=cards,
        samples=samples,
        rewards=rewards,
        is_grpo=is_grpo,
    )  # fmt: skip


def _check(request: PageRequest) -> None:
    """Raise ConfigError for more than two runs, or where something else than a page of ours would be overwritten."""
    if len(request.runs) > MOST_RUNS:
        rule, way_out = "one run, or two to compare", "make a page of each pair"
        raise refused("RUN", f"{len(request.runs)} runs", rule, way_out)
    if not os.path.lexists(request.output):
        check_place("--html", request.output)
        return
    if request.output.is_file():
        check_file("--html", request.output)
        check_place("--html", request.output)  # a new file replaces it
        with request.output.open("rb") as file:
            if file.read(len(MARK)) == MARK.encode():
                return
    rule, way_out = "exists already, and is no page of `stage2 report`", "name another file"
    raise refused("--html", str(request.output), rule, way_out)


def _with_distinct_names(runs: list[RunHistory]) -> list[RunHistory]:
    if len({run.name for run in runs}) < len(runs):
        for run, letter in zip(runs, "AB", strict=False):
            run.name = f"{letter}: {run.name}"
    return runs


def _samples(runs: Sequence[RunHistory]) -> _Samples | None:
    """Return the held-out samples to show; None where a run has no evaluation by rollouts."""
    if not all(run.evaluated for run in runs):
        return None
    ends = [read_evaluations(run.log, {run.evaluated[0], run.evaluated[-1]}) for run in runs]
    if not all(ends):
        return None
    last = [evaluations[max(evaluations)] for evaluations in ends]
    common = set(last[0].images).intersection(*(one.images for one in last))
    if not common:
        return None
    scores = {name: _rank(name, last) for name in last[0].images if name in common}
    names = choose_samples(scores)
    choices = _choices_of_one(runs[0], ends[0], names) if len(runs) == 1 else _choices_of_two(runs, ends)
    return _Samples(choices, names, len(common))


def _rank(name: str, last: Sequence[EvaluatedStep]) -> float:
    """Return what samples are chosen by: their F1; of two runs, by how much the second is better."""
    scores = [rank_of(sample_f1(one.images[name])) for one in last]
    return scores[-1] if len(scores) == 1 else scores[1] - scores[0]


def _choices_of_one(run: RunHistory, ends: Mapping[int, EvaluatedStep], names: Sequence[str]) -> list[StepChoice]:
    between = _shown_steps(run) - set(ends)
    others = read_evaluations(run.log, between, set(names)) if between else {}
    last = ends[max(ends)]
    every = {**{step: one.judged_as(last) for step, one in others.items()}, **ends}
    best = run.best.get("step")
    labels = {step: f"step {step}" + (" (best)" if step == best else "") for step in every}
    return [StepChoice(labels[step], [(labels[step], every[step])]) for step in sorted(every)]


def _choices_of_two(runs: Sequence[RunHistory], ends: Sequence[Mapping[int, EvaluatedStep]]) -> list[StepChoice]:
    choices = [
        StepChoice(
            label, [(f"{run.name}, step {end(one)}", one[end(one)]) for run, one in zip(runs, ends, strict=True)]
        )
        for label, end in (("first evaluation", min), ("last evaluation", max))
    ]
    return choices if any(len(one) > 1 for one in ends) else choices[1:]


def _shown_steps(run: RunHistory) -> set[int]:
    """Return the first, best and last step, and some evenly spaced between them."""
    steps = run.evaluated
    shown = {steps[0], steps[-1]} | ({run.best["step"]} & set(steps) if run.best else set())
    for index in range(1, MOST_STEPS):
        if len(shown) < MOST_STEPS:
            shown.add(steps[round(index * (len(steps) - 1) / MOST_STEPS)])
    return shown


def _table_columns(samples: _Samples, runs: Sequence[RunHistory]) -> list[tuple[str, EvaluatedStep]]:
    """Return the evaluations of the table: the first and last of one run, or the last of each of two."""
    if len(runs) == 2:
        return list(samples.choices[-1].evaluations)
    ends = samples.choices if len(samples.choices) == 1 else (samples.choices[0], samples.choices[-1])
    return [one.evaluations[0] for one in ends]


def _cards(samples: _Samples, folder: Path | None) -> list[Markup]:
    template = _environment().get_template("card.html.j2")
    cards = (sample_card(number, name, samples.choices, folder) for number, name in enumerate(samples.names))
    return _within_limit(template.render(card=card) for card in cards)


def _reward_cards(rewards: RewardSamples, folder: Path | None) -> list[Markup]:
    template = _environment().get_template("reward_card.html.j2")
    cards = (reward_card(number, view, group, folder) for number, (view, group) in enumerate(rewards.groups))
    return _within_limit(template.render(card=card, most_characters=TEXT_CHARACTERS) for card in cards)


def _within_limit(texts: Iterable[str]) -> list[Markup]:
    """Return as many cards as stay below MOST_CARD_BYTES, as markup."""
    cards: list[Markup] = []
    remaining = MOST_CARD_BYTES
    for text in texts:
        remaining -= len(text.encode("utf-8", errors="replace"))
        if remaining < 0:
            break
        cards.append(Markup(text))
    return cards


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("stage2_report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    environment.filters["counted"] = counted
    return environment


def _visible(value: Any) -> Any:
    """Return a text with U+FFFD in place of control characters and of those that change a line's direction."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "".join("\ufffd" if _is_invisible(one) else one for one in value)


def _is_invisible(character: str) -> bool:
    return character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cf", "Cs")


def _package_text(name: str) -> str:
    return files("stage2_report").joinpath(name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Return the page's content security policy: its own style and script by their hashes, images inside it."""
    own = {kind: _hash(text) for kind, text in (("style", style), ("script", script))}
    return f"default-src 'none'; img-src data:; style-src '{own['style']}'; script-src '{own['script']}'"


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
