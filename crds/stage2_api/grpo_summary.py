"""`custom.grpo.summary`: what a right summary looks like, in the vocabulary of whoever owns the data.

An answer is a header line and one line of JSON: items with a category and counted attributes, notes, group counts.
Which keys, domains and categories there are belongs to the data's owner and stands here, not in code.

Source: semantics sections 15.4 and 15.5.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from stage2_api.section import Section
from stage2_api.value_types import Fraction, Name, Text

Word = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Words = Annotated[list[Word], Field(max_length=256)]


class SummaryKeys(Section):
    """Keys of the JSON line."""

    items: Word = "items"
    """Key of the list of items."""
    category: Word = "category"
    """Key of an item's category."""
    notes: Word = "notes"
    """Key of the list of notes, in domains that have them."""
    groups: Word = "groups"
    """Key of the mapping from group to count, in domains that have them."""
    forbidden: Words = Field(default=[])
    """List of keys that make the JSON invalid."""


class SummaryIrrelevant(Section):
    """Images that are to be answered with a fixed text."""

    source: Name = "irrelevant_summary"
    """Value of the record's `_fusion_source` that marks them."""
    text: Annotated[Text, Field(min_length=1)] = "irrelevant image"
    """Answer to such an image, whole."""


class SummaryCategory(Section):
    """What an item of one category must and may say."""

    name: Word
    """Name of the category."""
    required: Words = Field(default=[])
    """List of attributes that an item must have."""
    any_of: list[Words] = Field(default=[], max_length=64)
    """List of groups of attributes; an item must have one of each group."""
    allowed: Words = Field(default=[])
    """List of attributes that an item may have beside those."""


class SummaryDomain(Section):
    """One kind of images with a vocabulary of its own."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Z]+$")]
    """Name of the domain, as the header line has it."""
    template: Name
    """Value of the record's `_fusion_template` that marks it."""
    prompt: Text | None = None
    """Text part of the user's turn; null means `custom.user_prompt`."""
    notes: bool = False
    """Whether summaries may have notes."""
    groups: bool = False
    """Whether summaries may have group counts."""
    tversky_fp: Fraction = 0.3
    """Weight of a fact too many in `summary.content_structured_tversky`; one that is missing weighs 1."""
    tversky_ignored: Words = Field(default=[])
    """List of attributes, and of the key of notes, that this reward leaves out."""
    digit_attributes: Words = Field(default=[])
    """List of attributes whose values must be numbers."""
    categories: list[SummaryCategory] = Field(default=[], max_length=256)
    """List of the categories that items may have."""


class Summary(Section):
    """Contract of summaries."""

    task: Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Z]+$")] = "SUMMARY"
    """Name of the task, as the header line has it."""
    keys: SummaryKeys = SummaryKeys()
    """Keys of the JSON line."""
    irrelevant: SummaryIrrelevant = SummaryIrrelevant()
    """Images that are to be answered with a fixed text."""
    domains: list[SummaryDomain] = Field(min_length=1, max_length=16)
    """List of the domains."""
    text_attributes: Words = Field(default=[])
    """List of attributes whose values are text read from the image."""
    number_attributes: Words = Field(default=[])
    """List of attributes of whose values only the first digits count."""
    stable_attributes: Words = Field(default=[])
    """List of attributes whose values are a closed set, scored one by one by `summary.attr_path_recall`."""
