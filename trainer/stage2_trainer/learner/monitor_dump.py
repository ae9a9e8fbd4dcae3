"""Dumps of a few samples of some steps (`monitor_dump`), for people to read: prompt, rollout, matches, targets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stage2_api.runconfig import RunConfig
from stage2_trainer.learner.matcher import Matched
from stage2_trainer.learner.rollout_documents import rollout_document
from stage2_trainer.process.ranks import rank
from stage2_trainer.telemetry.earlier_run import DUMPS

TEXTS = ("text", "prefix_text", "appended_text")
SHOWN = ("text", "prefix_text", "appended_text", "finish_reason", "dropped", "ground_truth", "predictions", "pairs")
HIDDEN = frozenset({"token_ids", "options"})


class SampleDumps:
    """A listener that writes the first samples of a step to `step_000001.json`, and to `.md` where it is asked to.

    Steps count from 1. Of a step that a run makes again after a restart, the dump that is there stays.
    """

    def __init__(self, config: RunConfig) -> None:
        options, training = config.rollout_matching.monitor_dump, config.training
        self._options = options
        self._every = options.every_steps or training.logging_steps
        first = options.dump_first_step
        self._first = training.logging_first_step if first is None else first
        self._folder = Path(options.out_dir or Path(training.output_dir) / DUMPS)
        self._prompt = config.custom.user_prompt
        self._writes = options.enabled and (rank() == 0 or not options.only_world_process_zero)
        self._suffix = "" if rank() == 0 else f"-rank-{rank()}"

    def __call__(self, step: int, matched: Sequence[Matched]) -> None:
        """Write the dump of a step if it is due. step: of the rollouts, where the first is 0."""
        path = self._folder / f"step_{step + 1:06d}{self._suffix}.json"
        if not (self._writes and matched and self._is_due(step + 1)) or path.exists() or self._is_full():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        samples = [self._sample(one) for one in matched[: self._options.max_samples]]
        if self._options.write_markdown:
            _write(path.with_suffix(".md"), "\n".join(_markdown(step + 1, samples)))
        _write(path, json.dumps({"step": step + 1, "samples": samples}, indent=1, ensure_ascii=True) + "\n")

    def _is_due(self, step: int) -> bool:
        return step % self._every == 0 or (step == 1 and self._first)

    def _is_full(self) -> bool:
        most = self._options.max_events
        return 0 < most <= len(list(self._folder.glob(f"step_??????{self._suffix}.json")))

    def _sample(self, one: Matched) -> dict[str, Any]:
        target = one.target
        found = {key: value for key, value in rollout_document(one).items() if key not in HIDDEN}
        found |= {"prompt": self._prompt, "prefix_text": target.parsed.prefix_text, "appended_text": target.append_text}
        return {
            **found,
            **{key: _cut(found[key], self._options.max_text_chars) for key in (*TEXTS, "prompt")},
            "missed": list(target.false_negatives),
            "prefix_target_bins": list(target.prefix_coord_target_bins),
        }


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _markdown(step: int, samples: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a dump; texts are indented, so that nothing in them is markup."""
    yield f"# Step {step}\n"
    for sample in samples:
        yield f"## {_ascii(str(sample['sample_id']))}\n"
        for key in ("image", "prompt", *SHOWN, "missed", "prefix_target_bins"):
            value = sample[key]
            yield f"{key}:\n"
            text = value if isinstance(value, str) else json.dumps(value)
            yield from (f"    {_ascii(line)}" for line in text.splitlines() or [""])
            yield ""


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()


def _write(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.unfinished")
    aside.write_text(text, encoding="ascii")
    aside.replace(path)
