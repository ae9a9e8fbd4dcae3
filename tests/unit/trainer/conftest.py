"""The checked-in tiny Qwen3-VL and a handful of images of different sizes.

Heavy libraries are imported where they are used: rooms beside the learner's are tested without them.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest

TINY_MODEL = Path(__file__).parents[3] / "examples" / "tiny-qwen3-vl"
SIZES = [(96, 96), (64, 48), (48, 96)]


@pytest.fixture(scope="session")
def model_path():
    return TINY_MODEL


@pytest.fixture(scope="session")
def processor(model_path):
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(model_path)


@pytest.fixture(scope="session")
def encoder(processor):
    from stage2_trainer.data.encode import Encoder

    return Encoder(processor)


@pytest.fixture(scope="session")
def loaded_model(model_path):
    """The tiny model as it is on disk, which nobody may change."""
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    return Qwen3VLForConditionalGeneration.from_pretrained(model_path, dtype=torch.float32)


@pytest.fixture
def model(loaded_model):
    """The tiny model, a copy for each test."""
    return copy.deepcopy(loaded_model)


@pytest.fixture(scope="session")
def image_paths(tmp_path_factory):
    import torch
    from PIL import Image

    folder = tmp_path_factory.mktemp("images")
    generator = torch.Generator().manual_seed(3)
    paths = []
    for width, height in SIZES:
        pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator).numpy()
        path = folder / f"{width}x{height}.png"
        Image.fromarray(pixels).save(path)
        paths.append(str(path))
    return paths


@pytest.fixture(scope="session")
def chats(image_paths):
    return [
        [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": path}},
                    {"type": "text", "text": "List the shapes."},
                ],
            }
        ]
        for path in image_paths
    ]


@pytest.fixture
def token(tmp_path, monkeypatch):
    """The token of a job, in the file where its processes read it."""
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setenv("STAGE2_TOKEN_FILE", str(tmp_path / "token"))
    return "secret"


@pytest.fixture
def termination_log(tmp_path, monkeypatch):
    """The file in which a learner of one process leaves its last words."""
    monkeypatch.setenv("STAGE2_TERMINATION_LOG", str(tmp_path / "termination.json"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return tmp_path / "termination.json"


@pytest.fixture(autouse=True)
def servers_forgotten():
    """Make the process's timeline forget its servers when a test ends: the next test's run may have others, or none."""
    yield
    if (timeline := sys.modules.get("stage2_trainer.telemetry.timeline")) is not None:
        timeline.TIMELINE.set_servers(())
