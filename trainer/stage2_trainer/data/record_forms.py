"""Names the tool whose form a record has, so that a person learns what to convert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stage2_api.errors import ConfigError, Problem, kind_of

OURS = frozenset({"images", "width", "height", "objects"})
CONVERT = (
    'write {"images": [PATH], "width": W, "height": H, "units": "pixels", "objects": [{"desc": NAME, '
    '"bbox_2d": [x1, y1, x2, y2]}]} (docs/data.md)'
)
AS_COCO = "use `stage2 import coco --annotations FILE --images DIR --output OUT.jsonl`"
AS_CHAT = "use `stage2 import chat FILE --images DIR --output OUT.jsonl`, if it has boxes"
AS_LABELME = "use `stage2 import labelme FOLDER --output OUT.jsonl`"
AS_LABEL_STUDIO = "use `stage2 import labelstudio FILE --images DIR --output OUT.jsonl`"
AS_HF = "use `stage2 import hf FOLDER --boxes ... --output OUT.jsonl`"
AS_ANSWERS = "give the data file whose records it answers; answers are --rollouts of `stage2 evaluate`"
ONE_A_LINE = "write one JSON object a line (`jq -c '.[]' FILE`)"
SHOWN_KEYS = 8


@dataclass(frozen=True)
class Form:
    """A form by the keys that all its records have. reader: the command of `stage2 import` that reads it, or none."""

    name: str
    keys: frozenset[str]
    way_out: str = CONVERT
    reader: str = ""


FORMS = (
    Form("COCO's annotations", frozenset({"images", "annotations", "categories"}), AS_COCO, "coco"),
    Form("Qwen-VL's and LLaVA's training data", frozenset({"conversations"}), AS_CHAT, "chat"),
    Form("chat messages, as ms-swift, TRL and OpenAI write them", frozenset({"messages"}), AS_CHAT, "chat"),
    Form("ODVG, of Grounding DINO", frozenset({"detection", "filename"})),
    Form("ODVG, of Grounding DINO", frozenset({"grounding", "filename"})),
    Form("metadata.jsonl of Hugging Face's image folders", frozenset({"file_name"}), AS_HF),
    Form("PaliGemma's training data", frozenset({"image", "prefix", "suffix"})),
    Form("LabelMe's annotations", frozenset({"shapes", "imagePath"}), AS_LABELME, "labelme"),
    Form("Label Studio's tasks", frozenset({"data", "annotations"}), AS_LABEL_STUDIO, "labelstudio"),
    Form("Label Studio's tasks", frozenset({"data", "predictions"}), AS_LABEL_STUDIO, "labelstudio"),
    Form("Label Studio's JSON-MIN", frozenset({"annotation_id", "annotator"}), AS_LABEL_STUDIO, "labelstudio"),
    Form("VIA's project", frozenset({"_via_img_metadata"})),
    Form("Create ML's annotations", frozenset({"image", "annotations"})),
    Form("COCO's results", frozenset({"image_id", "bbox", "score"}), AS_ANSWERS),
    Form("COCO's annotations, one a line", frozenset({"image_id", "bbox"})),
    Form("answers of a model", frozenset({"sample_id", "text"}), AS_ANSWERS),
    Form("a log of stage2", frozenset({"event"}), AS_ANSWERS),
)


class OtherFormError(ConfigError):
    """A record has the form of another tool, as all others of its file will."""


def form_of(value: object) -> Form | None:
    """Return the form of another tool's record, or of a list of them; None for any other value."""
    first = value[0] if isinstance(value, list) and value else value
    return next((form for form in FORMS if form.keys <= first.keys()), None) if isinstance(first, Mapping) else None


def check_form(raw: Mapping[str, Any]) -> None:
    """Raise OtherFormError for a record of another tool. One that only lacks some of our keys has no form."""
    is_ours = raw.keys() >= OURS and isinstance(raw["objects"], list)
    if is_ours or (form := form_of(raw)) is None:
        return
    seen = ", ".join(list(raw)[:SHOWN_KEYS])
    rule = f"must be a record of stage2, and has the form of {form.name}"
    raise OtherFormError([Problem("", f"keys {seen}", rule, form.way_out)])


def other_document(value: object) -> OtherFormError:
    """Return the error of a line that is JSON, and no object."""
    form = form_of(value)
    rule = f"must be a JSON object, and is {kind_of(value)}{f' of {form.name}' if form else ''}"
    return OtherFormError([Problem("", value, rule, form.way_out if form else ONE_A_LINE)])


def opened_document(shown: str) -> OtherFormError:
    """Return the error of a file whose first line opens a document of several lines."""
    rule = "must be a JSON object on one line, and opens one of several lines"
    return OtherFormError([Problem("", shown, rule, f"{AS_COCO}, if it is COCO; otherwise {ONE_A_LINE}")])
