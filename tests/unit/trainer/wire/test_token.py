"""The token comes from a file, or the server does not start."""

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.wire.credentials import read_token


def test_the_token_is_the_file_without_its_line_end(tmp_path):
    path = tmp_path / "token"
    path.write_text("secret\n")
    assert read_token({"STAGE2_TOKEN_FILE": str(path)}) == "secret"


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda folder: "", "must name a file"),
        (lambda folder: str(folder / "missing"), "must be a readable file"),
        (lambda folder: str(folder), "must be a readable file"),
        (lambda folder: str((folder / "empty").write_text(" \n") and folder / "empty"), "must not be empty"),
    ],
)
def test_a_missing_token_is_a_configuration_error_with_a_way_out(tmp_path, make, rule):
    with pytest.raises(ConfigError, match=rule) as caught:
        read_token({"STAGE2_TOKEN_FILE": make(tmp_path)})
    assert "openssl rand" in caught.value.problems[0].way_out
