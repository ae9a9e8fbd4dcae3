"""Names for what comes from transformers and is taken as Any.

transformers' own annotations refuse, under strict checking, calls that its documentation shows.
"""

from __future__ import annotations

from typing import Any, TypeAlias

Model: TypeAlias = Any
"""A Qwen3VLForConditionalGeneration."""
Processor: TypeAlias = Any
"""A Qwen3VLProcessor."""
Tokenizer: TypeAlias = Any
"""A PreTrainedTokenizerFast."""
