"""`stage2 infer` and `stage2.Model`: boxes of a trained model, an adapter and a server, drawn and in pixels."""

import json
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from typer.testing import CliRunner

import stage2
from stage2_api.errors import ConfigError
from stage2_cli.main import app
from stage2_trainer.data.question import Question
from stage2_trainer.infer.answered_image import AnsweredImage, Box
from stage2_trainer.infer.model import Model
from tests.support.http_server import answering
from tests.unit.report.inspected import TINY_MODEL
from tiny_model.answers import PROMPT
from tiny_model.scenes import draw, make_scene

ANSWER = (
    '{"object_1": {"desc": "cat", "bbox_2d": ["<|coord_100|>", "<|coord_200|>", "<|coord_500|>", "<|coord_400|>"]},'
    ' "object_2": {"desc": "sofa", "poly": ["<|coord_0|>", "<|coord_0|>", "<|coord_999|>", "<|coord_0|>",'
    ' "<|coord_500|>", "<|coord_500|>"]}}'
)
MODELS = {"data": [{"id": "mine"}]}
REPLY = {"choices": [{"message": {"content": ANSWER}, "finish_reason": "stop"}]}
ROOT = Path(__file__).parents[3]
COURSE = {
    "custom.user_prompt": "What is here?",
    "template.system": "You list objects.",
    "template.max_pixels": 4096,
    "custom.extra.rollout_matching.max_new_tokens": 12,
}


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "cat and sofa.jpg"
    Image.new("RGB", (200, 100), "white").save(path)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from tests.unit.trainer.export.trained import saved, trained

    return saved(trained(TINY_MODEL, "dora"), TINY_MODEL, tmp_path_factory.mktemp("run"), course=COURSE)


def inferred(*words):
    return CliRunner().invoke(app, ["infer", *map(str, words)])


def test_coordinate_tokens_are_converted_to_pixels(image):
    answer = AnsweredImage.from_text(str(image), (200, 100), ANSWER, "stop")
    triangle = (0.0, 0.0, 199.8, 0.0, 100.0, 50.0)
    assert answer.boxes == (
        Box("cat", (20.0, 20.0, 100.0, 40.0)),
        Box("sofa", (0.0, 0.0, 199.8, 50.0), triangle),
    )
    assert answer.whole


def test_stock_model_coordinates_are_read_as_thousandths(image):
    text = '```json\n[{"bbox_2d": [0, 500, 1000, 1000], "label": "cat"}]\n```'
    answer = AnsweredImage.from_text(str(image), (200, 100), text, "stop")
    assert answer.boxes == (Box("cat", (0.0, 50.0, 200.0, 100.0)),)


@pytest.mark.parametrize(("text", "reason"), [(ANSWER, "length"), (ANSWER[:-40], "stop"), ("no list", "stop")])
def test_truncated_or_malformed_answer_is_not_whole(image, text, reason):
    assert not AnsweredImage.from_text(str(image), (200, 100), text, reason).whole


def test_picture_draws_each_class_in_single_colour(image):
    boxes = tuple(Box(name, (10, 10 * n, 60, 10 * n + 8)) for n, name in enumerate(("cat", "dog", "cat"), 1))
    picture = AnsweredImage(str(image), 200, 100, boxes, True, "").picture(width=400)
    assert picture.size == (400, 200)
    lines = [picture.getpixel((100, 20 * n)) for n in (1, 2, 3)]
    assert lines[0] == lines[2] != lines[1]


def test_checkpoint_is_prompted_as_in_training(checkpoint, image, recwarn):
    assert Model(checkpoint).answer(image).text
    assert [one for one in recwarn if "max_pixels" in str(one.message)] == []
    assert Model(checkpoint).question == Question("What is here?", "You list objects.", None, 4096, 12)
    assert Model(checkpoint, prompt="Cats?", max_new_tokens=3).question.prompt == "Cats?"


def test_checkpoint_and_its_exports_give_same_answer(checkpoint, image, tmp_path):
    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    for output, options in ((merged, ["--dtype", "float32"]), (adapter, ["--adapter"])):
        done = CliRunner().invoke(app, ["export", str(checkpoint), "--output", str(output), *options])
        assert done.exit_code == 0, done.output
    answers = [stage2.Model(source).answer(image) for source in (checkpoint, merged, adapter)]
    assert len({answer.text for answer in answers}) == 1
    assert answers[0].text


def test_example_in_docs_prints_each_object(image, monkeypatch, capsys):
    page = (ROOT / "docs/python-api.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```py\n(import stage2.*?)```", page, re.DOTALL)
    monkeypatch.chdir(image.parent)
    image.rename("photo.jpg")
    with answering(lambda path, _: (200, MODELS if path == "/v1/models" else REPLY)) as server:
        exec(example.replace("models/mine", server.url), {})
    assert capsys.readouterr().out == (
        "cat (20.0, 20.0, 100.0, 40.0) ()\nsofa (0.0, 0.0, 199.8, 50.0) (0.0, 0.0, 199.8, 0.0, 100.0, 50.0)\n"
    )


def test_image_folder_yields_pictures_and_json_lines(checkpoint, image, tmp_path):
    (tmp_path / "notes.txt").write_text("no image")
    Image.new("RGB", (50, 50)).save(tmp_path / "cat and sofa.png")
    output = tmp_path / "boxes"
    for _ in range(2):
        done = inferred(checkpoint, tmp_path, "--output", output)
        assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (output / "boxes.jsonl").read_text().splitlines()]
    assert [(Path(one["image"]).name, one["width"]) for one in lines] == [(image.name, 200), ("cat and sofa.png", 50)]
    assert [Image.open(one["picture"]).width for one in lines] == [1024, 1024]
    assert len({one["picture"] for one in lines}) == 2


def test_folder_with_a_broken_image_is_answered_without_it(checkpoint, image, tmp_path):
    """One broken photo of 300 refused them all."""
    (tmp_path / "broken.jpg").write_bytes(image.read_bytes()[:200])
    (tmp_path / "page.PNG").write_text("<!DOCTYPE html>")
    done = inferred(checkpoint, tmp_path, "--output", tmp_path / "boxes")
    assert done.exit_code == 0, done.output
    assert [json.loads(line)["image"] for line in (tmp_path / "boxes/boxes.jsonl").open()] == [str(image)]
    assert re.findall(r"left out: .*/([\w.]+): ", done.stderr) == ["broken.jpg", "page.PNG"]
    assert "HTML, no image" in done.stderr


def test_named_broken_image_and_folder_without_a_whole_one_are_refused(image, tmp_path):
    image.write_bytes(image.read_bytes()[:200])
    for words in ([image], [tmp_path]):
        done = inferred("no-model-here", *words, "--output", tmp_path / "out")
        assert [problem.value for problem in done.exception.problems] == [str(image)]
        assert "replace the file" in done.exception.problems[0].way_out


def test_image_whose_name_begins_with_a_dot_yields_a_visible_picture(image):
    """A held-out ..39.webp was drawn as ..39.png, which no file manager shows."""
    hidden = image.rename(image.with_name("..39.jpg"))
    with answering(lambda path, _: (200, MODELS if path == "/v1/models" else REPLY)) as server:
        done = inferred(server.url, hidden, "--output", image.parent / "boxes")
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (image.parent / "boxes").iterdir()) == ["39.png", "boxes.jsonl"]


@pytest.mark.parametrize(
    ("arrange", "path", "words"),
    [
        (lambda f: (f / "none.jpg",), "IMAGE", "not there|no such|does not exist|No such"),
        (lambda f: (f,), "IMAGE", "the folder has no images"),
    ],
)
def test_unreadable_images_are_reported_before_model_is_loaded(tmp_path, arrange, path, words):
    done = inferred("no-model-here", *arrange(tmp_path), "--output", tmp_path / "out")
    assert isinstance(done.exception, ConfigError)
    (problem,) = done.exception.problems
    assert problem.path == path
    assert re.search(words, problem.rule)
    assert not (tmp_path / "out").exists()


def test_output_folder_with_other_files_is_refused(image, tmp_path):
    done = inferred("no-model-here", image, "--output", image.parent)
    assert done.exception.problems[0].path == "--output"


def test_invalid_model_is_refused_with_accepted_kinds(image, tmp_path):
    done = inferred(tmp_path / "nothing", image, "--output", tmp_path / "out")
    assert done.exception.problems[0].path == "MODEL"
    assert "URL" in done.exception.problems[0].way_out


def test_missing_device_is_refused(checkpoint):
    with pytest.raises(ConfigError, match="--device"):
        Model(checkpoint, device="cuda:99")


def test_server_is_called_with_openai_format(image):
    asked = []

    def reply(path, body):
        if path == "/v1/models":
            return 200, MODELS
        asked.append(body)
        return 200, REPLY

    with answering(reply) as server:
        boxes = stage2.Model(server.url, prompt="What?", max_pixels=4096).boxes(image)
    assert [one.desc for one in boxes] == ["cat", "sofa"]
    (body,) = asked
    assert (body["model"], body["temperature"], body["mm_processor_kwargs"]) == ("mine", 0.0, {"max_pixels": 4096})
    picture, question = body["messages"][0]["content"]
    assert question["text"] == "What?"
    assert picture["image_url"]["url"].startswith("data:image/jpeg;base64,")


@pytest.mark.parametrize("reply", [[], {}, {"data": []}, {"data": [1]}])
def test_server_with_unknown_api_is_refused(reply):
    with answering(lambda *_: (200, reply)) as server, pytest.raises(ConfigError, match="its reply has no data"):
        stage2.Model(server.url)


def test_folder_of_input_images_is_refused_as_output(image):
    (image.parent / "boxes.jsonl").write_text("")
    done = inferred("no-model-here", image, "--output", image.parent)
    assert "replace one" in done.exception.problems[0].rule


def test_server_error_is_reported_with_its_answer(image):
    with answering(lambda *_: (401, {"error": "no token"})) as server, pytest.raises(ConfigError) as refusal:
        stage2.Model(server.url)
    assert "401" in str(refusal.value)
    assert "STAGE2_TOKEN_FILE" in str(refusal.value)


@pytest.fixture
def shapes(tmp_path):
    """A picture in which the tiny model finds three objects, and more under a bias of 6 nats."""
    scene = next(one for one in (make_scene(5, "held-out", i) for i in range(50)) if len(one.shapes) == 3)
    path = tmp_path / "scene.png"
    Image.fromarray(draw(scene)).save(path)
    return path


def found(source, image, **options):
    return stage2.Model(source, prompt=PROMPT, max_new_tokens=150, **options).answer(image)


def test_exported_bias_lengthens_answers_in_transformers_and_stage2(checkpoint, shapes, tmp_path):
    done = CliRunner().invoke(app, ["export", str(checkpoint), "--output", str(tmp_path / "out"), "--longer", "6"])
    assert done.exit_code == 0, done.output
    assert "closes a list of objects later, by 6 nats" in done.output
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    plain, biased = json.loads((TINY_MODEL / "generation_config.json").read_text()), tmp_path / "biased"
    assert {name: value for name, value in written.items() if name != "sequence_bias"} == plain
    shutil.copytree(TINY_MODEL, biased)
    shutil.copy(tmp_path / "out" / "generation_config.json", biased)

    longer = found(TINY_MODEL, shapes, longer=6.0)
    assert len(longer.boxes) > len(found(TINY_MODEL, shapes).boxes) == 3
    assert found(biased, shapes) == longer
    assert found(biased, shapes, longer=0.0) == found(TINY_MODEL, shapes)
    assert by_transformers(biased, shapes) == longer.text


def by_transformers(folder, image):
    processor = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image", "url": str(image)}, {"type": "text", "text": PROMPT}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt",
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto")
    answer = model.generate(**inputs, max_new_tokens=150)[0, inputs["input_ids"].shape[1] :]
    return processor.decode(answer, skip_special_tokens=True)


def test_bias_of_base_model_is_removed_on_export(checkpoint, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(TINY_MODEL, base)
    file = base / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "sequence_bias": [[[99], -6.0]]}))
    words = ["export", str(checkpoint), "--model", str(base), "--output", str(tmp_path / "out")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "sequence_bias" not in json.loads((tmp_path / "out" / "generation_config.json").read_text())


def test_bias_option_is_refused_for_adapter_export(checkpoint, tmp_path):
    words = ["export", str(checkpoint), "--output", str(tmp_path / "out"), "--adapter", "--longer", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exception.problems[0].path == "--longer"


def test_server_receives_bias_with_each_request(image):
    tokenizer = AutoProcessor.from_pretrained(TINY_MODEL).tokenizer
    asked = []

    def reply(path, body):
        if path == "/v1/models":
            return 200, MODELS
        if path == "/tokenize":
            assert body["add_special_tokens"] is False
            return 200, {"tokens": tokenizer.encode(body["prompt"], add_special_tokens=False)}
        asked.append(body)
        return 200, REPLY

    with answering(reply) as server:
        stage2.Model(server.url, longer=1.5).boxes(image)
        stage2.Model(server.url).boxes(image)
    assert [one.get("logit_bias") for one in asked] == [{"99": -1.5}, None]


def test_bias_is_refused_for_server_without_tokenize_endpoint():
    with (
        answering(lambda *_: (200, MODELS)) as server,
        pytest.raises(ConfigError, match="/tokenize returned no tokens"),
    ):
        stage2.Model(server.url, longer=1.5)
