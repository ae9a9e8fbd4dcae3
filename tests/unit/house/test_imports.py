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
def test_light_rooms_open_without_anything_heavy(statement: str) -> None:
    assert modules_after(statement) & HEAVY == set()


def test_the_operator_never_loads_the_training_code() -> None:
    loaded = modules_after("import stage2_controller.__main__")
    assert loaded & {"torch", "transformers", "vllm", "stage2_trainer"} == set()


def test_the_learner_loads_neither_a_kubernetes_client_nor_the_servers_vllm() -> None:
    loaded = modules_after("import stage2_trainer.main, stage2_trainer.learner.build, stage2_trainer.grpo.build")
    assert loaded & {"kopf", "kubernetes", "stage2_controller", "vllm"} == set()
