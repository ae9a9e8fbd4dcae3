"""The import law, seen from a fresh interpreter: what each room drags in when it is opened."""

import subprocess
import sys

import pytest

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
