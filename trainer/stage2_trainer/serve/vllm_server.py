"""vLLM's API server, whose end is never a success: no Job replaces a pod that ended with exit code 0.

vLLM ends with 0 after SIGTERM (a drained node, Kueue's preemption), and after its engine has died.
"""

import importlib
import runpy
import sys

from stage2_api.errors import EXIT_RETRYABLE
from stage2_api.pod.first_process import is_first_process
from stage2_trainer.process.uncollected import uncollected
from stage2_trainer.sync.vllm.vllm_compat import (
    ENGINE_MODULE,
    ENTRY_MODULE,
    SERVER_MODULE,
    copy_server_for_engine,
    end_at_once_while_loading,
    serve_with,
)

with uncollected():
    if __name__ == "__main__":
        importlib.import_module(ENTRY_MODULE)
    importlib.import_module(ENGINE_MODULE)  # a process that vLLM spawns begins with this module under another name

if __name__ == "__main__":
    from stage2_trainer.serve.bounded_http import BoundedConfig

    serve_with(BoundedConfig)
    copy_server_for_engine()
    if is_first_process():
        end_at_once_while_loading()
    runpy.run_module(SERVER_MODULE, run_name="__main__")
    sys.exit(EXIT_RETRYABLE)
