"""Files of rollouts: which record a line answers, what a learner's own file says, and what is refused."""

import json
import math
import subprocess

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.data.records import RecordRules, load_records
from stage2_trainer.matching import serialize_objects
from stage2_trainer.scores.answer_file import Reading, read_rollouts
from stage2_trainer.scores.answer_scores import AnswerScores, without_nan
from stage2_trainer.scores.rollout_file import SWIFT_LINES, Rollouts, places_in
from stage2_trainer.scores.scored_image import count_coordinates, scored_images
from tests.unit.trainer.scores.scenes import box, write_data, write_rollouts

CAT, DOG = box("cat", 0, 0, 200, 200), box("dog", 500, 500, 900, 900)
TEXT = serialize_objects([CAT, DOG])


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path, [[CAT], [DOG]], sample_ids=["a", "b"])


def read(folder, data, lines, reading=None, **options):
    records = load_records(data, rules=RecordRules(images_exist=False))
    return read_rollouts(
        Rollouts(write_rollouts(folder, lines), **options), records, places_in(data), reading or Reading()
    )


NAMES = (
    {"sample_id": "b"},
    {"sample_id": "data.jsonl:2"},
    {"image": "1.jpg"},
    {"image_id": "b"},
    {"image_id": "1.jpg"},
)


@pytest.mark.parametrize("name", NAMES)
def test_rollout_line_names_its_record(tmp_path, data, name):
    found = read(tmp_path, data, [{**name, "text": TEXT}])
    assert [len(one.objects) for one in found.answers] == [0, 2]
    assert found.missing == ["a"]


@pytest.mark.parametrize("value", [17, "17", 17.0, "17.0"])
def test_sample_id_may_be_number_or_text(tmp_path, value):
    data = write_data(tmp_path, [[CAT], [DOG]], sample_ids=["17", "18"])
    assert read(tmp_path, data, [{"sample_id": value, "text": TEXT}]).missing == ["18"]
    assert read(tmp_path, data, [{"image_id": value, "text": TEXT}]).missing == ["18"]


def test_record_is_found_by_image_path(tmp_path, data):
    found = read(tmp_path, data, [{"image": str(tmp_path / "0.jpg"), "text": TEXT}])
    assert found.missing == ["b"]


def tokens(text, logprob):
    """A text as tokens, each coordinate token with the log-probability that comes next."""
    parts = []
    while text:
        at = text.find("<|coord_")
        if at < 0:
            return [*parts, (text, -9.0)]
        end = text.index("|>", at) + 2
        parts += [(text[:at], -9.0), (text[at:end], next(logprob))]
        text = text[end:]
    return parts


def test_object_score_is_geometric_mean_of_coordinate_token_probabilities(tmp_path, data):
    pairs = tokens(TEXT, iter([-0.1, -0.2, -0.3, -0.4, -1.0, -1.0, -1.0, -1.0]))
    expected = (math.exp(-0.25), math.exp(-1.0))
    chat = {"content": [{"token": token, "logprob": logprob} for token, logprob in pairs]}
    for given in (
        {"logprobs": chat},
        {"logprobs": chat["content"]},
        {"tokens": [token for token, _ in pairs], "token_logprobs": [logprob for _, logprob in pairs]},
    ):
        lines = [{"sample_id": "a", "text": TEXT, **given}, {"sample_id": "b", "text": "{}"}]
        assert read(tmp_path, data, lines).answers[0].scores == pytest.approx(expected)


def test_scores_are_dropped_if_any_answer_has_none(tmp_path, data):
    pairs = [{"token": token, "logprob": logprob} for token, logprob in tokens(TEXT, iter([-1.0] * 8))]
    lines = [{"sample_id": "a", "text": TEXT, "logprobs": pairs}, {"sample_id": "b", "text": TEXT}]
    assert [one.scores for one in read(tmp_path, data, lines).answers] == [None, None]


def learners_line(step, name, text, part="held-out"):
    return {"event": "rollout", "part": part, "step": step, "sample_id": name, "text": text, "finish_reason": "stop"}


def test_one_evaluation_is_read_from_rollout_files_of_all_processes(tmp_path, data):
    lines = [
        learners_line(0, "a", "{}"),
        learners_line(0, "b", "{}"),
        learners_line(7, "a", TEXT, part="train"),
        learners_line(8, "a", "{}"),
        learners_line(8, "a", TEXT),  # once more, by the run that went on from a checkpoint
    ]
    write_rollouts(tmp_path, [learners_line(8, "b", TEXT)], name="rank-1-rollouts.jsonl")
    assert [len(one.objects) for one in read(tmp_path, data, lines).answers] == [2, 2]
    assert [len(one.objects) for one in read(tmp_path, data, lines, step=0).answers] == [0, 0]
    with pytest.raises(ConfigError, match=r"evaluation of step 7; it has those of 0, 8"):
        read(tmp_path, data, lines, step=7)


def test_answers_of_a_grpo_run_are_read(tmp_path, data):
    lines = [{**learners_line(3, name, TEXT), "answer": TEXT} for name in "ab"]
    for line in lines:
        del line["text"]
    assert [len(one.objects) for one in read(tmp_path, data, lines).answers] == [2, 2]


def test_truncated_line_of_learner_rollout_file_is_skipped(tmp_path, data):
    path = write_rollouts(tmp_path, [learners_line(0, "a", TEXT), learners_line(0, "b", TEXT)])
    whole = path.read_text().splitlines()
    path.write_text("\n".join([whole[0], whole[0][:40], whole[1], whole[1][:40]]))
    records = load_records(data, rules=RecordRules(images_exist=False))
    found = read_rollouts(Rollouts(path), records, places_in(data))
    assert [len(one.objects) for one in found.answers] == [2, 2]


def test_step_is_given_after_file_name(tmp_path):
    assert Rollouts.from_name("out/rollouts.jsonl@40").step == 40
    (tmp_path / "odd@40").write_text("")
    assert Rollouts.from_name(str(tmp_path / "odd@40")).step is None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"sample_id": "c", "text": ""}], r"rollouts.jsonl:1 sample_id: 'c'; names none of the records"),
        ([{"text": ""}], r"rollouts.jsonl:1 image: must name a record"),
        ([{"sample_id": "a"}], r"rollouts.jsonl:1 text: must be a string"),
        ([{"sample_id": "a", "text": "{}"}] * 2, r"rollouts.jsonl:2 sample_id: 'a'; is answered by an earlier line"),
        ([{"sample_id": "a", "text": TEXT, "logprobs": []}], "has 0 coordinate tokens, and the text has 8"),
        ([{"sample_id": "a", "text": TEXT, "logprobs": [{"token": "a"}]}], r"rollouts.jsonl:1 logprobs: .*logprob"),
        ([{"sample_id": "a", "text": "{}"}, []], r"rollouts.jsonl:2: \[\]; must be a JSON object"),
        ([], r"rollouts.jsonl: 'none'; must hold answers"),
    ],
)
def test_invalid_line_is_refused_with_its_number(tmp_path, data, lines, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, data, lines)


def test_line_with_invalid_json_is_refused_with_its_number(tmp_path, data):
    write_rollouts(tmp_path, [])
    (tmp_path / "rollouts.jsonl").write_text(json.dumps({"sample_id": "a", "text": "{}"}) + "\n{half")
    records = load_records(data, rules=RecordRules(images_exist=False))
    with pytest.raises(ConfigError, match=r"rollouts.jsonl:2: '\{half'; must be JSON"):
        read_rollouts(Rollouts(tmp_path / "rollouts.jsonl"), records, places_in(data))


def plain(*objects, factors=(1, 1), labels="label"):
    """Objects as Qwen3-VL lists them; factors: to multiply x and y with."""
    boxes = [[round(value * factors[place % 2]) for place, value in enumerate(one.bins)] for one in objects]
    entries = [{"bbox_2d": box, labels: one.desc} for box, one in zip(boxes, objects, strict=True)]
    return f"```json\n{json.dumps(entries, ensure_ascii=False)}\n```"


PIXELS = {"factors": (0.64, 0.48)}  # of images of 640 by 480


@pytest.mark.parametrize("labels", ["label", "desc"])
@pytest.mark.parametrize("form", ["auto", "qwen"])
@pytest.mark.parametrize("unit", [None, "bins"])
def test_qwen_format_answers_score_like_same_answers_in_tokens(tmp_path, data, form, unit, labels):
    answered = [[CAT, DOG], [DOG]]
    figures = []
    for write, reading in ((serialize_objects, None), (lambda one: plain(*one, labels=labels), Reading(form, unit))):
        lines = [{"sample_id": name, "text": write(one)} for name, one in zip("ab", answered, strict=True)]
        found = read(tmp_path, data, lines, reading)
        records = load_records(data, rules=RecordRules(images_exist=False))
        document = AnswerScores.from_images(scored_images(records, found.answers)).document()
        figures.append(without_nan(document))
    assert (found.form, found.unit) == ("qwen", "bins")
    assert figures[0] == figures[1]
    assert figures[0]["precision@0.5"] == pytest.approx(2 / 3)


def test_units_are_recognised_if_only_one_reading_fits(tmp_path, data):
    found = read(tmp_path, data, [{"sample_id": "a", "text": plain(CAT)}, {"sample_id": "b", "text": plain(DOG)}])
    assert found.unit == "bins"
    assert found.notes == (f"plain numbers are bins, because 1 of 2 answers exceeds their image "
                           f"(900 of 640 pixels in {tmp_path}/rollouts.jsonl:2)",)  # fmt: skip
    large = write_data(tmp_path, [[CAT], [DOG]], sample_ids=["a", "b"], images=["2000x3000.jpg", "2000x1500.jpg"])
    texts = [plain(CAT, factors=(2, 3)), plain(DOG, factors=(2, 1.5))]
    found = read(tmp_path, large, [{"sample_id": name, "text": text} for name, text in zip("ab", texts, strict=True)])
    assert found.unit == "pixels"
    assert [one.box for answer in found.answers for one in answer.objects] == [(0, 0, 400, 600), (1000, 750, 800, 600)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (plain(CAT), "all numbers fit both bins .0 to 1000. and the pixels of the images"),
        (
            '[{"bbox_2d": [5, 5, 705, 1101], "label": "a"}]',
            r"neither all bins \(1 of 1 answer exceeds 1000 \(1101 in .*:1\)\) nor all pixels \(.*705 of 640",
        ),
        ('[{"bbox_2d": [5, 5, 704, 528], "label": "a"}]', "all numbers fit both bins"),
        ('[{"bbox_2d": [0, 0.1, 0.5, 1], "label": "a"}]', "all numbers lie between 0 and 1: they are shares"),
    ],
)
def test_ambiguous_units_are_refused(tmp_path, data, text, words):
    lines = [{"sample_id": "a", "text": text}]
    with pytest.raises(ConfigError, match=rf"rollouts.jsonl:1 text: .*{words}.*--answer-units bins"):
        read(tmp_path, data, lines)
    for unit, right in (("bins", 0.64), ("pixels", 1)):
        (one,) = read(tmp_path, data, lines, Reading("auto", unit)).answers[0].objects
        assert one.box[2] == pytest.approx(
            right * (json.loads(text.strip("`json\n"))[0]["bbox_2d"][2] - one.box[0] / right)
        )


def many(numbers, *, stray, count=20):
    """Answers of which one has other numbers than the rest."""
    texts = [json.dumps([{"bbox_2d": [0, 0, *corner], "label": "a"}]) for corner in [*[numbers] * (count - 1), stray]]
    return [{"sample_id": f"s{place}", "text": text} for place, text in enumerate(texts)]


@pytest.fixture
def many_records(tmp_path):
    def write(size):
        return write_data(
            tmp_path, [[CAT]] * 20, sample_ids=[f"s{place}" for place in range(20)], images=[f"{size}.jpg"] * 20
        )

    return write


@pytest.mark.parametrize(
    ("size", "numbers", "stray", "unit"),
    [("640x480", (900, 900), (1200, 1200), "bins"), ("2000x3000", (1800, 2800), (2300, 3400), "pixels")],
)
def test_single_outlier_does_not_decide_unit_and_is_reported(tmp_path, many_records, size, numbers, stray, unit):
    found = read(tmp_path, many_records(size), many(numbers, stray=stray))
    assert found.unit == unit
    (note,) = found.notes
    assert note.startswith(f"plain numbers are {unit}, because 20 of 20 answers exceed ")
    assert "; 1 of 20 answers exceeds " in note
    assert note.endswith(f"in {tmp_path}/rollouts.jsonl:20), and disagree")


def test_single_number_above_bin_range_does_not_make_unit_pixels(tmp_path, many_records):
    data, lines = many_records("2000x3000"), many((900, 900), stray=(1200, 900))
    with pytest.raises(ConfigError, match=r"fit both bins.*but 1 of 20 answers exceeds 1000 \(1200 in .*:20\)"):
        read(tmp_path, data, lines)
    (note,) = read(tmp_path, data, lines, Reading("auto", "bins")).notes
    assert "as --answer-units says; 1 of 20 answers exceeds 1000 (1200 in" in note


def test_normalized_coordinates_are_refused_despite_single_outlier(tmp_path, many_records):
    lines = many((0.5, 0.75), stray=(1200, 900))
    with pytest.raises(ConfigError, match="between 0 and 1 but in 1 answer of 20: they are shares of the image"):
        read(tmp_path, many_records("640x480"), lines)


def test_answers_without_boxes_have_no_unit(tmp_path, data):
    found = read(tmp_path, data, [{"sample_id": name, "text": "```json\n[]\n```"} for name in "ab"])
    assert (found.form, found.unit, found.notes) == ("qwen", None, ("no answer has numbers",))
    assert all(one.parsed for one in found.answers)


def test_format_that_reads_most_answers_is_chosen_and_others_are_reported(tmp_path, data):
    lines = [{"sample_id": "a", "text": TEXT}, {"sample_id": "b", "text": plain(DOG)}]
    found = read(tmp_path, data, lines)
    assert (found.form, [len(one.objects) for one in found.answers]) == ("stage2", [2, 0])
    (note,) = found.notes
    assert note.startswith("1 answer with JSON of another form")
    assert "rollouts.jsonl:2" in note
    by_name = read(tmp_path, data, lines, Reading("qwen"))
    assert [len(one.objects) for one in by_name.answers] == [2, 1], "tokens are read too"


def test_learner_answers_are_read_as_tokens_even_if_all_are_broken(tmp_path, data):
    found = read(tmp_path, data, [learners_line(3, name, "A cat.") for name in "ab"])
    assert (found.form, found.answers[0].parsed) == ("stage2", False)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("There is a cat.", "text without JSON"),
        ('[{"point_2d": [1, 2], "label": "cat"}]', "points .point_2d., where boxes"),
        ('[{"box": [1, 2, 3, 4], "name": "cat"}]', "JSON whose entries have no label with bbox_2d"),
        ("<|box_start|>(1,2),(3,4)<|box_end|>", r"boxes marked by <\|box_start\|>"),
        ("", "no text"),
    ],
)
def test_unreadable_answer_format_is_refused_with_description(tmp_path, data, text, seen):
    lines = [{"sample_id": "a", "text": text}, {"sample_id": "b", "text": ""}]
    with pytest.raises(ConfigError, match=rf"rollouts.jsonl:1 text: .*can be read in no form; seen: {seen}"):
        read(tmp_path, data, lines)
    assert not read(tmp_path, data, lines, Reading("stage2")).answers[0].parsed


PYTHONS_OWN = "[{'bbox_2d': [10, 20, 300, 400], 'label': 'cat'}]"
PYTHONS_TOKENS = TEXT.replace('"', "'")


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (PYTHONS_OWN, "broken JSON"),
        (PYTHONS_TOKENS, "broken JSON"),
        (TEXT.replace('"<|', "<|").replace('|>"', "|>"), "broken JSON"),
        ("```json\n[{bbox_2d: [1, 2, 3, 4], label: cat}]\n```", "broken JSON"),
        (TEXT[:40], "JSON that breaks off"),
    ],
)
def test_file_of_only_broken_answers_is_refused_unless_form_is_given(tmp_path, data, text, seen):
    lines = [{"sample_id": name, "text": text} for name in "ab"]
    with pytest.raises(ConfigError, match=rf"rollouts.jsonl:1 text: .*can be read in no form.*seen: {seen}"):
        read(tmp_path, data, lines)
    for form in ("stage2", "qwen"):
        found = read(tmp_path, data, lines, Reading(form))
        assert [one.parsed for one in found.answers] == [False, False]
        assert (
            f"2 answers of 2 cannot be read, and count as broken; the first, {tmp_path}/rollouts.jsonl:1, has {seen}"
            in found.notes
        )


@pytest.mark.parametrize(
    ("empty", "form"), [("[]", "qwen"), ("{}", "stage2"), ("```json\n[]\n```", "qwen"), (plain(DOG), "qwen")]
)
@pytest.mark.parametrize("broken", [PYTHONS_OWN, PYTHONS_TOKENS, "There is a cat.", '{"error": "out of memory"}'])
def test_broken_answer_among_others_counts_as_broken(tmp_path, data, empty, form, broken):
    lines = [{"sample_id": "a", "text": broken}, {"sample_id": "b", "text": empty}]
    found = read(tmp_path, data, lines)
    assert (found.form, [one.parsed for one in found.answers]) == (form, [False, True])
    assert any(note.startswith("1 answer of 2 cannot be read") for note in found.notes)


def test_lines_of_other_tools_are_refused_with_conversion_command(tmp_path, data):
    swift = [{"images": [{"path": f"/x/{place}.jpg"}], "response": TEXT, "labels": ""} for place in range(2)]
    with pytest.raises(ConfigError, match=r":1 text: .*the line has images, response, labels, as ms-swift writes; jq"):
        read(tmp_path, data, swift)
    for lines in (swift, [{**one, "images": [one["images"][0]["path"]]} for one in swift]):
        path = write_rollouts(tmp_path, lines, name="swift.jsonl")
        rewritten = subprocess.run(["jq", "-c", SWIFT_LINES, path], capture_output=True, check=True, text=True).stdout
        assert read(tmp_path, data, [*map(json.loads, rewritten.splitlines())]).missing == []
    document = {"images": [], "annotations": [], "categories": []}
    with pytest.raises(ConfigError, match=r":1 text: .*as COCO's annotation file"):
        read(tmp_path, data, [document])


def test_image_answered_by_two_lines_is_refused(tmp_path, data):
    with pytest.raises(ConfigError, match=r"rollouts.jsonl:2 image: '0.jpg'; is answered by an earlier line too"):
        read(tmp_path, data, [{"sample_id": "a", "text": plain(DOG)}, {"image": "0.jpg", "text": plain(DOG)}])


def test_coordinate_tokens_in_text_are_counted():
    assert count_coordinates(TEXT) == 8
