"""`stage2 evaluate`: figures of one or several rollout files, and invalid checkpoints."""

import json
import re
from math import nan
from pathlib import Path

import pytest
from PIL import Image

from stage2_api.errors import ConfigError
from stage2_cli.evaluate import evaluate_checkpoints, evaluate_rollouts, require_one_kind
from stage2_cli.length_curve import Lengths
from stage2_cli.requests import EvaluationRequest
from stage2_trainer.data.object_order import ObjectOrder
from stage2_trainer.matching import serialize_objects
from stage2_trainer.scores.advice import advice, summary
from tests.unit.api.grpo_configs import GOOD
from tests.unit.api.wrong_jobs import merge_patch
from tests.unit.cli.test_light_start import COLOCATED, HEAVY, MATCHING, run_over, stage2
from tests.unit.trainer.scores.scenes import box, record, write_data, write_rollouts

pytestmark = pytest.mark.in_turns(3, apart=True)

RECORD = {"images": ["data:image/png;base64,AAAA"], "width": 8, "height": 9, "objects": []}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ((None, None, None, None), "stage2 evaluate: needs either"),
        (("c.yaml", None, None, None), "CONFIG"),
        ((None, None, ["a"], None), "--rollouts"),
        (("c.yaml", ["d"], ["a"], None), "CONFIG --checkpoint --rollouts"),
    ],
)
def test_exactly_one_source_of_answers_is_required(given, shown):
    with pytest.raises(ConfigError, match=shown):
        require_one_kind(EvaluationRequest(*given))


@pytest.mark.parametrize(("run", "shown"), [(MATCHING, "custom.val_jsonl"), (merge_patch(GOOD, {}), "rlhf")])
def test_run_without_held_out_records_is_refused(tmp_path, run, shown):
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text("{}")
    config = run_over(tmp_path, run, RECORD)
    with pytest.raises(ConfigError, match=shown):
        evaluate_checkpoints(tmp_path / config, EvaluationRequest(checkpoint=[checkpoint]))


def test_invalid_checkpoint_is_refused_before_torch_is_imported(tmp_path):
    config = run_over(tmp_path, merge_patch(COLOCATED, {"custom": {"val_jsonl": "train.jsonl"}}), RECORD)
    done, loaded = stage2(tmp_path, "evaluate", config, "--checkpoint", "lost", "--json")
    assert done.returncode == 64
    assert "--checkpoint: 'lost'" in done.stderr
    assert "lost/trainer_state.json: No such file or directory\n" in done.stderr
    assert loaded & HEAVY == set()


OF_TRUTH = {"recall@0.5": nan, "objects_per_truth": nan, "desc_exact": nan}

CAT, DOG = box("cat", 0, 0, 200, 200), box("dog", 500, 500, 900, 900)


@pytest.fixture
def files(tmp_path):
    write_data(tmp_path, [[CAT], [DOG], [CAT, DOG]])
    good = [
        {"image": f"{place}.jpg", "text": serialize_objects(one)} for place, one in enumerate([[CAT], [DOG], [CAT]])
    ]
    write_rollouts(tmp_path, good, name="good.jsonl")
    write_rollouts(tmp_path, [{**one, "text": "{}"} for one in good[:2]], name="bad.jsonl")
    return tmp_path


def test_answers_are_scored_without_access_to_images(files, monkeypatch):
    monkeypatch.delenv("ROOT_IMAGE_DIR", raising=False)  # of all tests
    lines = (files / "data.jsonl").read_text().splitlines()
    moved = [json.loads(line) | {"images": [f"/elsewhere/{place}.jpg"]} for place, line in enumerate(lines)]
    (files / "data.jsonl").write_text("\n".join(map(json.dumps, moved)))
    (files / "good.jsonl").write_text((files / "good.jsonl").read_text().replace('"image": "', '"image": "/elsewhere/'))
    assert evaluate_rollouts(EvaluationRequest(rollouts=[str(files / "good.jsonl")], records=files / "data.jsonl")) == 0


def test_single_rollout_file_is_scored_without_heavy_imports(files):
    done, loaded = stage2(files, "evaluate", "--rollouts", "good.jsonl", "--records", "data.jsonl", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("AP", "AP50", "AP75", "AR", "f1@0.5", "f1_class@0.5", "parse_rate", "truncated_rate", "misses"):
        assert found[name] is not None, name
    assert found["f1@0.5"] == pytest.approx(6 / 7)
    low, high = found["intervals"]["f1@0.5"]
    assert low < found["f1@0.5"] < high
    assert found["scores_from"] == "equal"
    assert loaded & HEAVY == set()


def test_several_rollout_files_are_compared_side_by_side(files):
    words = ("evaluate", "--rollouts", "good.jsonl", "--rollouts", "bad.jsonl", "--records", "data.jsonl")
    refused, _ = stage2(files, *words)
    said = " ".join(refused.stderr.split())
    assert (refused.returncode, "has no answer to 1 of 3 records" in said) == (64, True), said
    words = (*words, "--missing", "count-as-empty")
    done, _ = stage2(files, *words, "--json")
    found = json.loads(done.stdout)
    assert [one["rollouts"] for one in found["files"]] == ["good.jsonl", "bad.jsonl"]
    (row,) = found["differences"]
    assert (row["of"], row["minus"], row["recall@0.5"]["difference"]) == ("bad.jsonl", "good.jsonl", -0.75)
    shown, _ = stage2(files, *words)
    assert "2 - 1" in shown.stdout
    assert "1 record without an answer, counted as empty" in shown.stdout
    turned, _ = stage2(files, *words, "--json", "--against", "2")
    (row,) = json.loads(turned.stdout)["differences"]
    assert (row["of"], row["minus"], row["recall@0.5"]["difference"]) == ("good.jsonl", "bad.jsonl", 0.75)
    refused, _ = stage2(files, *words, "--against", "3")
    assert (refused.returncode, "--against: 3" in refused.stderr) == (64, True)
    only, _ = stage2(files, *words, "--json", "--answered-only", "--resamples", "0")
    assert json.loads(only.stdout)["files"][0]["images"] == 2
    assert "too high on average" in shown.stdout
    assert "mistakes: 100% of the true objects are missed" in shown.stdout
    assert "advice: continue stage 1, or raise max_new_tokens" in shown.stdout


def qwen_text(*objects):
    entries = [{"bbox_2d": [*one.bins], "label": one.desc} for one in objects]
    return f"Here they are:\n```json\n{json.dumps(entries)}\n```"


@pytest.fixture
def foreign(files):
    """The files, with perfect answers in Qwen3-VL's form, and with COCO's results."""
    truths = [[CAT], [DOG], [CAT, DOG]]
    texts = [{"image": f"{place}.jpg", "text": qwen_text(*one)} for place, one in enumerate(truths)]
    write_rollouts(files, texts, name="qwen.jsonl")
    detection = {"image_id": 0, "category_id": 2, "bbox": [0, 0, 128, 96], "score": 0.9}
    (files / "results.json").write_text(json.dumps([detection, {**detection, "bbox": [1, 1, 9, 9], "score": 0.1}]))
    names = {"categories": [{"id": 2, "name": "cat"}], "images": [{"id": 0, "file_name": "train/0.jpg"}]}
    (files / "names.json").write_text(json.dumps(names))
    return files


def evaluated(folder, *words):
    """What the command prints about these files, in one line."""
    done, _ = stage2(folder, "evaluate", "--records", "data.jsonl", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_stock_model_answers_serve_as_baseline(foreign):
    found = json.loads(evaluated(foreign, "--rollouts", "qwen.jsonl", "--json"))
    assert (found["answers"], found["answer_units"]) == ("qwen", "bins")
    assert (found["f1_class@0.5"], found["AP"], found["parse_rate"], found["truncated_rate"]) == (1, 1, 1, 0)
    shown = evaluated(foreign, "--rollouts", "qwen.jsonl", "--rollouts", "good.jsonl")
    assert "1 (qwen)" in shown
    assert "1: answers read as JSON with plain numbers, Qwen3-VL's form" in shown
    assert (
        "1: plain numbers are bins, because 2 of 3 answers exceed their image (900 of 640 pixels in qwen.jsonl:2)"
        in shown
    )
    assert "2: answers read as stage2's, with coordinate tokens" in shown
    alone = evaluated(foreign, "--rollouts", "qwen.jsonl", "--resamples", "0")
    assert "qwen.jsonl (qwen)" in alone
    assert "advice" not in alone, "it is no model in training"


def test_plain_numbers_of_unclear_unit_require_answer_units_option(foreign):
    texts = [{"image": f"{place}.jpg", "text": qwen_text(CAT)} for place in range(3)]
    write_rollouts(foreign, texts, name="few.jsonl")
    refused, _ = stage2(foreign, "evaluate", "--records", "data.jsonl", "--rollouts", "few.jsonl")
    assert (refused.returncode, "--answer-units bins (0 to 1000" in " ".join(refused.stderr.split())) == (64, True)
    words = ("--rollouts", "few.jsonl", "--resamples", "0", "--answer-units")
    assert "plain numbers are pixels, as --answer-units says" in evaluated(foreign, *words, "pixels")
    found = json.loads(evaluated(foreign, *words, "bins", "--json"))
    assert (found["answer_units"], found["recall_class@0.5"]) == ("bins", 0.5)


def test_coco_results_have_scores_but_no_text_figures(foreign):
    words = ("--rollouts", "results.json", "--annotations", "names.json")
    found = json.loads(evaluated(foreign, *words, "--json"))
    assert (found["answers"], found["answer_units"], found["scores_from"]) == ("coco", "pixels", "results")
    assert (found["precision@0.5"], found["recall@0.5"]) == (0.5, 0.25)
    assert found["by_class"]["cat"]["AP"] == pytest.approx(51 / 101)
    text = {"parse_rate", "truncated_rate", "loop_rate"}
    assert {found[name] for name in text} == {None}
    assert not text & found["intervals"].keys()
    shown = evaluated(foreign, *words)
    assert "results.json (coco)" in shown
    assert "objects ranked by the scores of the results" in shown
    assert "2 records without an answer, counted as empty" in shown
    assert "broken" not in shown
    both = json.loads(evaluated(foreign, "--rollouts", "good.jsonl", *words, "--json"))
    assert not text & both["differences"][0].keys()
    assert "recall@0.5" in both["differences"][0]


def test_answers_read_in_wrong_format_are_reported_as_broken(foreign):
    shown = evaluated(foreign, "--rollouts", "qwen.jsonl", "--answers", "stage2", "--resamples", "0")
    assert "3 answers with JSON of another form, such as that of qwen.jsonl:1, count as broken" in shown


def test_rollouts_of_run_are_scored_only_over_its_own_records(files):
    lines = [{"sample_id": f"data.jsonl:{place}", "text": serialize_objects([CAT])} for place in (1, 3)]
    held_out = {"event": "rollout", "part": "held-out", "step": 4}
    write_rollouts(files, [held_out | one for one in lines], name="rollouts.jsonl")
    done, _ = stage2(files, "evaluate", "--rollouts", "rollouts.jsonl", "--records", "data.jsonl", "--json")
    found = json.loads(done.stdout)
    assert (found["images"], found["objects"], found["misses"]) == (2, 3, 1)


def figures(**changed):
    found = {"recall@0.5": 0.9, "duplicate_rate": 0.1, "desc_exact": 0.8, "parse_rate": 1.0, "f1@0.5": 0.8}
    found["objects_per_truth"] = 1.0
    return {**found, "without_duplicates": {"f1@0.5": 0.8}, **changed}


def order(*, missing):
    found = ObjectOrder()
    boxes = [box("cat", 0, 10 * row, 9, 10 * row + 9) for row in range(60)]
    found.add(record(0, boxes))
    found.add(record(1, boxes[::-1] if missing else boxes))
    return found


@pytest.mark.parametrize(
    ("found", "missing", "expected"),
    [
        (figures(parse_rate=0.9), True, ["continue stage 1, or raise"]),
        (figures(without_duplicates={"f1@0.5": 0.85}), True, ["remove duplicates", "sort the objects"]),
        (figures(), True, ["sort the objects"]),
        (
            figures(**{"f1@0.5": 0.3}, without_duplicates={"f1@0.5": 0.3}),
            True,
            ["sort the objects", "continue stage 1 before"],
        ),
        (figures(), False, ["continue stage 1 while"]),
        (figures(objects_per_truth=75.0), False, ["the answers run away, with 75.0 objects for each true one"]),
        (figures(objects_per_truth=75.0, parse_rate=0.2), True, ["the answers run away"]),
        (figures(**OF_TRUTH, **{"f1@0.5": nan}), False, ["add records with objects"]),
        (figures(**OF_TRUTH, parse_rate=0.5), False, ["continue stage 1, or raise"]),
    ],
)
def test_advice_follows_from_mistakes(found, missing, expected):
    given = list(advice(found, order(missing=missing)))
    assert [line[: len(start)] for line, start in zip(given, expected, strict=True)] == expected


@pytest.mark.parametrize(
    ("changed", "left_out"),
    [
        ({}, ()),
        ({"recall@0.5": 0.0, "desc_exact": nan}, ("in place",)),
        ({"duplicate_rate": nan, "desc_exact": nan}, ("answered ones", "in place")),
        ({"recall@0.5": nan, "desc_exact": nan}, ("true objects", "in place")),
    ],
    ids=["all", "nothing in place", "nothing answered", "nothing true"],
)
def test_undefined_shares_are_left_out_of_mistakes(changed, left_out):
    sentence = summary(figures(**changed))
    every = ("true objects", "answered ones", "in place", "of the answers are broken")
    assert [text for text in every if text not in sentence] == [*left_out]
    assert "nan" not in sentence


def test_empty_answers_to_images_without_objects_have_null_figures_and_no_mistakes(tmp_path):
    write_data(tmp_path, [[], []])
    write_rollouts(tmp_path, [{"image": f"{place}.jpg", "text": "{}"} for place in range(2)], name="empty.jsonl")
    words = ("evaluate", "--rollouts", "empty.jsonl", "--records", "data.jsonl")
    done, _ = stage2(tmp_path, *words, "--json")
    found = json.loads(done.stdout)
    nothing = ("f1@0.5", "recall@0.5", "precision@0.5", "f1_class@0.5", "desc_exact", "objects_per_truth", "AP")
    assert [name for name in nothing if found[name] is not None or name in found["intervals"]] == []
    assert (found["parse_rate"], found["misses"], found["duplicates"]) == (1.0, 0, 0)
    shown, _ = stage2(tmp_path, *words)
    assert "mistakes: 0% of the answers are broken" in shown.stdout
    assert "advice: add records with objects" in shown.stdout
    assert "worst image: data.jsonl:1, F1 - with class" in shown.stdout


@pytest.fixture
def lengthened(files):
    """Answers under three biases: an object is missing, all is right, and there is a wrong object for each true one."""
    wrong = [box("cow", 800, 0, 999, 90), box("cow", 0, 800, 90, 999)]
    sets = {
        "0": [[CAT], [DOG], [CAT]],
        "1": [[CAT], [DOG], [CAT, DOG]],
        "2": [[CAT, wrong[0]], [DOG, wrong[0]], [CAT, DOG, *wrong]],
    }
    for name, answers in sets.items():
        rows = [{"image": f"{place}.jpg", "text": serialize_objects(one)} for place, one in enumerate(answers)]
        write_rollouts(files, rows, name=f"{name}.jsonl")
    return files


def curve(folder, capsys, lengths, **options):
    rollouts = [str(folder / f"{nats:g}.jsonl") for nats in lengths.nats]
    labels = lengths.labels([folder / "checkpoint-2"])
    options = {"resamples": 0, **options}
    request = EvaluationRequest(rollouts=rollouts, records=folder / "data.jsonl", **options)
    assert evaluate_rollouts(request, lengths, labels=labels) == 0
    return capsys.readouterr().out


def test_best_bias_has_highest_f1_or_requested_object_count(lengthened, capsys):
    found = json.loads(curve(lengthened, capsys, Lengths((0.0, 1.0, 2.0)), as_json=True))
    shown = [
        [one[name] for name in ("longer", "objects_per_image", "precision@0.5", "recall@0.5", "f1_class@0.5")]
        for one in found["files"]
    ]
    assert shown == [[0, 1, 1, 3 / 4, 6 / 7], [1, 4 / 3, 1, 1, 1], [2, 8 / 3, 1 / 2, 1, 2 / 3]]
    assert found["best"] == 1.0
    wanted = json.loads(curve(lengthened, capsys, Lengths((0.0, 1.0, 2.0), 2.5), as_json=True))
    assert wanted["best"] == 2.0


def test_best_bias_is_reported_with_interval_and_export_command(lengthened, capsys):
    picture = lengthened / "curve.png"
    text = curve(lengthened, capsys, Lengths((0.0, 1.0, 2.0), None, picture), resamples=50)
    assert "best: --longer 1, the highest F1; F1 1.000 [1.000, 1.000]" in text
    assert re.search(r"  \+0\.143 \[\S+, \S+\] against --longer 0\n", text)
    assert f"stage2 export {lengthened / 'checkpoint-2'} --output DIR --longer 1\n" in text
    assert "largest value" not in text
    assert Image.open(picture).width > 500
    text = curve(lengthened, capsys, Lengths((0.0, 2.0), 9.0))
    assert "best: --longer 2, the nearest to 9 objects per image; F1 0.667\n" in text
    assert "it is the largest value: try larger ones, too" in text


def test_no_best_bias_is_reported_without_true_or_answered_objects(tmp_path, capsys):
    write_data(tmp_path, [[], []])
    rows = [{"image": f"{place}.jpg", "text": "{}"} for place in range(2)]
    for name in ("0", "1"):
        write_rollouts(tmp_path, rows, name=f"{name}.jsonl")
    assert "no best value: there is neither a true object nor an answered one" in curve(
        tmp_path, capsys, Lengths((0.0, 1.0)), resamples=20
    )
    found = json.loads(curve(tmp_path, capsys, Lengths((0.0, 1.0)), as_json=True))
    assert (found["best"], found["files"][0]["recall@0.5"]) == (None, None)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("0,x", None, None), "--longer: '0,x'; must be numbers with commas between them"),
        (("0,-1", None, None), "must be different numbers from 0 to 100"),
        (("1,1", None, None), "must be different numbers from 0 to 100"),
        (("nan", None, None), "must be different numbers from 0 to 100"),
        (("1", 3.0, None), "--objects-per-image: '3.0'; needs several values of --longer"),
        ((None, None, Path("new.png")), "--picture: 'new.png'; needs several values of --longer"),
    ],
)
def test_invalid_bias_curve_options_are_refused(words, shown):
    with pytest.raises(ConfigError, match=re.escape(shown)):
        Lengths.from_options(*words)


def test_several_biases_require_single_checkpoint():
    lengths = Lengths.from_options("0,1.5", None, None)
    with pytest.raises(ConfigError, match="several values of --longer are for one checkpoint"):
        lengths.require_one([Path("a"), Path("b")])
    assert lengths.labels([Path("a")]) == ["a", "a --longer 1.5"]


def test_bias_option_is_refused_for_saved_answers(files):
    words = ("evaluate", "--rollouts", "good.jsonl", "--records", "data.jsonl", "--longer", "1")
    done, _ = stage2(files, *words)
    said = " ".join(done.stderr.split())
    assert (done.returncode, "a checkpoint must answer under it" in said) == (64, True), said


@pytest.mark.parametrize("drafts", ["ngram", "auto"])
def test_bias_option_is_refused_with_speculative_servers(tmp_path, drafts):
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text("{}")
    drafting = {"extra": {"rollout_matching": {"vllm": {"speculation": drafts}}}, "val_jsonl": "train.jsonl"}
    config = run_over(tmp_path, merge_patch(MATCHING, {"custom": drafting}), RECORD)
    request = EvaluationRequest(checkpoint=[checkpoint])
    with pytest.raises(ConfigError, match=rf"speculation: '{drafts}'; must be none for --longer"):
        evaluate_checkpoints(tmp_path / config, request, Lengths((1.0,)))
