"""The notebooks of examples run from the first cell to the last, and print what is stored in them."""

import io
import json
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.in_turns(3)

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.timeout(1800)  # the second one trains: 40 s on an idle machine, 300 s on a busy one
@pytest.mark.parametrize("name", ["matching", "run-and-report"])
def test_notebook_prints_its_stored_output(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs from run to run, in cells with the tag `varies`, is printed and not compared."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    document = json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))
    cells = [one for one in document["cells"] if one["cell_type"] == "code"]
    assert len(cells) > 5
    names: dict[str, Any] = {}
    for cell in cells:
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec("".join(cell["source"]), names)
        shown = "".join(line for output in cell["outputs"] for line in output.get("text", ()))
        varies = "varies" in cell["metadata"].get("tags", ())
        assert (printed.getvalue() != "") if varies else (printed.getvalue() == shown), "".join(cell["source"])
