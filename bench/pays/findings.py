"""What came of the runs: scores of the held-out answers, with intervals over images and seeds, as JSON and as tables.

A figure is the mean over an arm's seeds. Its interval is that of a bootstrap that draws images and seeds. A difference
of two arms is taken on the same images, seed by seed. Its interval is Student's t over the seeds, because a bootstrap
of few seeds is too narrow; with a single seed it is that of a bootstrap over the images. There is one table of equal
optimizer steps, and one of equal CPU seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from bench.pays.arms import ARMS, TIMED
from bench.pays.study import ANSWERS, Run, Study, records_of
from scipy.stats import t as student

from stage2_trainer.data.records import RecordRules, load_records
from stage2_trainer.matching.tokens import FloatArray
from stage2_trainer.scores.answer_file import read_rollouts
from stage2_trainer.scores.answer_scores import AnswerScores, bootstrap_weights, bounded, intervals
from stage2_trainer.scores.image_counts import ImageCounts, image_counts
from stage2_trainer.scores.rollout_file import Rollouts, places_in
from stage2_trainer.scores.scored_image import scored_images

FIGURES = (
    "f1_class@0.5", "AP", "f1@0.5", "precision@0.5", "recall@0.5", "desc_exact", "objects_per_truth", "truncated_rate",
)  # fmt: skip
TERMS = ("steps", "seconds")
START, SAMPLED, BEST = "start", "sampled", "best"
STARTS = {START: "step 0", SAMPLED: "step 0, sampled", BEST: "step 0, the best of its sampled answers to each image"}
Scores = Mapping[int, AnswerScores]  # by seed
Drawn = dict[str, FloatArray]
Intervals = dict[str, list[float]]


def findings(study: Study, *, draws: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Return the figures of the runs of a study that are done."""
    images = bootstrap_weights(study.sizes.held_out, draws=draws, seed=seed)
    start = {0: _scores(study, study.start_answers)}
    found = {term: _of_terms(study, term, images, seed) for term in TERMS}
    if not found["steps"]:
        raise SystemExit(f"{study.folder}: no run is done; begin with `python -m bench.pays run {study.folder}`")
    every = {START: start, **_sampled(study)}
    starts = {name: _figures(scores, _draws(scores, images, seed)) for name, scores in every.items()}
    return {"sizes": vars(study.sizes), "draws": draws, **starts, **found}


def tables(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a Markdown table of the findings for equal steps, and of one for equal seconds."""
    for term in TERMS:
        if found[term]:
            yield f"Equal {'optimizer steps' if term == 'steps' else 'CPU seconds'}:\n\n"
            yield from _table(found, found[term])
            yield "\n"


def _table(found: Mapping[str, Any], arms: Mapping[str, Any]) -> Iterator[str]:
    yield f"| arm | seeds | steps | CPU s | {' | '.join(FIGURES)} |\n"
    yield f"| --- | ---: | ---: | ---: |{' ---: |' * len(FIGURES)}\n"
    for name, what in STARTS.items():
        if one := found.get(name):
            yield f"| {what} | | 0 | | {' | '.join(_cell(one, name) for name in FIGURES)} |\n"
    for arm, one in arms.items():
        cells = " | ".join(_cell(one, name) for name in FIGURES)
        taken = f"{one['steps']:.0f} | {one['cpu_seconds']:.0f}"
        yield f"| ({arm}) {one['what']} | {len(one['seeds'])} | {taken} | {cells} |\n"
    for arm, one in arms.items():
        for other in ARMS[arm].against:
            if apart := one.get(f"against_{other}"):
                cells = " | ".join(_cell(apart, name, sign="+") for name in FIGURES)
                yield f"| ({arm}) - ({other}) | {len(apart['seeds'])} | | | {cells} |\n"


def _of_terms(study: Study, term: str, images: FloatArray, seed: int) -> dict[str, Any]:
    """Return the arms of a table; arm b, which sets the seconds, is the same run in both."""
    runs = {arm: _done(study, arm, seconds=term == "seconds" and arm != TIMED) for arm in ARMS}
    runs = {arm: some for arm, some in runs.items() if some}
    if set(runs) <= {TIMED} and term == "seconds":
        return {}
    every = {
        arm: {run.seed: _scores(study, study.run_folder(run) / ANSWERS) for run in some} for arm, some in runs.items()
    }
    drawn = {arm: _draws(scores, images, seed) for arm, scores in every.items()}
    return {
        arm: {
            "what": ARMS[arm].what,
            "seeds": list(scores),
            "steps": fmean(len(records_of(study.run_folder(run), "step")) for run in runs[arm]),
            "cpu_seconds": fmean(study.cpu_seconds(run) for run in runs[arm]),
            **_figures(scores, drawn[arm]),
            **{f"against_{other}": _against(every, images, (arm, other)) for other in ARMS[arm].against},
        }
        for arm, scores in every.items()
    }


def _done(study: Study, arm: str, *, seconds: bool) -> list[Run]:
    """Return the runs of an arm that are done, by seed."""
    names = [one.name.split("-") for one in (study.folder / "runs").glob(f"{arm}-*")]
    runs = [Run(arm, int(name[1]), seconds=len(name) > 2) for name in names]
    return sorted((run for run in runs if run.seconds == seconds and study.is_done(run)), key=lambda run: run.seed)


def _scores(study: Study, answers: Path, step: int | None = None) -> AnswerScores:
    path = study.data / "val.jsonl"
    records = load_records(path, study.sizes.held_out, RecordRules(images_exist=False))
    found = read_rollouts(Rollouts(answers, step), records, places_in(path)[: len(records)])
    return AnswerScores.from_images(scored_images(records, found.answers))


def _sampled(study: Study) -> dict[str, Scores]:
    """Return the scores of the start's sampled answers, and of the best to each image by F1 with class; {} without."""
    if not study.sampled_answers.exists():
        return {}
    rounds = sorted({int(json.loads(line)["step"]) for line in study.sampled_answers.open(encoding="utf-8")})
    scores = {one: _scores(study, study.sampled_answers, one) for one in rounds}
    images = zip(*(one.images for one in scores.values()), strict=True)
    best = AnswerScores.from_images([max(each, key=lambda image: _f1_class(image_counts(image))) for each in images])
    return {SAMPLED: scores, BEST: {0: best}}


def _f1_class(counts: ImageCounts) -> float:
    return 2 * counts.class_right / max(1.0, counts.truth + counts.class_judged)


def _draws(scores: Scores, images: FloatArray, seed: int) -> Drawn:
    """Return each figure of each draw: the mean over as many drawn seeds as there are."""
    by_seed = [one.resample(images) for one in scores.values()]
    chosen = np.random.default_rng(seed).integers(len(by_seed), size=(len(images), len(by_seed)))
    return {
        name: np.stack([one[name] for one in by_seed], axis=1)[np.arange(len(images))[:, None], chosen].mean(axis=1)
        for name in FIGURES
    }


def _means(scores: Scores) -> dict[str, float]:
    every = [one.figures(np.ones(len(one.images))) for one in scores.values()]
    return {name: fmean(one[name] for one in every) for name in FIGURES}


def _figures(scores: Scores, drawn: Drawn) -> dict[str, Any]:
    means = _means(scores)
    each = [{name: one.figures(np.ones(len(one.images)))[name] for name in FIGURES} for one in scores.values()]
    return {"figures": means, "intervals": bounded(intervals(drawn, means)), "by_seed": each}


def _against(every: Mapping[str, Scores], images: FloatArray, arms: tuple[str, str]) -> dict[str, Any] | None:
    """Return how much higher an arm is than another, over the seeds that both have; None where that is none."""
    arm, other = arms
    seeds: Sequence[int] = [one for one in every[arm] if one in every.get(other, {})]
    if not seeds:
        return None
    apart = [_apart(every[arm][one], every[other][one], images) for one in seeds]
    figures = {name: fmean(each[name] for each, _ in apart) for name in FIGURES}
    spread = apart[0][1] if len(seeds) == 1 else _t_intervals([each for each, _ in apart])
    return {"figures": figures, "intervals": spread, "seeds": list(seeds)}


def _apart(mine: AnswerScores, theirs: AnswerScores, images: FloatArray) -> tuple[dict[str, float], Intervals]:
    """Return how much higher one seed's figures are, with the intervals of a bootstrap over images."""
    every = np.ones(len(mine.images))
    high, low, above, below = mine.figures(every), theirs.figures(every), mine.resample(images), theirs.resample(images)
    found = {name: high[name] - low[name] for name in FIGURES}
    return found, intervals({name: above[name] - below[name] for name in FIGURES}, found)


def _t_intervals(apart: Sequence[Mapping[str, float]]) -> Intervals:
    """Return the 95 % t interval of each figure's difference, of two seeds or more."""
    values = np.array([[one[name] for name in FIGURES] for one in apart])
    means = values.mean(axis=0)
    half = student.ppf(0.975, len(values) - 1) * values.std(axis=0, ddof=1) / np.sqrt(len(values))
    return {
        name: [float(mean - each), float(mean + each)] for name, mean, each in zip(FIGURES, means, half, strict=True)
    }


def _cell(found: Mapping[str, Any], name: str, *, sign: str = "") -> str:
    low, high = found["intervals"].get(name, (float("nan"),) * 2)
    return f"{found['figures'][name]:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"
