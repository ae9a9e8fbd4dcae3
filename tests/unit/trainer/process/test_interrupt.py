"""SIGTERM is taken as a request however often and whenever it comes."""

import subprocess
import sys

SIGNALS = 200_000  # of these some come while the one before is being taken
LEARNER = f"""
import os, subprocess, sys
from stage2_trainer.process.interrupt import Interrupt

Interrupt().listen()
shower = "import os, signal, sys\\nfor _ in range({SIGNALS}): os.kill(int(sys.argv[1]), signal.SIGTERM)"
sender = subprocess.Popen([sys.executable, "-c", shower, str(os.getpid())])
while sender.poll() is None:
    pass
print("still answers")
"""


def test_signals_that_come_while_one_is_taken_block_nothing():
    done = subprocess.run([sys.executable, "-c", LEARNER], capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (0, "still answers\n", "")
