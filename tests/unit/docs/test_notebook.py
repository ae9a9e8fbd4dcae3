"""The notebook of examples runs from its first cell to its last, and prints what is stored in it."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[3] / "examples" / "matching.ipynb"


def test_the_notebook_prints_what_it_shows() -> None:
    cells = [one for one in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if one["cell_type"] == "code"]
    assert len(cells) > 5
    names: dict[str, Any] = {}
    for cell in cells:
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec("".join(cell["source"]), names)
        shown = "".join(line for output in cell["outputs"] for line in output.get("text", ()))
        assert printed.getvalue() == shown, "".join(cell["source"])
