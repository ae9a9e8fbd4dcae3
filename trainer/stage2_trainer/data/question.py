"""The question that a trained model is asked about an image: the one that its run asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from stage2_api.custom import Custom
from stage2_api.rollout_matching import RolloutMatching
from stage2_trainer.data.images import image_url

MATCHING = "custom.extra.rollout_matching"


@dataclass(frozen=True)
class Question:
    """What a model is asked about each image.

    prompt, system: texts of the user's and the system's turn. min_pixels, max_pixels: an image with fewer or more is
    scaled; None leaves it to the model's own image processor. max_new_tokens: of an answer.
    """

    prompt: str
    system: str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    max_new_tokens: int = RolloutMatching.model_fields["max_new_tokens"].default

    @classmethod
    def of_course(cls, course: Mapping[str, Any], **others: Any) -> Self:
        """Take what a run asked; of a model without a record, stage2's defaults. others: fields that replace these."""
        recorded = {
            "prompt": course.get("custom.user_prompt") or Custom.model_fields["user_prompt"].default,
            "system": course.get("template.system"),
            "min_pixels": course.get("template.min_pixels"),
            "max_pixels": course.get("template.max_pixels"),
            "max_new_tokens": course.get(f"{MATCHING}.max_new_tokens") or cls.max_new_tokens,
        }
        return cls(**(recorded | others))

    def pixel_limits(self) -> dict[str, int]:
        """Return the limits that are set, as image processors take them."""
        limits = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def messages(self, image: str) -> list[dict[str, Any]]:
        """Return the chat about one image, in OpenAI's format."""
        content = [{"type": "image_url", "image_url": {"url": image_url(image)}}, {"type": "text", "text": self.prompt}]
        user = {"role": "user", "content": content}
        return [{"role": "system", "content": self.system}, user] if self.system else [user]
