"""Listeners of matched rollouts: the rollout log, dumps for people, and how well descriptions agree."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

from stage2_api.rollout_matching import DescMonitor
from stage2_api.runconfig import RunConfig
from stage2_trainer.learner.step_record import Figures
from stage2_trainer.learner.supervise import Matched
from stage2_trainer.matching import Pair
from stage2_trainer.process.ranks import gathered, rank
from stage2_trainer.rollouts.replay import ids_sha256
from stage2_trainer.scores.scored_image import UNJUDGED_KEYS, normalised
from stage2_trainer.telemetry.answer_tables import AnswerTables, HeldOutAnswer
from stage2_trainer.telemetry.run_log import DUMPS, EventLog, JsonLines
from stage2_trainer.telemetry.timeline import TIMELINE
from stage2_trainer.wire.requests import share

logger = logging.getLogger(__name__)
Names = tuple[str, str]
"""The description of an answered object, and that of the true object that it matches."""
TEXTS = ("text", "prefix_text", "appended_text")
SHOWN = (
    "text", "prefix_text", "appended_text", "finish_reason", "dropped", "ground_truth", "predictions", "pairs",
    "following", "missed", "appended", "prefix_target_bins",
)  # fmt: skip
HIDDEN = frozenset({"token_ids", "options"})
CLIPPED_CHARS = 600
EVALUATION_SAMPLES = 8  # rollouts of each evaluation in the run's log; enough for a picture
OnMatched = Callable[[int, Sequence[Matched]], None]
"""Receives an optimizer step and the rollouts of that step."""


def log_training_rollouts(config: RunConfig, rollout_log: JsonLines, *others: OnMatched) -> OnMatched:
    """Return a listener that writes each training rollout to the rollout log, and logs the first parse failures.

    others: further listeners of the same rollouts.
    """
    matching = config.rollout_matching
    failures = ParseFailureLog(matching.debug_dump_max if matching.debug_dump_parse_failures else 0)

    def note(step: int, matched: Sequence[Matched]) -> None:
        with TIMELINE.measure("log"):
            failures(matched)
            for one in matched:
                rollout_log.write({"event": "rollout", "part": "train", "step": step, **rollout_document(one)})
            for other in others:
                other(step, matched)

    return note


def log_held_out_rollouts(log: EventLog, rollout_log: JsonLines, tables: AnswerTables) -> OnMatched:
    """Return a listener that writes each held-out rollout to the rollout log, and a few to the run's log and tables."""

    def note(step: int, matched: Sequence[Matched]) -> None:
        for one in matched:
            rollout_log.write({"event": "rollout", "part": "held-out", "step": step, **rollout_document(one)})
        for one in matched[:EVALUATION_SAMPLES]:
            log.write("evaluation_sample", {"step": step, **sample_document(one)})
        tables(step, [HeldOutAnswer(one.record, one.rollout.text, one.rollout.finish_reason) for one in matched])

    return note


class ParseFailureLog:
    """A log of the first rollouts that do not parse cleanly (`debug_dump_parse_failures`), cut to 600 characters."""

    def __init__(self, most: int) -> None:
        self._left = most

    def __call__(self, matched: Sequence[Matched]) -> None:
        """Log the rollouts among these that do not parse."""
        for one in matched:
            parsed = one.target.parsed
            if self._left > 0 and (parsed.dropped or parsed.truncated or parsed.notes):
                self._left -= 1
                logger.info(
                    "rollout of %s does not parse (%s): %r; kept: %r",
                    one.record.sample_id,
                    ", ".join([*parsed.dropped, *parsed.notes]) or "truncated",
                    parsed.text[:CLIPPED_CHARS],
                    parsed.prefix_text[:CLIPPED_CHARS],
                )


def rollout_document(matched: Matched) -> dict[str, Any]:
    """Return one rollout with all that `replay` needs to rebuild its training target, and the hash of that target."""
    rollout = matched.rollout
    return {
        **sample_document(matched),
        **matched.origin,
        "seed": rollout.seed,
        "seconds": rollout.seconds,
        "token_ids": rollout.token_ids,
        **({} if matched.kept is None else {"kept_tokens": matched.kept}),
        **({"skipped": True} if matched.skipped else {}),
        "prompt_tokens": len(rollout.prompt_token_ids),
        "y_train_tokens": matched.target.train_len,
        "y_train_sha256": ids_sha256(matched.target.y_train_ids),
    }


def sample_document(matched: Matched) -> dict[str, Any]:
    """Return one rollout with its record's ground truth; coordinates in bins 0..999, x and y in turn."""
    record, rollout, target = matched.record, matched.rollout, matched.target
    found = {pair.pred for pair in target.matching.pairs}
    unjudged = {key: record.metadata[key] for key in UNJUDGED_KEYS if key in record.metadata}
    return {
        "sample_id": record.sample_id,
        "record_index": record.index,
        "width": record.width,
        "height": record.height,
        **({"metadata": unjudged} if unjudged else {}),
        "image": next((source for source in record.images if not source.startswith("data:")), None),
        "server": rollout.server,
        "version": rollout.version,
        "finish_reason": rollout.finish_reason,
        "text": rollout.text,
        "dropped": target.parsed.dropped,
        "ground_truth": [
            {"desc": one.desc, "kind": one.kind, "bins": list(one.bins)} for one in target.ground_truth.objects
        ],
        "predictions": [
            {"desc": one.desc, "kind": one.kind, "bins": list(one.bins), "matched": i in found}
            for i, one in enumerate(target.parsed.valid_objects)
        ],
        "pairs": _pairs(target.matching.pairs),
        "following": _pairs(target.matching.following),
    }


def _pairs(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    return [{"prediction": one.pred, "ground_truth": one.gt, "iou": round(one.iou, 4)} for one in pairs]


class SampleDumps:
    """A listener that writes the first samples of some steps to `step_000001.json`, and optionally to `.md`.

    Steps count from 1. When a restarted run repeats a step, its first dump stays.
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
            "appended": list(target.appended),
            "prefix_target_bins": list(target.prefix_coord_target_bins),
        }


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _markdown(step: int, samples: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a dump; texts are indented, so that nothing in them is markup."""
    yield f"# Step {step}\n"
    for sample in samples:
        yield f"## {_ascii(str(sample['sample_id']))}\n"
        for key in ("image", "prompt", *SHOWN):
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


class DescriptionAgreement:
    """A listener that compares the descriptions of matched objects (`desc_monitor`), without effect on the loss.

    every: optimizer steps from one comparison to the next.
    """

    def __init__(self, options: DescMonitor, *, every: int) -> None:
        self._options = options
        self._every = options.every_steps or every
        self._pairs: list[tuple[int, list[Names]]] = []  # of each record, by its index
        self._step = -1

    def __call__(self, step: int, matched: Sequence[Matched]) -> None:
        """Keep the pairs of a step's rollouts. step: the first is 0."""
        if not self._options.enabled:
            return
        if step != self._step:
            self._step, self._pairs = step, []
        for one in matched:
            predicted, true = one.target.parsed.valid_objects, one.target.ground_truth.objects
            names = [(predicted[pair.pred].desc, true[pair.gt].desc) for pair in one.target.matching.pairs]
            self._pairs.append((one.record.index, names))

    def figures(self, step: int) -> Figures:
        """Return the figures of the step that has ended, over all processes; none where it is not compared.

        step: the first is 1. A step without fresh rollouts has none. All processes call it.
        """
        if not self._options.enabled or step % self._every or self._step != step - 1:
            return {}
        everywhere = [of_record for own in gathered(self._pairs) for of_record in own]
        ordered = sorted(everywhere, key=itemgetter(0))  # so the first pairs are those that one process would have
        pairs = [pair for _, names in ordered for pair in names][: self._options.max_pairs]
        if rank():
            return {}
        found: Figures = {"desc/pairs": float(len(pairs))}
        if self._options.mode != "semantic":
            found |= _exact(pairs)
        if self._options.mode != "exact":
            found |= self._semantic(pairs)
        return found

    def _semantic(self, pairs: Sequence[Names]) -> Figures:
        """Return the semantic figures; none where there are pairs and the model cannot be loaded."""
        close: list[float] = []
        if pairs:
            if self._embedder is None:
                return {}
            close = self._embedder.similarity([predicted for predicted, _ in pairs], [true for _, true in pairs])
        same = sum(value >= self._options.semantic_threshold for value in close)
        return {"desc/semantic_mean": share(sum(close), len(close)), "desc/semantic": share(same, len(close))}

    @cached_property
    def _embedder(self) -> SentenceEmbedder | None:
        """Return the model of sentence embeddings; None, with one warning, where it cannot be loaded."""
        options = self._options
        try:
            return SentenceEmbedder.load(
                str(options.semantic_model),
                device=options.semantic_device,
                batch_size=options.semantic_batch_size,
                max_length=options.semantic_max_length,
            )
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            logger.warning("desc_monitor: %s cannot be loaded, and is left out: %s", options.semantic_model, error)
            return None


def _exact(pairs: Sequence[Names]) -> Figures:
    exact = sum(predicted == true for predicted, true in pairs)
    alike = sum(normalised(predicted) == normalised(true) for predicted, true in pairs)
    return {"desc/exact": share(exact, len(pairs)), "desc/normalised": share(alike, len(pairs))}


@dataclass(frozen=True)
class SentenceEmbedder:
    """A model of sentence embeddings, with its tokenizer."""

    model: Any
    tokenizer: Any
    batch_size: int
    max_length: int

    @classmethod
    def load(cls, name: str, *, device: str, batch_size: int, max_length: int) -> SentenceEmbedder:
        """Load a folder or a hub's model, of safetensors and without code of its own.

        device: `auto` takes the GPU where there is one.
        """
        place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model = AutoModel.from_pretrained(name, trust_remote_code=False, use_safetensors=True)
        return cls(model.to(place).eval(), tokenizer, batch_size, max_length)

    def similarity(self, texts: Sequence[str], others: Sequence[str]) -> list[float]:
        """Return the cosine similarity of each text and its other."""
        distinct = list(dict.fromkeys([*texts, *others]))
        place = {text: index for index, text in enumerate(distinct)}
        embedded = self._embedded(distinct)
        first, second = ([place[text] for text in some] for some in (texts, others))
        return [float(value) for value in (embedded[first] * embedded[second]).sum(-1).clamp(-1, 1)]

    @torch.inference_mode()
    def _embedded(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the embeddings of texts, each of length 1."""
        parts = []
        for start in range(0, len(texts), self.batch_size):
            inputs = self.tokenizer(
                list(texts[start : start + self.batch_size]),
                padding=True,
                truncation=True,
                max_length=self.max_length,
                return_tensors="pt",
            ).to(self.model.device)
            hidden = self.model(**inputs).last_hidden_state.float()
            mask = inputs["attention_mask"].unsqueeze(-1).float()
            mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1.0)
            parts.append(torch.nn.functional.normalize(mean, dim=-1).cpu())
        return torch.cat(parts)
