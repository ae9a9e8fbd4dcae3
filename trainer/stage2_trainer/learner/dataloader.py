"""The training dataloader: raw batches of records, which become tensors only after the E-step."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, Sampler
from transformers import TrainingArguments

from stage2_trainer.data.records import Record
from stage2_trainer.learner.batch_sampler import EvenBatchSampler
from stage2_trainer.learner.repeated_windows import RepeatedWindowSampler
from stage2_trainer.process.ranks import world_size


def train_dataloader(
    records: Any, sampler: Sampler[int], args: TrainingArguments, *, batch_size: int, m_steps: int
) -> DataLoader[Any]:
    """Return the batches of all processes; each full accumulation window comes `m_steps` times in a row.

    Raises:
        ConfigError: the samples cannot be divided evenly among the learner processes.
    """
    batches = EvenBatchSampler(sampler, batch_size, processes=world_size(), drop_last=args.dataloader_drop_last)
    window = args.gradient_accumulation_steps * world_size()
    return DataLoader(
        records,
        batch_sampler=RepeatedWindowSampler(batches, window=window, times=m_steps),
        collate_fn=as_list,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
    )


def as_list(records: list[Record]) -> Any:
    """Collate to what it was."""
    return records
