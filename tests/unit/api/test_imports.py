"""stage2_api imports only pydantic and the standard library."""

import subprocess
import sys
from pathlib import Path

import stage2_api

PACKAGE = Path(stage2_api.__file__).parent
FILES = [path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py")]
MODULES = sorted(".".join(path.parts) for path in FILES if path.name != "__init__")
# What pydantic itself brings along.
OF_PYDANTIC = {"pydantic", "pydantic_core", "typing_extensions", "typing_inspection", "annotated_types"}


def is_build_data(name: str) -> bool:
    """The standard library's record of how Python was built, which carries the platform in its name."""
    return name.startswith("_sysconfigdata_")


def test_stage2_api_imports_only_pydantic_and_standard_library() -> None:
    # -S: no site-packages hooks, so that only what the contract imports is seen.
    code = (
        "import sys\n"
        f"sys.path += {[path for path in sys.path if path]!r} + [{str(PACKAGE.parent)!r}]\n"
        "before = set(sys.modules)\n"
        f"import {', '.join(MODULES)}\n"
        "print('\\n'.join(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    foreign = {name for name in loaded if name not in sys.stdlib_module_names and not is_build_data(name)}
    foreign -= OF_PYDANTIC
    assert foreign == {"stage2_api"}
