"""Objects of the matching tests: a box and a polygon from their bins."""

from stage2_trainer.matching import GTObject


def box(*bins: int) -> GTObject:
    return GTObject("x", "bbox", bins)


def poly(*bins: int) -> GTObject:
    return GTObject("x", "poly", bins)
