"""Every caller that loads a model sets whether its code may run: without a setting, transformers asks a person."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("trainer/stage2_trainer", "report/stage2_report", "cli/stage2_cli")
LOADERS = re.compile(r"(Auto\w+|\w*networks|processors)\.from_(pretrained|config)$")


def calls() -> Iterator[tuple[str, set[str | None]]]:
    """Yield where transformers loads a model, or a part of one, and the arguments that are named there."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and LOADERS.match(ast.unparse(node.func)):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", {one.arg for one in node.keywords}


def test_model_loaders_set_trust_remote_code_explicitly() -> None:
    found = dict(calls())
    assert len(found) > 15
    # None: a mapping of arguments is handed on, as the stub does, whose own mapping says it
    silent = [where for where, named in found.items() if "trust_remote_code" not in named and None not in named]
    assert silent == []
    stub = (ROOT / "trainer/stage2_trainer/serve/stub/model.py").read_text(encoding="utf-8")
    assert 'untrusted = {"trust_remote_code": False}' in stub


def test_trust_remote_code_is_never_hard_coded_true() -> None:
    trusting = [
        line.strip()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if "trust_remote_code=True" in line
    ]
    assert trusting == []
