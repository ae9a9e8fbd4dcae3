"""What the real examples need of GPUs, by `stage2 doctor`, with the shapes of an 8B. Nothing is measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from transformers import Qwen3VLConfig

from stage2_api.parsing import parse_job
from stage2_trainer.checks.examination import Examination
from stage2_trainer.checks.footprint import footprint
from stage2_trainer.checks.resources import GIB, Gpu, Machine, total

EXAMPLES = Path(__file__).parents[1] / "examples"
JOBS = ("job-3v1", "job-colocate", "job-grpo-6v2", "job-grpo-objects")
SIZES = (40, 48, 80, 141)  # GB, of 1e9 bytes
ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
TEXT: dict[str, Any] = {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 12288, "vocab_size": 152936, "rope_parameters": ROPE,
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096,
    "deepstack_visual_indexes": [8, 16, 24], "patch_size": 16, "num_position_embeddings": 2304,
}  # fmt: skip
AN_8B = Qwen3VLConfig(text_config=TEXT, vision_config=VISION, tie_word_embeddings=False, dtype="bfloat16")


class Needs:
    """A row for each example: what its learner needs, the GPUs on which it fits, and how many answers a server runs."""

    def lines(self) -> Iterator[str]:
        """The table's lines."""
        sizes = "".join(f" {size} GB |" for size in SIZES)
        yield "\n## An 8B, computed: whether the learner fits, and the longest answers that a server runs at once\n\n"
        yield f"| job | learner GiB | activations GiB |{sizes}\n"
        yield f"| --- | ---: | ---: |{' ---: |' * len(SIZES)}\n"
        with TemporaryDirectory() as folder:
            AN_8B.save_pretrained(folder)
            for name in JOBS:
                yield _row(name, folder)


def _row(name: str, model: str) -> str:
    config = parse_job(yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())).spec.config
    examined = Examination(config, Machine((), 0, 0))
    found = footprint(config, model, row_tokens=examined.row_tokens)
    active = sum(part.nbytes for part in found.learner if part.name == "activations")
    cells = []
    for size in SIZES:
        gpu = Gpu(0, f"{size} GB", size * 10**9, 0)
        on = Examination(config, Machine((gpu,), 0, 0))
        fits = "yes" if on.learner_memory(found).verdict == "good" else "no"
        beside = ""
        if config.rollout_matching.uses_servers:
            beside = f", {on.server_memory(found).status.partition(': ')[2].split()[0]}"
        cells.append(fits + beside)
    return f"| {name} | {total(found.learner) / GIB:.1f} | {active / GIB:.1f} | {' | '.join(cells)} |\n"


TABLE = Needs()
