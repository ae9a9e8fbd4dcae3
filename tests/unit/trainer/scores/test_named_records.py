"""Which record a line of a file of rollouts names, and which files are read."""

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.scores.scored_image import normalised
from tests.unit.trainer.scores.scenes import write_data, write_rollouts
from tests.unit.trainer.scores.test_rollout_file import CAT, DOG, TEXT, learners_line, read


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path, [[CAT], [DOG]], sample_ids=["a", "b"])


def test_record_is_found_by_image_name_in_any_folder(tmp_path, data):
    assert read(tmp_path, data, [{"image": "/elsewhere/1.jpg", "text": TEXT}]).missing == ["a"]


def test_image_shared_by_several_records_is_refused(tmp_path):
    data = write_data(tmp_path, [[CAT], [DOG]], sample_ids=["a", "b"], images=["9x9.jpg", "9x9.jpg"])
    with pytest.raises(ConfigError, match=r"rollouts.jsonl:1 image: '9x9.jpg'; names several records.*FILE:LINE"):
        read(tmp_path, data, [{"image": "9x9.jpg", "text": TEXT}])
    assert read(tmp_path, data, [{"sample_id": "data.jsonl:2", "text": TEXT}]).missing == ["a"]


def test_learner_rollout_file_is_read_with_files_of_other_processes(tmp_path, data):
    for process, name in ((2, "a"), (3, "b")):
        write_rollouts(tmp_path, [learners_line(8, name, TEXT)], name=f"rank-{process}-rollouts.jsonl")
    found = read(tmp_path, data, [learners_line(8, "a", "{}")])
    assert [len(one.objects) for one in found.answers] == [2, 2]


def test_logprobs_for_more_coordinates_than_text_has_are_refused(tmp_path, data):
    logprobs = [{"token": f"<|coord_{place}|>", "logprob": -1.0} for place in range(9)]
    with pytest.raises(ConfigError, match="has 9 coordinate tokens, and the text has 8"):
        read(tmp_path, data, [{"sample_id": "a", "text": TEXT, "logprobs": logprobs}])


@pytest.mark.parametrize("name", ["traffic_light", "Traffic  light!", "TRAFFIC-LIGHT"])
def test_normalised_name_ignores_case_and_punctuation(name):
    assert normalised(name) == "traffic light"
