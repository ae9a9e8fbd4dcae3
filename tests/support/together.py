"""Which tests one process of pytest-xdist runs: those of a file, and those of all files that share what starts slowly.

With `--dist loadfile` tests are given out by file. A real vLLM of the session, or the fork server of the learners,
starts in each process that asks for it: the files that ask for the same one run in one process, one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler.loadfile import LoadFileScheduling

VLLM = "one vLLM of a kind"
FORKS = "one fork server"
TOGETHER = {
    "tests/integration/test_closing_bias.py": VLLM,
    "tests/integration/test_inspect.py": VLLM,
    "tests/integration/test_merge_at_server.py": VLLM,
    "tests/integration/test_push_log.py": VLLM,
    "tests/integration/test_rollout_identity.py": VLLM,
    "tests/integration/test_server_contract.py": VLLM,
    "tests/integration/test_speculation.py": VLLM,
    "tests/unit/docs/test_python_api.py": FORKS,
    "tests/unit/trainer/figures/test_figures_of_processes.py": FORKS,
    "tests/unit/trainer/grpo/test_set_aside.py": FORKS,
    "tests/unit/trainer/learner/test_learner_faults.py": FORKS,
    "tests/unit/trainer/learner/test_loop_of_two.py": FORKS,
    "tests/unit/trainer/learner/test_non_finite.py": FORKS,
    "tests/unit/trainer/learner/test_whole_step.py": FORKS,
    "tests/unit/trainer/prepare/test_broken_models.py": FORKS,
    "tests/unit/trainer/rollouts/test_colocate.py": FORKS,
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Give out tests by file, files that belong together as one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler.loadfile import LoadFileScheduling

    class Together(LoadFileScheduling):
        """By file, or by what files share."""

        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return TOGETHER.get(file, file)

    return Together(config, log)
