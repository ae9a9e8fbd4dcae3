"""Sentence embeddings: means of a model's last hidden states, as sentence-transformers makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer


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
