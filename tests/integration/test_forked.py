"""A forked process is what its command line would have started: output, exit code, signals, environment, threads."""

import os
import signal
import subprocess
import sys

import pytest

from tests.support import forked

PROGRAMS = {
    "an exit code": "import sys; print('out'); print('error', file=sys.stderr); sys.exit(7)",
    "words at the end": "import sys; sys.exit('no')",
    "an error": "raise ValueError('wrong')",
    "no word": "import os; print('before the end', flush=True); os._exit(3)",
    "exit handlers": "import atexit, threading; atexit.register(print, 'at the end'); "
    "threading.Timer(0.1, print, ['a thread']).start()",
    "arguments": "import sys; print(sys.argv)",
    "its environment": "import os; print(os.environ['SAID'], 'HOME' in os.environ)",
    "its files": "import os; print(sorted(os.listdir('/proc/self/fd'))[:3], os.read(0, 1))",
    "its signals": "import signal; print([str(signal.getsignal(n)) for n in (2, 13, 15, 17, 25)][1:])",
    "its folder": "import os; print(os.getcwd())",
    "its threads": "import torch; print(torch.get_num_threads())",
}


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_forked_process_behaves_like_command_line(program):
    command = [sys.executable, "-c", program, "one", "two"]
    environment = {"SAID": "yes", "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    copy = forked.run(command, imports=["torch"], env=environment)
    true = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=environment, cwd=forked.ROOT
    )
    assert (copy.returncode, copy.stdout) == (true.returncode, true.stdout)
    assert copy.stderr.splitlines()[-1:] == true.stderr.splitlines()[-1:]


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGTERM])
def test_signal_to_process_group_ends_forked_process(blow):
    process = forked.start([sys.executable, "-c", "import time; time.sleep(300)"], imports=[])
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)  # by the clock: it sleeps for minutes
    assert os.getsid(process.pid) == process.pid
    os.killpg(process.pid, blow)
    assert process.wait() == process.returncode == -blow


def test_shell_scripts_run_forked_commands(tmp_path):
    environment = {**os.environ, "PATH": f"{forked.command_folder(tmp_path, imports=[])}:{os.environ['PATH']}"}
    script = f"cd {tmp_path} && echo '{{}}' > job.yaml && stage2 validate job.yaml < /dev/null; echo $? && which stage2"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines() == [str(os.EX_USAGE), str(tmp_path / "stage2")]
    assert "job.yaml" in done.stderr


def test_forked_processes_share_no_state():
    command = [sys.executable, "-c", "import os, json; print(os.environ.pop('ONCE', None)); json.seen = True"]
    for word in ("a", "b"):
        assert forked.run(command, imports=[], env={**os.environ, "ONCE": word}).stdout == f"{word}\n"
    assert (
        forked.run([sys.executable, "-c", "import json; print(hasattr(json, 'seen'))"], imports=[]).stdout == "False\n"
    )
