"""The import law, seen from a fresh interpreter: what each room drags in when it is opened."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = [ROOT / name for name in (".", "crds", "trainer", "report", "cli", "hack", "examples")]
HEAVY = {"torch", "transformers", "vllm", "kopf", "kubernetes", "deepspeed", "peft"}


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.splitlines()}


@pytest.mark.parametrize(
    "statement",
    [
        "import stage2_cli.main",
        "import stage2_controller.plan.page",
        "import stage2_trainer.matching",
        "import stage2_trainer.main",
        "import stage2_cli.validate",
        "import stage2_api",
    ],
)
def test_light_packages_import_nothing_heavy(statement: str) -> None:
    assert modules_after(statement) & HEAVY == set()


def test_controller_never_imports_training_code() -> None:
    loaded = modules_after("import stage2_controller.__main__")
    assert loaded & {"torch", "transformers", "vllm", "stage2_trainer"} == set()


def test_learner_imports_neither_kubernetes_client_nor_vllm() -> None:
    loaded = modules_after("import stage2_trainer.main, stage2_trainer.learner.build, stage2_trainer.grpo.build")
    assert loaded & {"kopf", "kubernetes", "stage2_controller", "vllm"} == set()


WITHOUT_DEEPSPEED = """
import sys
from importlib import util
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "deepspeed":
            raise ModuleNotFoundError(name, name=name)

find_spec = util.find_spec
util.find_spec = lambda name, *package: None if name == "deepspeed" else find_spec(name, *package)
sys.meta_path.insert(0, Missing())
"""


def test_learner_imports_without_deepspeed() -> None:
    """The CPU build of the trainer's image has none, and accelerate then offers less."""
    learner = "import stage2_trainer.main, stage2_trainer.learner.build, stage2_trainer.grpo.build"
    loaded = modules_after(
        f"{WITHOUT_DEEPSPEED}{learner}\nimport accelerate.utils\nassert not hasattr(accelerate.utils, 'DummyOptim')"
    )
    assert "deepspeed" not in loaded


@cache
def imported(file: Path) -> frozenset[str]:
    """Return what a file imports while it is imported itself: modules, and names that may be modules."""
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
    return frozenset(found)


@cache
def sources(module: str) -> tuple[Path, ...]:
    """Return the file of one of our own modules; none of any other module."""
    paths = [folder.joinpath(*module.split(".")) for folder in FOLDERS]
    return tuple(file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file())


def needs_vllm(file: Path) -> bool:
    """Whether a file cannot be imported where there is no vLLM."""
    seen, left = set[Path](), {file}
    while left:
        seen |= left
        modules = {module for one in left for module in imported(one)}
        if any(module.partition(".")[0] == "vllm" for module in modules):
            return True
        left = {source for module in modules for source in sources(module)} - seen
    return False


def test_unit_tests_can_be_collected_without_vllm() -> None:
    """The weekly run with the newest PyTorch has no vLLM, which asks for an older one."""
    tests = (ROOT / "tests" / "unit").rglob("*.py")
    assert [str(test.relative_to(ROOT)) for test in tests if needs_vllm(test)] == []
