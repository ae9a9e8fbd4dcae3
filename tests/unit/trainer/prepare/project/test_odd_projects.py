"""Projects of odd images and at odd places: made right, or refused by the option that is to be changed."""

import os
from pathlib import Path

import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from stage2_api.errors import ConfigError
from stage2_api.parsing import parse_job
from stage2_cli.main import app
from stage2_trainer.data.records import RecordRules, load_records
from stage2_trainer.prepare.coordinate_tokens import prepare
from stage2_trainer.prepare.project_folder import create_project
from stage2_trainer.prepare.project_request import ProjectRequest
from tests.unit.trainer.prepare.stock_models import annotated, stock

SIZE = (96, 72)
SIZES = (SIZE,) * 4


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """A model that has its tokens already: a project of it is quickly made."""
    folder = tmp_path_factory.mktemp("models")
    prepare(str(stock(folder / "stock")), folder / "ready")
    return folder / "ready"


def create(data, model, output, gpus=0):
    return create_project(ProjectRequest(data, None, str(model), gpus, output), lambda items, what, total: items)


def test_image_with_extreme_aspect_ratio_is_refused_by_line(tmp_path, ready):
    with pytest.raises(ConfigError, match=r"train.jsonl:6 images\[0\]: '1000 x 4'; must have sides of which one is at"):
        create(annotated(tmp_path, [*(SIZE,) * 5, (1000, 4)]), ready, tmp_path / "run")


def test_project_is_created_without_decoding_pixels(tmp_path, ready):
    data = annotated(tmp_path, SIZES)
    images = data.parent / "images"
    for path in images.iterdir():
        path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(OSError, match="truncated"), Image.open(images / "1.png") as image:
        image.load()
    assert create(data, ready, tmp_path / "run").measures.records == 3


def test_output_folder_filled_during_creation_is_not_touched(tmp_path, ready):
    def slowly(items, what, total):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "mine").write_text("")
        return items

    with pytest.raises(ConfigError, match=r"--output: .*new or an empty folder"):
        create_project(
            ProjectRequest(annotated(tmp_path / "set", SIZES), None, str(ready), 0, tmp_path / "run"), slowly
        )
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "set"]


def test_output_below_symlinked_folder_finds_its_images(tmp_path, ready):
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "deep")
    create(annotated(tmp_path, SIZES), ready, tmp_path / "link" / "run")
    rules = RecordRules(image_roots=(str(tmp_path),))
    written = load_records(tmp_path / "link" / "run" / "data" / "val.jsonl", rules=rules)
    assert all(os.path.isfile(one.images[0]) for one in written)


@pytest.mark.parametrize(
    "name",
    ["a b", 'it\'s "quoted"', "a\nb", "a\x85b", "a\u2028b", "a\x1b[31mb", "{x}", "%s", "# c", "[bold]", "\u0645"],
)
def test_project_folder_may_have_any_name_that_can_be_mounted(tmp_path, ready, name):
    folder = tmp_path / name
    create(annotated(tmp_path / "set", SIZES), ready, folder)
    for stage in ("stage1", "stage2"):
        text = (folder / f"{stage}.yaml").read_text()
        assert parse_job(yaml.safe_load(text)).spec.config.custom.train_jsonl == str(folder / "data" / "train.jsonl")
        assert text.startswith("# ")
        assert len((folder / "README.md").read_text().splitlines()) == 13
    done = CliRunner().invoke(app, ["validate", str(folder / "stage1.yaml"), str(folder / "stage2.yaml")])
    assert done.exit_code == 0, done.output


NO_UTF8 = os.fsdecode(b"a\xff")


@pytest.mark.parametrize(
    ("option", "part"), [("--output", "a:b"), ("--data", "a:b"), ("--model", "a:b"), ("--output", NO_UTF8)]
)
def test_folder_that_cannot_be_mounted_is_refused_with_its_option(tmp_path, ready, option, part):
    places = {"--output": tmp_path / "run", "--data": tmp_path / "set", "--model": tmp_path / "model"}
    places[option] = tmp_path / part
    places["--model"].symlink_to(ready) if option != "--model" else prepare_at(places["--model"], ready)
    with pytest.raises(ConfigError) as refused:
        create(annotated(places["--data"], SIZES), places["--model"], places["--output"])
    (problem,) = refused.value.problems
    assert problem.path == option
    assert "without a colon" in problem.rule
    assert not Path(tmp_path, "run").exists()


def prepare_at(folder, ready):
    """Copy a model that is ready to a folder of any name, which libraries need not be able to write to."""
    folder.mkdir()
    for path in ready.iterdir():
        (folder / path.name).symlink_to(path)


def test_more_gpus_than_records_are_refused(tmp_path, ready):
    with pytest.raises(ConfigError, match=r"^--gpus: 4; must be at most 3, the number of training records"):
        create(annotated(tmp_path, SIZES), ready, tmp_path / "run", gpus=4)
    assert not (tmp_path / "run").exists()
    create(annotated(tmp_path / "more", (SIZE,) * 5), ready, tmp_path / "run", gpus=4)
