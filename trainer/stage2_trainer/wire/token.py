"""The bearer token that guards a server's routes: read from a file, never from arguments or the environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stage2_api.errors import ConfigError, Problem
from stage2_api.pod.environment import TOKEN_FILE_VARIABLE

WAY_OUT = (
    "write a token to a file that only you can read (`openssl rand -hex 32 > token; chmod 600 token`) "
    f"and set {TOKEN_FILE_VARIABLE} to its path for the servers and the learner"
)


def read_token(environment: Mapping[str, str]) -> str:
    """Return the token in the file that STAGE2_TOKEN_FILE names.

    Raises:
        ConfigError: the variable is not set, the file cannot be read, or it is empty.
    """
    path = environment.get(TOKEN_FILE_VARIABLE, "")
    if not path:
        raise _problem("", "must name a file that holds the bearer token")
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise _problem(path, f"must be a readable file ({error.strerror})") from error
    if not token:
        raise _problem(path, "must not be empty")
    return token


def _problem(value: str, rule: str) -> ConfigError:
    return ConfigError((Problem(path=TOKEN_FILE_VARIABLE, value=value, rule=rule, way_out=WAY_OUT),))
