"""`stage2 inspect` without a server: its inputs, its output, the rewards of GRPO, and the example in the docs."""

import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from stage2_api.errors import ConfigError
from stage2_cli.inspect_sample import inspect_sample, read_ids
from stage2_cli.main import app
from stage2_cli.requests import InspectionRequest
from stage2_trainer.matching import serialize_objects
from tests.unit.api.grpo_configs import GOOD
from tests.unit.api.wrong_jobs import merge_patch
from tests.unit.cli.test_light_start import MATCHING
from tests.unit.report.inspected import ANSWERS, COMPLETE, SCENE, TINY_MODEL, tiny_spelling, write_records

SFT = {"custom": {"trainer_variant": "sft"}}
ANSWER = '<DOMAIN=BBU>, <TASK=SUMMARY>\n{"items": []}'


@pytest.fixture
def files(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
    metadata = {"_fusion_template": "summary_bbu", "_fusion_mode": "summary", "summary_ref": '{"items": []}'}
    (tmp_path / "train.jsonl").write_text(json.dumps({"images": ["image.png"], "metadata": metadata}))
    (tmp_path / "answer.txt").write_text(ANSWER)
    run = merge_patch(GOOD, {"custom": {"train_jsonl": str(tmp_path / "train.jsonl")}})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    return tmp_path


def inspected(files, *options):
    command = ["inspect", str(files / "run.yaml"), "--rewards", "--response-file", str(files / "answer.txt"), *options]
    return CliRunner().invoke(app, command)


def test_rewards_are_shown_with_weights_and_total(files):
    lines = [line.split() for line in inspected(files).output.splitlines()]
    assert ["│", "summary.header", "│", "1.000", "│", "2", "│", "2.000", "│"] in lines
    assert ["│", "total", "│", "│", "│", "3.000", "│"] in lines


def test_json_option_prints_rewards_as_json(files):
    found = json.loads(inspected(files, "--json").output)
    assert found == {"sample": 0, "rewards": {"summary.format": 1.0, "summary.header": 1.0}, "total": 3.0}


def test_nonexistent_sample_is_refused_with_range(files):
    error = inspected(files, "--sample", "1").exception
    assert isinstance(error, ConfigError)
    assert "--sample: 1; must lie in 0..0" in str(error)


ROOT = Path(__file__).parents[3]
ELIDED = "│ …"


def test_example_in_docs_prints_what_page_shows(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "inspect.md").read_text(encoding="utf-8")
    files, command, shown = re.search(
        r"```sh\n(cat > scene.*?)^stage2 (inspect.*?)```\n\n```\n(.*?)```", page, re.DOTALL | re.MULTILINE
    ).groups()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    subprocess.run(["bash", "-c", files], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    printed = CliRunner().invoke(app, shlex.split(command)).stdout
    lines = iter([line.rstrip() for line in printed.splitlines()])
    missing = [line for line in shown.splitlines() if line != ELIDED and line not in lines]
    assert missing == []


def offline(folder, answer, **options):
    """A request for the scene with an answer in a file, as text."""
    path = folder / "answer.txt"
    path.write_text(answer, encoding="utf-8")
    records = write_records(folder)
    return InspectionRequest(
        **{"record": records, "line": 1, "tokenizer": TINY_MODEL, "response_file": path, **options}
    )


def written_config(folder, *, train_sample_limit=None, **matching):
    path = folder / "train.yaml"
    custom = {"train_jsonl": str(write_records(folder)), "extra": {"rollout_matching": matching}}
    config = merge_patch(MATCHING, {"custom": {**custom, "train_sample_limit": train_sample_limit}})
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def printed(request, capsys):
    assert inspect_sample(request) == 0
    return json.loads(capsys.readouterr().out)


FOUND, MISSED = (0x1A, 0x7F, 0x37), (0xBC, 0x4C, 0x00)


def colors(path):
    with Image.open(path) as picture:
        return {color for _, color in picture.convert("RGB").getcolors(1 << 20)}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_response_text_and_token_ids_give_same_result(tmp_path, capsys, answer):
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(tiny_spelling().vocab.encode(answer)))
    by_text = printed(offline(tmp_path, answer + "\n", as_json=True), capsys)
    by_ids = printed(offline(tmp_path, "", as_json=True, response_file=None, response_ids=ids), capsys)
    assert by_text == by_ids


def test_all_objects_and_changed_coordinate_targets_are_shown(tmp_path, capsys):
    assert inspect_sample(offline(tmp_path, ANSWERS["truncated"])) == 0
    shown = capsys.readouterr().out
    for words in ("Matches", "Unmatched predictions", "wrong_number_of_coordinates", "cut_off", "green ellipse"):
        assert words in shown
    assert "<|coord_110|>→100" in shown


def test_matching_settings_of_config_are_used(tmp_path, capsys):
    strict = written_config(tmp_path, maskiou_gate=0.99)
    request = offline(tmp_path, COMPLETE, config=strict, record=None, line=None, sample=1, tokenizer=None, as_json=True)
    found = printed(request, capsys)
    assert found["matches"] == []
    assert found["false_negatives"] == [0, 1, 2]


def test_record_and_tokenizer_options_override_config(tmp_path, capsys):
    request = offline(tmp_path, COMPLETE, config=written_config(tmp_path), as_json=True)
    assert len(printed(request, capsys)["matches"]) == 2


@pytest.fixture
def stage_1(tmp_path):
    config = written_config(tmp_path)
    config.write_text(yaml.safe_dump(merge_patch(yaml.safe_load(config.read_text()), SFT)))
    return InspectionRequest(config=config, sample=1)


def test_stage_1_sample_is_shown_with_its_ground_truth(tmp_path, capsys, stage_1):
    found = printed(replace(stage_1, as_json=True), capsys)
    assert found["y_train_text"] == serialize_objects(SCENE)
    assert found["labels"].count("coord") == sum(len(one.bins) for one in SCENE)
    assert inspect_sample(stage_1) == 0
    shown = capsys.readouterr().out
    assert "stage 1: the ground truth, 3 objects" in shown
    assert "missed" not in shown.lower()
    (tmp_path / "answer.txt").write_text(COMPLETE)
    with pytest.raises(ConfigError, match=r"--response-file: .*which trains on the ground truth"):
        inspect_sample(replace(stage_1, response_file=tmp_path / "answer.txt"))


@pytest.mark.parametrize("position", [-1, 2])
def test_line_outside_file_is_refused_with_range(tmp_path, position):
    with pytest.raises(ConfigError, match=r"--line: -?\d; must lie in 0..1: .*records.jsonl has 2 records"):
        inspect_sample(offline(tmp_path, COMPLETE, line=position))


def test_sample_index_is_bounded_by_train_sample_limit(tmp_path):
    config = written_config(tmp_path, train_sample_limit=1)
    with pytest.raises(ConfigError, match=r"--sample: 1; must lie in 0..0"):
        inspect_sample(offline(tmp_path, COMPLETE, config=config, record=None, line=None, sample=1))


def test_broken_record_is_reported_with_its_line(tmp_path, capsys):
    request = offline(tmp_path, COMPLETE, as_json=True)
    with request.record.open("a") as file:
        file.write('\n{"images": ["a.png"], "width": 0, "height": 9, "objects": []}\n')
    assert len(printed(request, capsys)["ground_truth"]) == len(SCENE)
    with pytest.raises(ConfigError, match=r"records.jsonl:4 width: 0; must be a positive integer"):
        inspect_sample(replace(request, line=2))


@pytest.mark.parametrize("line", ["[1]", "{", '{"images": "a.png", "width": 1, "height": 1, "objects": []}'])
def test_line_that_is_not_record_is_refused(tmp_path, line):
    request = offline(tmp_path, COMPLETE, line=0)
    request.record.write_text(line)
    with pytest.raises(ConfigError, match=r"records\.jsonl:1"):
        inspect_sample(request)


@pytest.mark.parametrize("content", ["{}", "[1, true]", '["a"]', "[1"])
def test_response_ids_must_be_json_list_of_integers(tmp_path, content):
    path = tmp_path / "ids.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="must be a JSON list of token ids"):
        read_ids(path)


def test_answer_is_cut_before_vision_token(tmp_path, capsys):
    assert printed(offline(tmp_path, "{<|image_pad|>}", as_json=True), capsys)["prefix_text"] == "{"
    assert len(tiny_spelling().vision_ids) == 4


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"response_ids": "ids.json"}, "--response-file"),
        ({"sample": 0}, "--sample"),
        ({"record": None}, "--line"),
        ({"record": None, "line": None}, "CONFIG: is required without --record"),
        ({"tokenizer": None}, "CONFIG: is required without --tokenizer"),
        ({"response_file": None}, "CONFIG: is required without --response-ids or --response-file"),
        ({"tokenizer": TINY_MODEL.parent}, "must be a folder with a Hugging Face tokenizer"),
    ],
)
def test_contradictory_or_missing_options_are_reported(tmp_path, changed, named):
    with pytest.raises(ConfigError, match=named):
        inspect_sample(offline(tmp_path, COMPLETE, **changed))


def test_picture_shows_found_and_missed_objects(tmp_path, capsys):
    request = offline(tmp_path, ANSWERS["truncated"], picture=tmp_path / "new" / "scene.png", as_json=True)
    write_records(tmp_path, image=True)
    assert printed(request, capsys)["matches"]
    assert {FOUND, MISSED, (0x09, 0x69, 0xDA), (0xCF, 0x22, 0x2E)} <= colors(request.picture)


def test_picture_of_stage_1_sample_shows_only_ground_truth(tmp_path, stage_1):
    """It had a column for an answer that there is not, and called all objects missed."""
    write_records(tmp_path, image=True)
    inspect_sample(replace(stage_1, picture=tmp_path / "scene.png"))
    assert {FOUND, MISSED} & colors(tmp_path / "scene.png") == {FOUND}
    with Image.open(tmp_path / "scene.png") as picture:
        assert picture.width < 500, "one column"


def test_picture_requires_readable_image(tmp_path):
    with pytest.raises(ConfigError, match=r"images: .*must have readable images"):
        inspect_sample(offline(tmp_path, COMPLETE, picture=tmp_path / "scene.png"))
