"""`stage2 prepare`: a stock Qwen3-VL with the 1,000 coordinate tokens in its vocabulary, saved as a model folder.

The tokens are not special ones, so that text decoded without special tokens keeps them, as vLLM's answers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoProcessor

from stage2_api.coordinates import BINS, coord_token
from stage2_api.errors import refused
from stage2_trainer.data.files import check_folder, new_folder
from stage2_trainer.matching import CoordVocab
from stage2_trainer.model.policy import part_of
from stage2_trainer.model.transformers_compat import layout_fault, save_as_stock
from stage2_trainer.prepare.stock_model import AGAIN, source_of

BLUR_BINS = 3.0
TOKENS = tuple(coord_token(number) for number in range(BINS))
ROWS_MULTIPLE = 64  # of the stock models' tables; tensor-parallel servers divide them


@dataclass(frozen=True)
class Prepared:
    """A prepared model.

    first_id, last_id: of the new tokens. rows: of the embedding table. tied: whether the output head is that table.
    """

    folder: Path
    first_id: int
    last_id: int
    rows: int
    tied: bool


def prepare(model: str, output: Path) -> Prepared:
    """Add the tokens to a model, a folder or the name of one on a hub, and save it in a new folder.

    Raises ConfigError where the folder is not new, the model is no Qwen3-VL, or it has such tokens already.
    """
    check_folder("--output", output)
    source = source_of(model)
    processor = stock_processor(source, model)
    if not lacks_tokens(processor.tokenizer, model):
        raise refused("MODEL", model, f"has the {BINS} coordinate tokens already", "use it as it is: model.model")
    policy = _load_policy(source, model)
    if stranger := next((name for name, _ in policy.named_parameters() if part_of(name) is None), None):
        rule = f"must be a Qwen3-VL model; {type(policy).__name__} has the unknown parameter {stranger}"
        raise refused("MODEL", model, rule, "give a Qwen3-VL")
    ids = _add_tokens(processor.tokenizer, policy)
    with new_folder("--output", output) as folder:
        save_as_stock(policy, folder)
        processor.save_pretrained(folder)
    CoordVocab.from_tokenizer(
        AutoProcessor.from_pretrained(output, local_files_only=True, trust_remote_code=False).tokenizer
    )
    table, head = _tables(policy)
    return Prepared(output, ids[0], ids[-1], table.shape[0], tied=head is table)


def stock_processor(source: Path, model: str) -> Any:
    """Return tokenizer, image processor and chat template of a model's folder. Raises ConfigError."""
    with _loading(model):
        processor = AutoProcessor.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    if not processor.chat_template:
        raise refused("MODEL", model, "must have a chat template (chat_template.jinja)", AGAIN)
    return processor


def _load_policy(source: Path, model: str) -> Any:
    """Return the model of a folder with all weights. Raises ConfigError."""
    with _loading(model):
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            source,
            dtype="auto",
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
        policy, report = loaded  # a pair, because of output_loading_info
        policy.generation_config.validate(strict=True)  # saving checks it the same way
    if lost := sorted(report["missing_keys"]):
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise refused("MODEL", model, f"must hold all weights; it lacks {lost[0]}{more}", AGAIN)
    if fault := layout_fault(policy):
        raise refused("MODEL", model, fault, "use another model")
    table, head = _tables(policy)
    if policy.config.tie_word_embeddings and head is not table:  # transformers follows the weights, vLLM this
        rule = "must have one table, as in config.json (tie_word_embeddings), but its weights have another output head"
        raise refused("MODEL", model, rule, "write false there, or remove lm_head.weight from the weights")
    if not all(torch.isfinite(one).all() for one in (table, head)):
        rule = "must have finite embeddings and output head, from which the new rows are computed"
        raise refused("MODEL", model, rule, AGAIN)
    return policy


@contextmanager
def _loading(model: str) -> Iterator[None]:
    """Raise ConfigError for any error of transformers over the files of a model."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise refused("MODEL", model, f"must be a model that transformers loads ({why})", AGAIN) from error


def lacks_tokens(tokenizer: Any, model: str) -> bool:
    """Whether a tokenizer has no coordinate token; False: it has all. Raises ConfigError if it has only some."""
    known = tokenizer.get_vocab()
    there = [token for token in TOKENS if token in known]
    if not there:
        return True
    if any(token.special and token.content in there for token in tokenizer.added_tokens_decoder.values()):
        rule = "has them as special tokens, which vanish from decoded answers"
        raise refused("MODEL", model, f"{rule}: {there[0]}", "start from the model without added tokens")
    if len(there) == BINS:
        return False
    rule = f"has {len(there)} of the {BINS} coordinate tokens: {there[0]}"
    raise refused("MODEL", model, rule, "start from the model without added tokens")


@torch.no_grad()
def _add_tokens(tokenizer: Any, policy: Any) -> list[int]:
    """Add the tokens to tokenizer and model, set their rows, and return their ids."""

    def spell(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    tables = {id(table): table for table in _tables(policy)}
    known = len(tokenizer)
    rows = [start_rows(table[:known], spell) for table in tables.values()]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOKENS])
    ids: list[int] = tokenizer.convert_tokens_to_ids(list(TOKENS))
    if len(tokenizer) > len(_tables(policy)[0]):
        policy.resize_token_embeddings(len(tokenizer), ROWS_MULTIPLE, mean_resizing=False)
    grown = {id(table): table for table in _tables(policy)}
    for table, new in zip(grown.values(), rows, strict=True):
        table[known:] = new.mean(0).to(table)
        table[torch.tensor(ids)] = new.to(table)
    return ids


def _tables(policy: Any) -> list[nn.Parameter]:
    """Return the embedding table and the output head, which may be the same."""
    return [policy.get_input_embeddings().weight, policy.get_output_embeddings().weight]


def start_rows(table: Tensor, spell: Callable[[str], Sequence[int]]) -> Tensor:
    """Return a row for each bin, (1000, H) float32.

    table: (V, H), the existing rows. spell: the token ids of a text. A row is the mean of the tokens that spell the
    bin's number, blurred over its neighbours so that near bins are similar, and as wide as the table's rows.
    """
    known = table.float()
    middle: Tensor = known.mean(0)
    rows = _numerals(known, spell) - middle
    width: Tensor = (known - middle).norm(dim=1).mean()
    found: Tensor = middle + rows * (width / rows.norm(dim=1).mean().clamp_min(1e-12))
    return found


def _numerals(known: Tensor, spell: Callable[[str], Sequence[int]]) -> Tensor:
    numbers = torch.stack([known[torch.tensor(list(spell(str(number))))].mean(0) for number in range(BINS)])
    distance = torch.arange(BINS)[:, None] - torch.arange(BINS)[None, :]
    weights = torch.exp(-0.5 * (distance / BLUR_BINS) ** 2)
    return (weights / weights.sum(1, keepdim=True)).to(numbers) @ numbers
