"""Objects of the matching tests: by their bins, and at random for property tests."""

from hypothesis import strategies as st

from stage2_trainer.matching.ground_truth import GTObject
from tests.unit.trainer.matching.vocabularies import aligned_vocab, fused_vocab


def box(*bins: int) -> GTObject:
    return GTObject("x", "bbox", bins)


def poly(*bins: int) -> GTObject:
    return GTObject("x", "poly", bins)


coordinate = st.integers(0, 999)
# Special tokens are never part of a description: a tokenizer would read them as such.
descs = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(lambda text: text.strip())
boxes = st.builds(lambda desc, bins: GTObject(desc, "bbox", bins), descs, st.tuples(*[coordinate] * 4))
polygons = st.builds(
    lambda desc, points: GTObject(desc, "poly", tuple(value for point in points for value in point)),
    descs,
    st.lists(st.tuples(coordinate, coordinate), min_size=3, max_size=6),
)
objects = st.lists(boxes | polygons, max_size=5)
vocabs = st.sampled_from([aligned_vocab(), fused_vocab()])
