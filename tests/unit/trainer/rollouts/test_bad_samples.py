"""The count of samples that are set aside: each sample once, whatever its id."""

import json

from stage2_trainer.rollouts.bad_samples import FILE, BadSample, BadSamples

BROKEN = ValueError("it is broken")


class Log:
    def __init__(self):
        self.written = []

    def write(self, event, entry):
        self.written.append(entry)


def bad(sample_id, image):
    return BadSample(sample_id, (image,), BROKEN)


def test_bad_samples_with_same_id_count_separately_and_once_across_epochs(tmp_path):
    log = Log()
    samples = BadSamples(5, log)
    samples.note([bad("17", "a.jpg"), bad("17", "b.jpg")], step=1, of=4)
    samples.note([bad("17", "b.jpg")], step=9, of=4)
    assert samples.total == 2
    assert [one["image"] for one in log.written] == ["a.jpg", "b.jpg", "b.jpg"]
    samples.save(tmp_path, before=20)
    assert [one["step"] for one in json.loads((tmp_path / FILE).read_text())] == [1, 1]
    resumed = BadSamples(5, Log())
    resumed.load(tmp_path)
    assert resumed.total == 2


def test_two_bad_held_out_samples_with_same_id_count_as_two():
    found = [bad("17", "a.jpg"), bad("17", "b.jpg")]
    assert BadSamples(5, Log()).note_held_out(found, step=1, of=4) == 2
