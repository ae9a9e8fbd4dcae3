"""The GPUs that processes of a local run get: those that CUDA_VISIBLE_DEVICES leaves to this one, else by number."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.serve.cuda_driver import VISIBLE_VARIABLE, visible_names


def require(count: int, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError where CUDA_VISIBLE_DEVICES names some GPUs, and fewer than a job asks for."""
    named = visible_names(environment)
    if named and len(named) < count:
        rule, way_out = f"must name as many GPUs as the job asks for, which is {count}", "name more, or unset it"
        raise ConfigError([Problem(VISIBLE_VARIABLE, ",".join(named), rule, way_out)])


def devices(places: Iterable[int], environment: Mapping[str, str] = os.environ) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for a process that gets the GPUs at these places, from 0."""
    named = visible_names(environment)
    return ",".join(str(place) if named is None else named[place] for place in places) if named != [] else ""
