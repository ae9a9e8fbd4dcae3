"""A project's folder is whole or not there, and both of its jobs are right on any number of GPUs."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor
from typer.testing import CliRunner

from stage2_api.advice import idle_settings
from stage2_api.errors import ConfigError
from stage2_api.parsing import parse_job
from stage2_cli.main import app
from stage2_controller.job.containers import containers
from stage2_trainer.checks.preflight import record_rules
from stage2_trainer.data.files import new_folder
from stage2_trainer.data.records import RecordRules, load_records
from stage2_trainer.prepare import project_folder
from stage2_trainer.prepare.coordinate_tokens import prepare
from stage2_trainer.prepare.project_folder import create_project
from stage2_trainer.prepare.project_request import ProjectRequest
from tests.unit.trainer.prepare.stock_models import annotated, mixture_of
from tests.unit.trainer.prepare.stock_models import stock as stock_model

SEED = 7
IMAGES = 12


def quietly(items, what, total):
    return items


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    return stock_model(tmp_path_factory.mktemp("models") / "stock")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data file of pictures with one to three boxes each."""
    boxes = lambda number, _: [[8 * count, 4, 20, 30] for count in range(number % 3 + 1)]  # noqa: E731
    return annotated(tmp_path_factory.mktemp("data"), [(96, 72)] * IMAGES, boxes)


def request(source, stock, output, **changes):
    return ProjectRequest(
        **{"data": source, "held_out": None, "model": str(stock), "gpus": 0, "output": output, **changes}
    )


@pytest.fixture(scope="module")
def project(data, stock, tmp_path_factory):
    """A project for a CPU, and the report of its creation."""
    output = tmp_path_factory.mktemp("projects") / "cats"
    return create_project(request(data, stock, output), quietly), output


def jobs(folder):
    return [parse_job(yaml.safe_load((folder / f"{stage}.yaml").read_text())) for stage in ("stage1", "stage2")]


def test_training_and_validation_records_are_disjoint_and_complete(project):
    made, folder = project
    rules = RecordRules(image_roots=tuple(map(str, made.folders.images)))
    parts = [load_records(folder / "data" / name, rules=rules) for name in ("train.jsonl", "val.jsonl")]
    ids = [{record.sample_id for record in part} for part in parts]
    assert (len(ids[0]), len(ids[1])) == (IMAGES - 1, 1)
    assert ids[0] | ids[1] == {str(number) for number in range(1, IMAGES + 1)}
    assert (made.measures.records, made.measures.held_out) == (IMAGES - 1, 1)


def test_answers_and_prompts_are_measured_in_model_tokens(project):
    made, folder = project
    tokenizer = AutoProcessor.from_pretrained(folder / "models" / "prepared").tokenizer
    token = "<|coord_1|>"
    box = f'"bbox_2d": ["{token}", "{token}", "{token}", "{token}"]'
    text = "{" + ", ".join(f'"object_{n}": {{"desc": "cat", {box}}}' for n in (1, 2, 3)) + "}<|im_end|>\n"
    assert made.measures.longest_answer == len(tokenizer.encode(text, add_special_tokens=False))
    assert made.measures.objects == 3
    images = made.measures.patches
    assert (images.side, images.tokens((96, 72))) == (16, 6 * 4)


def test_generated_stage_1_and_stage_2_jobs_are_valid_without_unused_settings(project):
    _, folder = project
    for job in jobs(folder):
        assert idle_settings(job.spec.config) == ()
    done = CliRunner().invoke(app, ["validate", str(folder / "stage1.yaml"), str(folder / "stage2.yaml")])
    assert done.exit_code == 0, done.output
    assert f"{IMAGES - 1} valid records" in done.output


def test_generated_jobs_name_schema_in_folder_for_editors(project):
    _, folder = project
    for name in ("stage1.yaml", "stage2.yaml"):
        text = (folder / name).read_text(encoding="utf-8")
        mark, _, schema = text.splitlines()[0].partition("=")
        assert mark == "# yaml-language-server: $schema"
        editor = Draft202012Validator(json.loads((folder / schema).read_text(encoding="utf-8")))
        assert [one.message for one in editor.iter_errors(yaml.safe_load(text))] == []


@pytest.mark.parametrize(
    ("gpus", "servers", "learners"), [(0, 0, (0, 0)), (1, 0, (1, 1)), (4, 3, (4, 1)), (8, 7, (8, 1))]
)
def test_gpus_are_divided_between_servers_and_learner(data, stock, tmp_path, gpus, servers, learners):
    create_project(request(data, stock, tmp_path / "run", gpus=gpus), quietly)
    stage1, stage2 = jobs(tmp_path / "run")
    assert (stage1.spec.rollout.servers, stage2.spec.rollout.servers) == (0, servers)
    assert (stage1.spec.learner.gpus, stage2.spec.learner.gpus) == learners
    for job in (stage1, stage2):
        assert idle_settings(job.spec.config) == ()
        assert (
            sum(one.gpus for one in containers(job, host_for=lambda _: "h", tls=True).servers)
            == job.spec.rollout.servers
        )


@pytest.mark.parametrize("gpus", [0, 4])
def test_generated_jobs_pass_validation_rules_of_api_server(data, stock, tmp_path, gpus):
    from tests.unit.api.api_server import SPEC, defaulted, holds

    create_project(request(data, stock, tmp_path / "run", gpus=gpus), quietly)
    for stage in ("stage1", "stage2"):
        spec = defaulted(SPEC, yaml.safe_load((tmp_path / "run" / f"{stage}.yaml").read_text())["spec"])
        for schema, value in ((SPEC, spec), (SPEC["properties"]["config"], spec["config"])):
            rules = schema.get("x-kubernetes-validations", [])
            assert [
                rule["message"] for rule in rules if "oldSelf" not in rule["rule"] and not holds(rule["rule"], value)
            ] == []


def test_large_model_gets_expert_settings(data, stock, tmp_path):
    create_project(request(data, stock, tmp_path / "run", gpus=4), quietly)
    stage1, stage2 = (job.spec.config for job in jobs(tmp_path / "run"))
    for config in (stage1, stage2):
        assert (config.model.torch_dtype, config.model.attn_impl) == ("bfloat16", "auto")
        assert config.training.bf16
        assert config.training.gradient_checkpointing
        assert config.training.packing
        assert (config.tuner.train_type, config.tuner.use_dora, config.tuner.freeze_vit) == ("lora", True, True)
        assert config.training.eval_steps == config.training.save_steps
    assert (stage1.custom.trainer_variant, stage2.custom.trainer_variant) == ("sft", "rollout_matching_sft")
    assert (stage1.tuner.train_coord_rows, stage2.tuner.train_coord_rows) == (True, False)
    assert stage1.training.learning_rate > stage2.training.learning_rate
    assert stage1.custom.user_prompt == stage2.custom.user_prompt


def test_stage_2_starts_from_folder_that_readme_exports_stage_1_to(project):
    _, folder = project
    stage1, stage2 = (job.spec.config for job in jobs(folder))
    readme = (folder / "README.md").read_text()
    assert "stage2 export runs/stage1 --output models/stage1" in readme
    assert Path(stage2.model.model) == folder / "models" / "stage1"
    assert Path(stage1.training.output_dir) == folder / "runs" / "stage1"
    assert len([line for line in readme.splitlines() if line.startswith("    stage2 ")]) == 6


def test_every_path_of_job_lies_in_its_volumes(project):
    _, folder = project
    for job in jobs(folder):
        mounted = {Path(volume.mount_path): volume for volume in job.spec.volumes}
        custom = job.spec.config.custom
        read = [custom.train_jsonl, custom.val_jsonl, job.spec.config.model.model]
        read += load_records(custom.train_jsonl, rules=record_rules(job.spec.config))[0].images
        for path in map(Path, read):
            assert any(path.is_relative_to(mount) for mount in mounted)
        inner = max((m for m in mounted if Path(job.spec.config.training.output_dir).is_relative_to(m)), key=len_of)
        assert not mounted[inner].read_only
        assert all(Path(volume.host_path.path) == mount for mount, volume in mounted.items())


def len_of(path):
    return len(path.parts)


def test_prepared_model_is_used_in_place(data, stock, tmp_path):
    prepare(str(stock), tmp_path / "ready")
    create_project(request(data, tmp_path / "ready", tmp_path / "run"), quietly)
    stage1, _ = jobs(tmp_path / "run")
    assert stage1.spec.config.model.model == str(tmp_path / "ready")
    assert str(tmp_path / "ready") in {volume.mount_path for volume in stage1.spec.volumes}
    assert not (tmp_path / "run" / "models").exists()


def test_validation_file_is_held_out_unchanged(data, stock, tmp_path):
    made = create_project(request(data, stock, tmp_path / "run", held_out=data), quietly)
    assert (made.measures.records, made.measures.held_out) == (IMAGES, IMAGES)


def left(folder):
    return sorted(path.name for path in folder.iterdir())


def test_non_empty_output_folder_is_refused(data, stock, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("")
    with pytest.raises(ConfigError, match=r"--output: .*new or an empty folder"):
        create_project(request(data, stock, tmp_path / "run"), quietly)
    assert left(tmp_path / "run") == ["mine"]


def test_empty_output_folder_is_used(data, stock, tmp_path):
    (tmp_path / "run").mkdir()
    create_project(request(data, stock, tmp_path / "run"), quietly)
    assert left(tmp_path) == ["run"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": Path("lost.jsonl")}, r"--data: .*must be a data file .*`stage2 import` writes one"),
        ({"held_out": Path("lost.jsonl"), "images": (Path("lost"),)}, r"--val-data: .*\n--images: "),
        ({"gpus": -1}, "--gpus"),
        ({"gpus": 99}, "--gpus"),
        ({"model": "lost"}, "--model"),
    ],
)
def test_mistakes_are_reported_before_anything_is_written(data, stock, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        create_project(request(data, stock, tmp_path / "run", **changes), quietly)
    assert left(tmp_path) == []


def test_model_of_other_architecture_is_refused(data, stock, tmp_path):
    config = json.loads((stock / "config.json").read_text())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(config["text_config"] | {"model_type": "qwen3"}))
    with pytest.raises(ConfigError, match=r"--model: .*Qwen3-VL; its config.json has model_type qwen3;"):
        create_project(request(data, tmp_path / "other", tmp_path / "run"), quietly)
    assert left(tmp_path) == ["other"]


def test_moe_model_is_refused_for_project(data, stock, tmp_path):
    mixture = mixture_of(stock, tmp_path / "mixture")
    with pytest.raises(ConfigError, match=r"--model: .*is a mixture of experts, whose weights no vLLM"):
        create_project(request(data, mixture, tmp_path / "cats", gpus=4), quietly)
    assert not (tmp_path / "cats").exists()


def test_model_with_missing_weights_leaves_no_files_behind(data, stock, tmp_path):
    shutil.copytree(stock, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors.popitem()
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"--model: .*must hold all weights; it lacks "):
        create_project(request(data, tmp_path / "model", tmp_path / "run"), quietly)
    assert left(tmp_path) == ["model"]


def test_images_outside_data_folder_are_found_in_named_image_folders(data, stock, tmp_path, monkeypatch):
    monkeypatch.delenv("ROOT_IMAGE_DIR", raising=False)  # of all tests
    shutil.copytree(data.parent / "images", tmp_path / "set" / "images")
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    for record in lines:
        record["images"] = [f"../set/{record['images'][0]}"]
    (tmp_path / "lists").mkdir()
    moved = tmp_path / "lists" / "train.jsonl"
    moved.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ConfigError, match=r"train.jsonl:1 images\[0\]: .*or `init --images`") as refused:
        create_project(request(moved, stock, tmp_path / "run"), quietly)
    assert len(refused.value.problems) == 1
    create_project(request(moved, stock, tmp_path / "run", images=(tmp_path / "set",)), quietly)
    for job in jobs(tmp_path / "run"):
        assert job.spec.config.custom.image_roots == [str(tmp_path / "set")]
    done = CliRunner().invoke(app, ["validate", str(tmp_path / "run" / "stage1.yaml")])
    assert done.exit_code == 0, done.output


def test_image_folder_named_only_by_environment_is_refused(data, stock, tmp_path, monkeypatch):
    record = json.loads(data.read_text().splitlines()[0])
    record["images"] = [str(data.parent / "images" / "1.png")]
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(record)}\n{json.dumps(record | {'sample_id': 'b'})}\n")
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(data.parent))
    with pytest.raises(ConfigError, match=r"^--images: .*1.png'; must be in a folder that the jobs will have"):
        create_project(request(tmp_path / "train.jsonl", stock, tmp_path / "run"), quietly)


def test_data_without_objects_is_refused_and_leaves_no_files_behind(data, stock, tmp_path):
    bare = data.parent / "bare.jsonl"
    bare.write_text("\n".join(json.dumps(json.loads(line) | {"objects": []}) for line in data.read_text().splitlines()))
    with pytest.raises(ConfigError, match=r"^--data: '.*bare\.jsonl'; must have objects; its 11 records have none"):
        create_project(request(bare, stock, tmp_path / "run"), quietly)
    assert not (tmp_path / "run").exists()


def test_single_record_is_refused(data, stock, tmp_path):
    one = data.parent / "one.jsonl"
    one.write_text(data.read_text().splitlines()[0])
    with pytest.raises(ConfigError, match=r"^--data: .*must hold two records at least"):
        create_project(request(one, stock, tmp_path / "run"), quietly)


def test_full_disk_while_writing_model_is_reported_for_output_option(data, stock, tmp_path, monkeypatch):
    def full(model, folder):
        with new_folder("--output", folder) as aside:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(aside))

    monkeypatch.setattr(project_folder, "prepare", full)
    with pytest.raises(ConfigError) as refused:
        create_project(request(data, stock, tmp_path / "run"), quietly)
    (problem,) = refused.value.problems
    assert (problem.path, problem.value) == ("--output", str(tmp_path / "run"))
    assert "the disk is full" in problem.rule


def test_output_folder_that_cannot_be_created_is_refused(data, stock):
    with pytest.raises(ConfigError, match=r"^--output: '/proc/no/run'; must be in a folder that can be written to \("):
        create_project(request(data, stock, Path("/proc/no/run")), quietly)
