"""The text that the model is to write for a scene, and the reading of what it wrote: both as stage 2 does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stage2_api.coordinates import BINS, coord_token
from stage2_trainer.matching.ground_truth import GTObject, serialize_objects
from stage2_trainer.matching.parse import parse_rollout
from stage2_trainer.matching.tokens import CoordVocab
from tiny_model.scenes import Scene

PROMPT = "List the shapes."
COORD_TOKENS = [coord_token(k) for k in range(BINS)]


@dataclass(frozen=True)
class Answer:
    """What an answer says. `well_formed`: all of it is the requested JSON."""

    text: str
    objects: tuple[GTObject, ...]
    well_formed: bool


def truth(scene: Scene) -> list[GTObject]:
    """Return what is in the scene."""
    return [GTObject(desc, "poly" if key == "poly" else "bbox", tuple(bins)) for desc, key, bins in scene.objects()]


def write(scene: Scene) -> str:
    """Return the true answer for the scene."""
    return serialize_objects(truth(scene))


def read(answer_ids: Sequence[int], vocab: CoordVocab) -> Answer:
    """Return what the model's token ids say."""
    parsed = parse_rollout(answer_ids, vocab)
    objects = tuple(GTObject(o.desc, o.kind, o.bins) for o in parsed.valid_objects if o.kind)
    well_formed = parsed.clean and not (parsed.truncated or parsed.dropped or parsed.notes)
    return Answer(parsed.text, objects, well_formed)
