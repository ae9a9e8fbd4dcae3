"""The comparison of stage 1, stage 2 and GRPO: equal terms, each run once, and figures of what has run."""

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from bench.pays import __main__ as command
from bench.pays import arms, findings, pictures, shapes, study, tower
from bench.pays.arms import ARMS, COMPARED, Sizes, arm_config
from bench.pays.study import Run
from PIL import Image

from stage2_api.parsing import parse_run_config
from stage2_trainer.data.records import load_records
from stage2_trainer.scores.answer_scores import without_nan

pytestmark = pytest.mark.in_turns(3)

ROOT = Path(__file__).parents[3]
SIZES = Sizes(steps=2, batch=1, train=2, held_out=2, tower_steps=2, tower_batch=2, object_tokens=12)


def study_in(folder):
    """A study of two images whose arms train two steps, and the folders of what it has trained."""
    trained = []

    def learn(config):
        trained.append(Path(config.training.output_dir).name)
        study.learn_here(config)

    found = study.Study(folder, SIZES, learn)
    found.data.mkdir(parents=True)
    found.start.symlink_to(study.MODEL)
    for part in ("train", "val"):
        images = [f"{part}-{k}.png" for k in range(2)]
        boxes = [{"desc": desc, "bbox_2d": [100, 100, 400, 400]} for desc in ("one", "two")]
        for k, name in enumerate(images):
            Image.new("RGB", (64, 48), (80 * k, 40, 90)).save(found.data / name)
        lines = [
            {"images": [one], "width": 64, "height": 48, "units": "bins", "objects": [box]}
            for one, box in zip(images, boxes, strict=True)
        ]
        (found.data / f"{part}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return found, trained


@pytest.fixture
def small(tmp_path):
    return study_in(tmp_path)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Such a study after the comparison, which nobody may change; what it told of twice; what it trained."""
    one, trained = study_in(tmp_path_factory.mktemp("compared"))
    one.prepare()  # data and start are there
    told = [list(one.run(COMPARED, [1])) for _ in range(2)]
    return one, told, trained


def have_done(one, compared, run):
    """Give a study the answers of its start and a run, as the comparison has them."""
    shutil.copy(compared[0].start_answers, one.start_answers)
    shutil.copytree(compared[0].run_folder(run), one.run_folder(run))


def test_each_arm_runs_once_from_same_start_and_gets_figures(compared):
    one, told, trained = compared
    expected = [Run(arm, 1) for arm in COMPARED] + [Run(arm, 1, seconds=True) for arm in "acd"]
    assert told == [expected, expected]
    assert trained == [run.name for run in expected]
    found = findings.findings(one, draws=20)
    for term in findings.TERMS:
        assert [(name, row["seeds"]) for name, row in found[term].items()] == [(arm, [1]) for arm in COMPARED]
        assert found[term]["b"]["against_a"]["seeds"] == [1]
    steps, seconds = without_nan(found["steps"]["b"]), without_nan(found["seconds"]["b"])
    assert steps == {**seconds, "against_a": steps["against_a"]}
    assert {row["steps"] for row in found["steps"].values()} == {2}
    assert all(row["cpu_seconds"] > 0 for row in found["steps"].values())
    assert len(list(findings.tables(found))) == 2 * (2 + 2 + 1 + len(COMPARED) + 3)


def test_timed_run_has_as_many_steps_as_fit_in_time_of_arm_b(tmp_path):
    one = study.Study(tmp_path, Sizes(steps=2), study.learn_here)
    for name, seconds in (("a-1", 1.5), ("b-1", 6.0)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        step = json.dumps({"event": "step", "step/cpu_s": seconds})
        (folder / "stage2_log.jsonl").write_text(f"{step}\n{step}\n")
    assert one.steps_of(Run("a", 1)) == 2
    assert one.steps_of(Run("a", 1, seconds=True)) == 8


def test_arms_differ_only_in_trainer_and_targets():
    def terms(name: str) -> dict:
        config = arm_config(ARMS[name], 1, SIZES, Path("start"), Path("data"), Path("out"))
        parse_run_config(config)
        config["custom"].pop("trainer_variant")
        for key in ARMS[name].matching:
            config["custom"]["extra"]["rollout_matching"].pop(key)
        return config

    first = terms("a")
    going_on = {name for name, arm in ARMS.items() if arm.variant != "grpo" and not arm.annotated}
    assert all(terms(name) == first for name in going_on)
    decoding = {"temperature", "repetition_penalty", "max_new_tokens"}
    of_rollouts = {name for name, arm in ARMS.items() if decoding & set(arm.matching)}
    assert of_rollouts == {"penalty", "sampled"}, "held-out images are answered by `answer_config`, alike for all"
    rewards = terms("d")
    sizes = {"per_device_train_batch_size", "effective_batch_size", "packing"}
    assert {key for key, value in rewards["training"].items() if value != first["training"][key]} == sizes
    assert rewards["training"]["effective_batch_size"] == SIZES.batch * rewards["rlhf"]["num_generations"]


def test_pretraining_of_vision_tower_changes_only_its_weights(small, tmp_path):
    one, _ = small
    lesson = tower.TowerLesson(40, 2, 1e-3, SIZES.pixels)
    tower.teach_tower(study.MODEL, one.data / "train.jsonl", tmp_path / "tower", lesson)
    before, after = (tower.load_model(str(path), dtype=None, attn_implementation="sdpa").state_dict()
                     for path in (study.MODEL, tmp_path / "tower"))  # fmt: skip
    changed = {name for name in before if not before[name].float().equal(after[name].float())}
    assert changed
    assert all(name.startswith("model.visual.") for name in changed)
    assert json.loads((tmp_path / "tower" / "tower.json").read_text())["loss"] < 1.0


def test_object_is_pooled_from_image_tokens_inside_its_box():
    box = tower.GTObject("one", "bbox", (0, 500, 500, 1000 - 1))
    shares = tower._shares([box], (2, 2)).tolist()
    assert shares == [[0, 0, 1, 0]]
    tiny = tower.GTObject("one", "bbox", (10, 10, 20, 20))
    assert tower._shares([tiny], (4, 4)).sum() == pytest.approx(1)


def test_sizes_are_command_line_options(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "shown", lambda study, write: print(study.sizes))
    options = [f"--{one.name.replace('_', '-')}={one.default}" for one in fields(Sizes)]
    command.main(["table", str(tmp_path), *options, "--steps=7"])
    assert str(Sizes(steps=7)) in capsys.readouterr().out


def test_dense_digits_have_larger_images_more_objects_and_more_tokens(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(command, "shown", lambda study, write: seen.append(study.sizes))
    command.main(["table", str(tmp_path), "--data=dense-digits", "--steps=7", "--train=6", "--held-out=2"])
    (dense,) = seen
    assert (dense.side, dense.most_objects, dense.steps, dense.answer) == (128, 8, 7, 256)
    pictures.write_pictures(tmp_path, dense)
    records = load_records(tmp_path / "train.jsonl")
    assert max(record.width for record in records) == 128
    assert max(len(record.objects) for record in records) > Sizes().most_objects
    config = parse_run_config(arm_config(ARMS["b"], 1, dense, Path("start"), Path("data"), Path("out")))
    assert (config.rollout_matching.max_new_tokens, config.template.max_pixels) == (256, 128 * 128)


def test_single_variant_is_compared_with_plain_stage_2(small, compared):
    one, trained = small
    have_done(one, compared, Run("b", 1))
    assert len(list(one.run(["b", "names"], [1], seconds=False))) == 2
    assert trained == ["names-1"]
    found = findings.findings(one, draws=20)["steps"]
    assert {arm: sorted(key for key, value in row.items() if key.startswith("against") and value) for arm, row in
            found.items()} == {"b": [], "names": ["against_b"]}  # fmt: skip


def test_chained_arm_starts_from_last_weights_of_first_arm(small):
    one, trained = small
    one.prepare()
    assert len(list(one.run(["e", "e+a"], [1], seconds=False))) == 2
    assert trained == ["e-1", "e+a-1"]
    began = yaml.safe_load((one.folder / "configs" / "e+a-1.yaml").read_text())["model"]["model"]
    assert Path(began) == one.run_folder(Run("e", 1)) / study.EXPORTED
    found = findings.findings(one, draws=20)["steps"]
    assert found["e+a"]["against_e"]["seeds"] == [1]
    rates = [arm_config(ARMS[name], 1, SIZES, Path("a"), Path("b"), Path("c"))["training"]["learning_rate"] for name in
             ("e+e", "e+d")]  # fmt: skip
    assert rates == [SIZES.rate, 3e-5]


def test_best_of_several_answers_is_chosen_per_image_by_class_f1(small, compared):
    one, _ = small
    have_done(one, compared, Run("a", 1))
    right, wrong = (100, 100, 400, 400), (600, 600, 900, 900)
    lines = [
        {"event": "rollout", "part": "held-out", "step": step, "sample_id": f"val.jsonl:{k + 1}", "record_index": k,
         "width": 64, "height": 48, "image": f"val-{k}.png", "finish_reason": "stop", "text": answer_text(name, box)}
        for step, boxes in enumerate([(right, wrong), (wrong, right)])
        for k, (name, box) in enumerate(zip(("one", "two"), boxes, strict=True))
    ]  # fmt: skip
    one.sampled_answers.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = findings.findings(one, draws=20)
    assert found["best"]["figures"]["f1_class@0.5"] == 1
    assert found["sampled"]["figures"]["f1_class@0.5"] == 0.5
    assert any("best of its sampled" in line for line in findings.tables(found))


def answer_text(name: str, box: tuple[int, ...]) -> str:
    """Return an answer with this box alone."""
    return json.dumps({"object_1": {"desc": name, "bbox_2d": [f"<|coord_{one}|>" for one in box]}})


class Constant:
    """Scores that are one value whatever is drawn."""

    def __init__(self, value: float):
        self.images, self._value = range(3), value

    def figures(self, weights):
        return dict.fromkeys(findings.FIGURES, self._value)

    def resample(self, resamples):
        return {name: np.full(len(resamples), self._value) for name in findings.FIGURES}


def test_interval_covers_variation_between_seeds():
    scores = {1: Constant(0.2), 2: Constant(0.4), 3: Constant(0.6)}
    drawn = findings._draws(scores, np.ones((400, 3)), seed=0)
    found = findings._figures(scores, drawn)
    assert found["figures"]["AP"] == pytest.approx(0.4)
    low, high = found["intervals"]["AP"]
    assert 0.15 < low < 0.3 < 0.5 < high < 0.65


def test_difference_is_paired_by_seed_with_t_interval():
    every = {"a": {1: Constant(0.4), 2: Constant(0.4), 3: Constant(0.4)},
             "b": {1: Constant(0.5), 2: Constant(0.6), 3: Constant(0.7)}}  # fmt: skip
    found = findings._against(every, np.ones((50, 3)), ("b", "a"))
    half = 4.302653 * 0.1 / 3**0.5  # Student's t of two degrees of freedom
    assert found["figures"]["AP"] == pytest.approx(0.2)
    assert found["intervals"]["AP"] == pytest.approx([0.2 - half, 0.2 + half], rel=1e-5)
    single = findings._against({arm: {1: scores[1]} for arm, scores in every.items()}, np.ones((50, 3)), ("b", "a"))
    assert single["intervals"]["AP"] == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize("name", ["shapes", "shelves"])
def test_scenes_have_same_shapes_in_every_order(name):
    by_tops, in_rows, unordered = (
        [shapes.crowd(replace(arms.DATA[name], order=order)).scene("train", index).shapes for index in range(20)]
        for order in ("tops", "rows", "random")
    )
    for scenes in (in_rows, unordered):
        assert [sorted(one, key=lambda shape: (shape.box[1], shape.box[0])) for one in scenes] == [*map(list, by_tops)]
        assert sum(one != other for one, other in zip(by_tops, scenes, strict=True)) > 10
    assert min(map(len, by_tops)) >= 4


def test_shelves_are_ordered_left_to_right_despite_differing_tops():
    half, differences = arms.DATA["shelves"].side / 2, set()
    for index in range(50):
        listed = [shape.box for shape in shapes.crowd(arms.DATA["shelves"]).scene("train", index).shapes]
        upper, lower = ([box for box in listed if (box[1] >= half) is below] for below in (False, True))
        assert listed == sorted(upper) + sorted(lower)
        differences |= {box[1] % int(half) for box in listed}
    assert differences == {1, 2, 3, 4}


def test_stage_1_runs_with_both_orders_train_whole_model_on_same_scenes(tmp_path):
    sizes = replace(arms.DATA["shelves"], train=4, held_out=2)
    shapes.write_pictures(tmp_path, sizes)
    listed = {}
    for name in ("tops", "rows"):
        config = parse_run_config(arm_config(ARMS[name], 1, sizes, Path("start"), tmp_path, Path("out")))
        assert (config.tuner.freeze_vit, config.tuner.freeze_aligner) == (False, False)
        listed[name] = load_records(config.custom.train_jsonl)
    assert [one.images for one in listed["tops"]] == [one.images for one in listed["rows"]]
    pairs = [(one.objects, other.objects) for one, other in zip(listed["tops"], listed["rows"], strict=True)]
    assert [set(one) for one, _ in pairs] == [set(other) for _, other in pairs]
    assert any(one != other for one, other in pairs)
    shapes.make_start(study.MODEL, sizes, tmp_path / "start")
    assert (tmp_path / "start" / "model.safetensors").read_bytes() == (study.MODEL / "model.safetensors").read_bytes()


def test_fifth_of_training_shapes_is_unlabelled_but_no_held_out_shape(tmp_path):
    sizes = replace(arms.DATA["unlabelled-shapes"], train=60, held_out=5)
    shapes.write_pictures(tmp_path, sizes)
    listed, held_out = (load_records(tmp_path / f"{name}.jsonl") for name in ("train", "val"))
    there = [len(shapes.crowd(sizes).scene("train", index).shapes) for index in range(60)]
    assert 0.75 < sum(len(record.objects) for record in listed) / sum(there) < 0.85
    expected = [len(shapes.crowd(sizes).scene(shapes.HELD_OUT, index).shapes) for index in range(5)]
    assert [len(record.objects) for record in held_out] == expected


def test_chart_can_be_drawn_from_several_result_files(tmp_path):
    files = sorted((ROOT / "bench" / "results").glob("pays-*shapes.json"))
    assert len(files) == 5
    command.main(["chart", str(tmp_path / "chart.png"), "--arms", "e", "--files", *map(str, files)])
    with Image.open(tmp_path / "chart.png") as picture:
        assert picture.width > picture.height
