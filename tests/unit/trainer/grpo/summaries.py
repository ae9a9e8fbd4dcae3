"""A contract of summaries with two domains, and samples that tests score."""

from __future__ import annotations

import json
from typing import Any

from stage2_api.grpo import Summary
from stage2_trainer.data.records import Record
from stage2_trainer.grpo.rewards import Sample, known_rewards
from stage2_trainer.grpo.summaries import Contract

HEADER = "<DOMAIN={domain}>, <TASK={task}>"
IRRELEVANT = "无关图片"
SUMMARY: dict[str, Any] = {
    "keys": {"items": "统计", "category": "类别", "notes": "备注", "groups": "分组统计", "forbidden": ["dataset"]},
    "irrelevant": {"source": "irrelevant_summary", "text": IRRELEVANT},
    "text_attributes": ["文本"],
    "number_attributes": ["distance"],
    "stable_attributes": ["fit", "side"],
    "domains": [
        {
            "name": "INDOOR",
            "template": "summary_indoor",
            "notes": True,
            "tversky_fp": 0.3,
            "tversky_ignored": ["备注", "文本"],
            "categories": [
                {"name": "cable", "required": ["fit"], "any_of": [["side", "end"]], "allowed": ["文本"]},
                {"name": "screw"},
            ],
        },
        {
            "name": "OUTDOOR",
            "template": "summary_outdoor",
            "groups": True,
            "tversky_fp": 0.6,
            "tversky_ignored": ["备注"],
            "digit_attributes": ["distance"],
            "categories": [{"name": "mast", "allowed": ["distance"]}],
        },
    ],
}
CONTRACT = Contract(Summary.model_validate(SUMMARY), HEADER)


def answer(summary: object, *, domain: str = "INDOOR") -> str:
    """A summary with its header, as a right answer writes it."""
    body = summary if isinstance(summary, str) else json.dumps(summary, ensure_ascii=False)
    return f"<DOMAIN={domain}>, <TASK=SUMMARY>\n{body}"


def sample(text: str, truth: object = None, *, domain: str = "INDOOR", **metadata: object) -> Sample:
    """An answer to a record with this truth."""
    found = {
        "_fusion_source": "photos",
        "_fusion_template": f"summary_{domain.lower()}",
        "_fusion_mode": "summary",
        "summary_ref": json.dumps(truth or {"统计": []}, ensure_ascii=False),
    }
    return Sample(text, Record(0, "one", (), 0, 0, metadata={**found, **metadata}), CONTRACT)


def about(summary: object, truth: object, *, domain: str = "INDOOR") -> Sample:
    """A right form around a summary, for a record with this truth."""
    return sample(answer(summary, domain=domain), truth, domain=domain)


def irrelevant(text: str) -> Sample:
    """An answer to an irrelevant image."""
    return sample(text, _fusion_source="irrelevant_summary")


def scored(name: str, one: Sample) -> float:
    """Return what a reward of summaries gives an answer."""
    return known_rewards()[f"summary.{name}"](one)
