"""What became of each object, and that the verdicts are those that the figures count."""

import numpy as np
import pytest

from stage2_trainer.scores.image_counts import image_counts, verdicts
from stage2_trainer.scores.scored_image import scored_images
from tests.unit.trainer.scores.scenes import answer, box, line_object, random_scene, record

CAT, DOG = box("cat", 0, 0, 200, 200), box("dog", 500, 500, 900, 900)


def judged(truth, said, **metadata):
    (image,) = scored_images([record(0, truth, **metadata)], [answer(said)])
    return verdicts(image)


def test_each_object_has_its_verdict():
    near, named = box("cat", 2, 0, 200, 202), box("cat", *DOG.bins)
    found = judged([CAT, DOG], [CAT, near, named, box("cat", 0, 800, 100, 900)])
    assert found.answered == ("right", "duplicate", "misnamed", "wrong")
    assert found.found == (True, False)


def test_what_nobody_can_judge_is_not_wrong():
    crowd = line_object(box("cat", 500, 0, 900, 400))
    found = judged([DOG], [box("cat", 600, 100, 700, 200)], crowds=[crowd])
    assert found.answered == ("unjudged",)
    assert found.found == (False, True)


@pytest.mark.parametrize("kind", ["bbox", "poly"])
def test_as_many_are_right_as_the_figures_count(kind):
    images = scored_images(*random_scene(11, kind=kind, crowded=True))
    for image in images:
        counts, found = image_counts(image), verdicts(image)
        free = found.answered.count("unjudged")
        assert found.answered.count("right") == counts.class_right
        assert len(found.answered) - free == counts.class_judged
        assert found.found.count(False) == counts.truth - counts.class_right
    assert np.sum([image.duplicates.sum() for image in images]) > 0
