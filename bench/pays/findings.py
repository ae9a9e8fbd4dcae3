"""What came of the runs: scores of the held-out answers, with intervals over images and seeds, as JSON and as a table.

A figure is the mean over an arm's seeds. Its interval is that of a bootstrap that draws images and, of each arm, seeds;
the difference to the first arm is drawn with the same images and the same seeds in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np
from bench.pays.arms import ARMS, BASELINE
from bench.pays.study import Study, is_done, records_of

from stage2_trainer.data.records import RecordRules, load_records
from stage2_trainer.scores.answer_scores import AnswerScores, intervals, resampled
from stage2_trainer.scores.rollout_file import Rollouts, places_in, read_rollouts
from stage2_trainer.scores.scored_image import FloatArray, scored_images

FIGURES = ("f1_class@0.5", "AP", "f1@0.5", "precision@0.5", "recall@0.5", "objects_per_truth", "truncated_rate")
START = "start"
Scores = Mapping[int, AnswerScores]  # by seed
Drawn = dict[str, FloatArray]


def findings(study: Study, *, draws: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Return the figures of the runs of a study that are done."""
    done = {arm: _done(study, arm) for arm in ARMS}
    done = {arm: seeds for arm, seeds in done.items() if seeds}
    if not done:
        raise SystemExit(f"{study.folder}: no run is done; begin with `python -m bench.pays run {study.folder}`")
    every = {arm: {one: _scores(study, arm, one, study.sizes.steps) for one in seeds} for arm, seeds in done.items()}
    first_arm, first_seeds = next(iter(done.items()))
    start = {0: _scores(study, first_arm, first_seeds[0], 0)}
    images = resampled(study.sizes.held_out, draws=draws, seed=seed)
    drawn = {name: _drawn(scores, images, seed) for name, scores in {START: start, **every}.items()}
    return {
        "sizes": vars(study.sizes),
        "draws": draws,
        START: _figures(start, drawn[START]),
        "arms": {
            arm: {
                "what": ARMS[arm].what,
                "seeds": list(scores),
                **_figures(scores, drawn[arm]),
                "step_seconds": _step_seconds(study, arm, list(scores)),
                **({} if arm == BASELINE else {"against_a": _against(every, drawn, arm)}),
            }
            for arm, scores in every.items()
        },
    }


def table(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a Markdown table of the findings."""
    yield f"| arm | seeds | {' | '.join(FIGURES)} | s a step |\n"
    yield f"| --- | ---: |{' ---: |' * (len(FIGURES) + 1)}\n"
    yield f"| step 0 | | {' | '.join(_cell(found[START], name) for name in FIGURES)} | |\n"
    for arm, one in found["arms"].items():
        cells = " | ".join(_cell(one, name) for name in FIGURES)
        yield f"| ({arm}) {one['what']} | {len(one['seeds'])} | {cells} | {one['step_seconds']:.2f} |\n"
    for arm, one in found["arms"].items():
        if "against_a" in one:
            cells = " | ".join(_cell(one["against_a"], name, sign="+") for name in FIGURES)
            yield f"| ({arm}) - (a) | {len(one['against_a']['seeds'])} | {cells} | |\n"


def _done(study: Study, arm: str) -> list[int]:
    prefix = f"{arm}-"
    seeds = sorted(int(one.name.removeprefix(prefix)) for one in (study.folder / "runs").glob(f"{prefix}*"))
    return [seed for seed in seeds if is_done(study.run_folder(arm, seed), study.sizes.steps)]


def _scores(study: Study, arm: str, seed: int, step: int) -> AnswerScores:
    path = study.data / "val.jsonl"
    records = load_records(path, study.sizes.held_out, RecordRules(images_exist=False))
    rollouts = Rollouts(study.run_folder(arm, seed) / "rollouts.jsonl", step)
    found = read_rollouts(rollouts, records, places_in(path)[: len(records)])
    return AnswerScores.of(scored_images(records, found.answers))


def _drawn(scores: Scores, images: FloatArray, seed: int) -> Drawn:
    """Return each figure of each draw: the mean over as many drawn seeds as there are."""
    by_seed = [one.drawn(images) for one in scores.values()]
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
    return {"figures": means, "intervals": intervals(drawn, means), "by_seed": each}


def _against(every: Mapping[str, Scores], drawn: Mapping[str, Drawn], arm: str) -> dict[str, Any] | None:
    """Return how much higher an arm is than the first one, over the seeds that both have."""
    if BASELINE not in every or list(every[arm]) != list(every[BASELINE]):
        return None
    mine, theirs = _means(every[arm]), _means(every[BASELINE])
    apart = {name: mine[name] - theirs[name] for name in FIGURES}
    spread = {name: drawn[arm][name] - drawn[BASELINE][name] for name in FIGURES}
    return {"figures": apart, "intervals": intervals(spread, apart), "seeds": list(every[arm])}


def _step_seconds(study: Study, arm: str, seeds: Sequence[int]) -> float:
    steps = [one for seed in seeds for one in records_of(study.run_folder(arm, seed), "step")]
    return float(median(one["step/wall_s"] for one in steps))


def _cell(found: Mapping[str, Any], name: str, *, sign: str = "") -> str:
    low, high = found["intervals"].get(name, (float("nan"),) * 2)
    return f"{found['figures'][name]:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"
