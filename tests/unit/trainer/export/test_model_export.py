"""Exported models: transformers computes with them what the learner computed, and servers would be sent their bytes."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from safetensors import safe_open
from transformers import AutoProcessor

from stage2_api.errors import ConfigError
from stage2_trainer.data.model_files import model_fingerprint
from stage2_trainer.export.checkpoint_folder import open_checkpoint
from stage2_trainer.export.model_export import export_adapter, export_model
from stage2_trainer.export.trained_checkpoint import MergedStream, is_empty, skeleton
from stage2_trainer.infer.model import Model
from stage2_trainer.matching import GTObject, serialize_objects
from stage2_trainer.model.policy import ALIGNER, VIT, adapt
from stage2_trainer.sync.tensors.merge import merged_weights
from stage2_trainer.telemetry.run_log import EVALUATION_KEYS
from tests.unit.trainer.export.trained import KINDS, LANGUAGE, load, logits, saved, trained
from tests.unit.trainer.learner.harness import box, build, record, shifted
from tests.unit.trainer.sync.exactness import digests_of
from tiny_model.scenes import draw, make_scene

pytestmark = pytest.mark.in_turns(3, apart=True)

TRIANGLE = (0, 0, 400, 0, 0, 250)
ODD_PROMPT = 'List "all" | a\\b {{ c }}\nand more.'
SMALL_SHARD = 300_000  # bytes: below the embedding table and most of the MLPs


def exported_tensors(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    return found


@pytest.mark.parametrize("head", ["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS)
def test_exported_model_matches_learner_logits(bases, tmp_path, kind, head):
    model = trained(bases[head], kind)
    checkpoint = saved(model, bases[head], tmp_path / "run")
    opened = open_checkpoint(checkpoint, model=str(bases[head]))
    made = export_model(opened, tmp_path / "out", dtype=torch.float32)
    exported = load(tmp_path / "out")
    assert (logits(exported) - logits(model)).abs().max() < 1e-5
    apart = kind in {"table trained whole", "head trained whole", "both trained whole"}
    assert made.untied == (head == "tied" and apart)
    assert (exported.lm_head.weight is exported.get_input_embeddings().weight) == (head == "tied" and not apart)
    assert AutoProcessor.from_pretrained(tmp_path / "out").tokenizer.get_vocab()


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_exported_model_keeps_base_dtype_and_equals_bytes_sent_to_servers(model_path, tmp_path, kind):
    model = trained(model_path, kind)
    opened = open_checkpoint(saved(model, model_path, tmp_path / "run"), model=str(model_path))
    export_model(opened, tmp_path / "out")
    sent = model.to(torch.bfloat16)
    if kind != "full":
        sent = PeftModel.from_pretrained(load(model_path, torch.bfloat16), opened.folder)
    assert digests_of(exported_tensors(tmp_path / "out").items()) == digests_of(merged_weights(sent))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_sharded_export_equals_unsharded_export(dora, tmp_path):
    opened = open_checkpoint(dora)
    export_model(opened, tmp_path / "whole")
    export_model(opened, tmp_path / "sharded", shard_bytes=SMALL_SHARD)
    files = list((tmp_path / "sharded").glob("*.safetensors"))
    assert len(files) > 5
    assert torch.equal(logits(load(tmp_path / "sharded")), logits(load(tmp_path / "whole")))


def test_export_streams_base_weights_without_loading_all_at_once(dora):
    opened = open_checkpoint(dora)
    model = skeleton(opened)
    assert all(is_empty(parameter) == ("lora_" not in name) for name, parameter in model.named_parameters())
    assert not any(is_empty(tensor) for _, tensor in MergedStream(opened))


def test_overflow_in_export_dtype_is_refused(model_path, tmp_path):
    model = trained(model_path, "full")
    model.model.language_model.norm.weight.data.fill_(1e6)
    opened = open_checkpoint(saved(model, model_path, tmp_path / "run"), model=str(model_path))
    with pytest.raises(ConfigError, match=r"language_model.norm.weight is not finite in float16"):
        export_model(opened, tmp_path / "out", dtype=torch.float16)
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def test_non_empty_output_folder_is_refused(dora, tmp_path):
    (tmp_path / "mine").write_text("")
    for export in (export_model, export_adapter):
        with pytest.raises(ConfigError, match="new or an empty folder"):
            export(open_checkpoint(dora), tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["mine"]


def test_exported_adapter_loads_in_peft_with_same_logits(model_path, tmp_path):
    model = trained(model_path, "lora")
    opened = open_checkpoint(saved(model, model_path, tmp_path / "run"), model=str(model_path))
    assert export_adapter(opened, tmp_path / "out").obstacle is None
    again = PeftModel.from_pretrained(load(model_path), tmp_path / "out").eval()
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(("kind", "message"), [("dora", "DoRA"), ("merger trained whole", "DoRA"), ("full", None)])
def test_adapter_that_vllm_cannot_serve_is_reported(model_path, tmp_path, kind, message):
    opened = open_checkpoint(saved(trained(model_path, kind), model_path, tmp_path / "run"), model=str(model_path))
    if message is None:
        with pytest.raises(ConfigError, match="export without --adapter"):
            export_adapter(opened, tmp_path / "out")
    else:
        assert message in export_adapter(opened, tmp_path / "out").obstacle


def program(folder):
    """The program of a card."""
    return (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]


def test_model_card_describes_run(model_path, tmp_path):
    evaluated = {**dict.fromkeys(EVALUATION_KEYS, 0.25), "step": 3}
    course = {
        "custom.train_jsonl": "4 records, sha256 ab",
        "custom.trainer_variant": "rollout_matching_sft",
        "training.learning_rate": 1e-4,
        "custom.user_prompt": ODD_PROMPT,
        "model.model": f"sha256 {model_fingerprint(str(model_path))}",
    }
    model = trained(model_path, "dora")
    checkpoint = saved(model, model_path, tmp_path / "run", course=course, log_history=[{"loss": 1.0}, evaluated])
    export_model(open_checkpoint(checkpoint, model=str(model_path)), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    for line in ("stage 2", "DoRA, rank 4", "3 of 9", "4 records", "`rollout_ap` | 0.25"):
        assert line in card
    assert len(card.splitlines()) <= 80
    assert json.loads((tmp_path / "out" / "stage2_course.json").read_text()) == course
    code = {}
    exec(program(tmp_path / "out").partition("image = ")[0], code)
    assert code["PROMPT"] == ODD_PROMPT
    answer = serialize_objects([GTObject("cup", "bbox", (100, 0, 500, 999)), GTObject("cat", "poly", TRIANGLE)])
    assert [*code["objects"](answer, width=200, height=1000)] == [
        ("cup", [20, 0, 100, 999]),
        ("cat", [0, 0, 80, 0, 0, 250]),
    ]


@pytest.mark.parametrize("export", [export_model, export_adapter])
def test_program_in_model_card_finds_same_objects_as_stage2(model_path, tmp_path, monkeypatch, capsys, export):
    course = {
        "custom.user_prompt": "List the shapes.",
        "template.max_pixels": 9216,
        "custom.extra.rollout_matching.max_new_tokens": 200,
    }
    learner = get_peft_model(load(model_path), LoraConfig(r=4, target_modules=LANGUAGE))
    checkpoint = saved(learner, model_path, tmp_path / "run", course=course)
    export(open_checkpoint(checkpoint, model=str(model_path)), tmp_path / "out")
    Image.fromarray(draw(make_scene(0, "held_out", 3))).resize((192, 96)).save(tmp_path / "out/photo.jpg")
    answer = Model(tmp_path / "out").answer(tmp_path / "out/photo.jpg")
    assert answer.whole
    assert answer.boxes
    monkeypatch.chdir(tmp_path / "out")
    exec(program(tmp_path / "out"), {})
    printed = [line for line in capsys.readouterr().out.splitlines() if line.endswith("]")]
    assert len(printed) == len(answer.boxes)
    for line, one in zip(printed, answer.boxes, strict=True):
        name, _, numbers = line.rpartition(" [")
        found = json.loads(f"[{numbers}")
        assert (name, found) == (one.desc, pytest.approx(one.outline or one.box, abs=0.06))


DORA = {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": ["all-linear"]}


@pytest.mark.parametrize("adapted", [True, False])
def test_checkpoint_saved_by_learner_is_exported(tmp_path, model, encoder, image_paths, model_path, adapted):
    policy = adapt(model, [VIT, ALIGNER], DORA) if adapted else model
    records = [record(image_paths[0], 0, object_1=box("red box", 0, 0, 100, 100))]
    harness = build(tmp_path / "run", policy, encoder, records, max_steps=2, learning_rate=1e-2, answer=shifted)
    harness.learner.train()
    harness.learner.save_progress()
    opened = open_checkpoint(tmp_path / "run" / "checkpoint-2", model=None if adapted else str(model_path))
    assert (opened.adapter is not None) == adapted
    export_model(opened, tmp_path / "out", dtype=torch.float32)
    learnt, base, exported = (logits(one) for one in (policy.eval(), load(model_path), load(tmp_path / "out")))
    assert (exported - learnt).abs().max() < 1e-4
    assert (base - learnt).abs().max() > 1e-2
