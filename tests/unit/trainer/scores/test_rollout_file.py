"""Files of rollouts: which record a line answers, what a learner's own file says, and what is refused."""

import json
import math

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.data.records import RecordRules, load_records
from stage2_trainer.matching import serialize_objects
from stage2_trainer.scores.rollout_file import Rollouts, places_in, read_rollouts
from stage2_trainer.scores.scored_image import count_coordinates
from tests.unit.trainer.scores.scenes import box, write_data, write_rollouts

CAT, DOG = box("cat", 0, 0, 200, 200), box("dog", 500, 500, 900, 900)
TEXT = serialize_objects([CAT, DOG])


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path, [[CAT], [DOG]], sample_ids=["a", "b"])


def read(folder, data, lines, **options):
    records = load_records(data, rules=RecordRules(images_exist=False))
    return read_rollouts(Rollouts(write_rollouts(folder, lines), **options), records, places_in(data))


@pytest.mark.parametrize("name", [{"sample_id": "b"}, {"sample_id": "data.jsonl:2"}, {"image": "1.jpg"}])
def test_a_line_names_its_record(tmp_path, data, name):
    found = read(tmp_path, data, [{**name, "text": TEXT}])
    assert [len(one.objects) for one in found.answers] == [0, 2]
    assert found.missing == ["a"]


def test_an_image_is_found_by_its_path_too(tmp_path, data):
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


def test_objects_are_scored_by_their_coordinate_tokens(tmp_path, data):
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


def test_scores_are_dropped_where_an_answer_has_none(tmp_path, data):
    pairs = [{"token": token, "logprob": logprob} for token, logprob in tokens(TEXT, iter([-1.0] * 8))]
    lines = [{"sample_id": "a", "text": TEXT, "logprobs": pairs}, {"sample_id": "b", "text": TEXT}]
    assert [one.scores for one in read(tmp_path, data, lines).answers] == [None, None]


def learners_line(step, name, text, part="held-out"):
    return {"event": "rollout", "part": part, "step": step, "sample_id": name, "text": text, "finish_reason": "stop"}


def test_of_a_learners_file_one_evaluation_is_read_from_all_processes(tmp_path, data):
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


def test_a_line_of_a_learners_file_that_a_crash_has_cut_off_is_passed_over(tmp_path, data):
    path = write_rollouts(tmp_path, [learners_line(0, "a", TEXT), learners_line(0, "b", TEXT)])
    whole = path.read_text().splitlines()
    path.write_text("\n".join([whole[0], whole[0][:40], whole[1], whole[1][:40]]))
    records = load_records(data, rules=RecordRules(images_exist=False))
    found = read_rollouts(Rollouts(path), records, places_in(data))
    assert [len(one.objects) for one in found.answers] == [2, 2]


def test_a_step_is_named_behind_the_file(tmp_path):
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
        ([[]], r"rollouts.jsonl:1: \[\]; must be a JSON object"),
        ([], r"rollouts.jsonl: 'none'; must hold answers"),
    ],
)
def test_what_cannot_be_read_is_named_by_its_line(tmp_path, data, lines, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, data, lines)


def test_what_is_no_json_is_named_by_its_line(tmp_path, data):
    write_rollouts(tmp_path, [])
    (tmp_path / "rollouts.jsonl").write_text(json.dumps({"sample_id": "a", "text": "{}"}) + "\n{half")
    records = load_records(data, rules=RecordRules(images_exist=False))
    with pytest.raises(ConfigError, match=r"rollouts.jsonl:2: '\{half'; must be JSON"):
        read_rollouts(Rollouts(tmp_path / "rollouts.jsonl"), records, places_in(data))


def test_coordinates_are_counted_as_they_are_read():
    assert count_coordinates(TEXT) == 8
