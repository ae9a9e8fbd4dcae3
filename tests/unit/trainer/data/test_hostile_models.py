"""A model folder whose files cost more than they should, or lead elsewhere, is refused before anything runs them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.data import model_costs, model_files
from stage2_trainer.data.model_files import flaw_of_model, with_local_model
from stage2_trainer.prepare.stock_model import source_of
from stage2_trainer.sync.vllm import adapter_store
from tests.unit.report.inspected import TINY_MODEL

pytestmark = pytest.mark.in_turns(3, apart=True)

BASE = Path(TINY_MODEL)
TEMPLATE = (BASE / "chat_template.jinja").read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    new = tmp_path / "model"
    shutil.copytree(BASE, new)
    (new / "model.safetensors").unlink()
    return new


TEMPLATES = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a huge string": "{{ 'a' * 99999999999 }}",
    "a string that doubles": "{% set s = namespace(x='aaaaaaaa') %}"
    "{% for i in range(99) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
    "a wide field": "{{ '%99999999999d' % 1 }}",
    "a long prompt": "{{ 'a' * 9999999 }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a recursive macro": "{% macro a(n) %}{% if n < 60 %}{{ a(n + 1) }}{{ a(n + 1) }}{% endif %}{% endmacro %}"
    "{{ a(0) }}",
    "loops over an answer": "{% for m in messages if m.role == 'assistant' %}"
    + "{% for a in range(99999) %}" * 3
    + "{% endfor %}" * 3
    + "{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "chat_template.json"])
def test_chat_template_of_excessive_cost_is_refused(folder, monkeypatch, name, place):
    monkeypatch.setattr(model_costs, "SECONDS", 2)
    (folder / "chat_template.jinja").unlink()
    written = TEMPLATES[name]
    (folder / place).write_text(written if place.endswith("jinja") else json.dumps({"chat_template": written}))
    assert "chat template" in (flaw_of_model(folder) or "")


def test_each_of_several_chat_templates_is_checked(folder, monkeypatch):
    monkeypatch.setattr(model_costs, "SECONDS", 2)
    named = [{"name": "default", "template": "{{ 1 }}"}, {"name": "other", "template": TEMPLATES["nested loops"]}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert "chat template" in (flaw_of_model(folder) or "")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "x.jinja").write_text(TEMPLATES["a huge string"])
    assert "chat template" in (flaw_of_model(folder) or "")
    (folder / "additional_chat_templates" / "x.jinja").write_text("a" * (model_costs.LARGEST + 1))
    assert "larger than" in (flaw_of_model(folder) or "")


def test_sound_model_has_no_flaw(folder):
    assert flaw_of_model(folder) is None
    (folder / "chat_template.jinja").write_text("{% generation %}{{ raise_exception('no') }}{% endgeneration %}")
    assert flaw_of_model(folder) is None, "what the template says is the model's own affair"


SIZES: dict[str, tuple[str, Any]] = {
    "shortest edge": ("image_processor.size.shortest_edge", 4e9),
    "shortest edge as an integer": ("image_processor.size.shortest_edge", 4_000_000_000),
    "longest edge": ("image_processor.size.longest_edge", -1),
    "patches without size": ("image_processor.patch_size", 0),
    "patches of a fraction": ("image_processor.patch_size", 0.5),
    "patches in words": ("image_processor.patch_size", "16"),
    "no merging": ("image_processor.merge_size", 0),
    "no time": ("image_processor.temporal_patch_size", 0),
    "true": ("image_processor.patch_size", True),
    "pixels": ("image_processor.min_pixels", 10**12),
    "a side": ("image_processor.size.height", 10**9),
    "video": ("video_processor.size.shortest_edge", 4e9),
    "infinite": ("image_processor.size.shortest_edge", float("inf")),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    "file", ["processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"]
)
def test_implausible_processor_size_is_refused(folder, name, file):
    path, value = SIZES[name]
    *parents, key = path.split(".")
    document = json.loads((folder / "processor_config.json").read_text())
    if file != "processor_config.json":
        document = document["image_processor"]
        parents = parents[1:]
    inner = document
    for parent in parents:
        inner = inner[parent]
    inner[key] = value
    (folder / file).write_text(json.dumps(document))
    flaw = flaw_of_model(folder) or ""
    assert file in flaw
    assert key in flaw


@pytest.mark.parametrize("key", ["patch_size", "spatial_merge_size", "temporal_patch_size"])
def test_zero_vision_tower_size_is_refused(folder, key):
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"][key] = 0
    (folder / "config.json").write_text(json.dumps(config))
    assert f"vision_config.{key}" in (flaw_of_model(folder) or "")


def test_adapter_folder_is_refused_as_model(folder):
    """transformers would load the base that adapter_config.json names, which nothing has examined."""
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/evil"}))
    assert "adapter_config.json" in (flaw_of_model(folder) or "")


def test_commands_check_model_before_loading_it(folder):
    from stage2_api.parsing import parse_run_config
    from tests.unit.cli.test_odd_inputs import MINIMAL

    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        with_local_model(parse_run_config({**MINIMAL, "model": {"model": str(folder)}}))
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        source_of(str(folder))
    assert model_files.DESCRIPTIONS


@pytest.mark.parametrize("dangling", [False, True])
def test_adapter_store_refuses_symlinked_folder(tmp_path, monkeypatch, dangling):
    target = tmp_path / "target"
    if not dangling:
        target.mkdir()
        (target / "kept").mkdir()
    link = tmp_path / "adapters"
    link.symlink_to(target)
    monkeypatch.setenv(adapter_store.FOLDER_VARIABLE, str(link))
    with pytest.raises((PermissionError, FileExistsError)):
        adapter_store.keep_adapter("stagetwo-1-ab", {}, {})
    assert target.exists() != dangling
    assert dangling or [path.name for path in target.iterdir()] == ["kept"]


def test_adapter_store_refuses_symlinked_adapter_folder(tmp_path, monkeypatch):
    (tmp_path / "target").mkdir()
    (tmp_path / "adapters").mkdir(mode=0o700)
    (tmp_path / "adapters" / "stagetwo-1-ab").symlink_to(tmp_path / "target")
    monkeypatch.setenv(adapter_store.FOLDER_VARIABLE, str(tmp_path / "adapters"))
    with pytest.raises(PermissionError):
        adapter_store.keep_adapter("stagetwo-1-ab", {}, {})
    assert list((tmp_path / "target").iterdir()) == []
