"""tests/support/README.md says of each module in its folder what it is for, in the module's own words."""

import ast
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "tests" / "support"


def purpose(module: Path) -> str:
    return " ".join((ast.get_docstring(ast.parse(module.read_text())) or "").split("\n\n")[0].split())


def test_readme_lists_each_module_with_the_first_line_of_its_docstring() -> None:
    rows = [f"| `{module.name}` | {purpose(module)} |" for module in sorted(FOLDER.glob("*.py"))]
    readme = (FOLDER / "README.md").read_text()
    assert [line for line in readme.splitlines() if line.startswith("| `")] == rows
