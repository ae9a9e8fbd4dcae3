"""All commands print by `stage2_report.terminal` and `stage2_api.log_lines`, which escape what a terminal obeys."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("cli/stage2_cli", "report/stage2_report", "trainer/stage2_trainer", "controller/stage2_controller")
PRINTERS = {"print", "Console", "sys.stdout.write", "sys.stderr.write", "Text.from_markup", "Text.from_ansi"}
ALLOWED = {
    "report/stage2_report/terminal.py: print(json_text(value, indent=indent))",
    "trainer/stage2_trainer/telemetry/run_log.py: sys.stdout.write(json_text(document) + '\\n')",
    # YAML, whose own escapes the renderer asks for
    "cli/stage2_cli/main.py: sys.stdout.write(text)",
}


def printing_calls() -> set[str]:
    return {
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in PRINTERS
    }


def test_only_listed_modules_print_to_terminal() -> None:
    assert printing_calls() == ALLOWED
