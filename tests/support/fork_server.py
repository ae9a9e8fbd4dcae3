"""The fork server of the tests: it imports torch, transformers and vLLM once, and each process that a test starts is a
copy of it.

forked.py starts `python -m tests.support.fork_server` with a listening socket as its standard input. A request is a
command line with its environment, folder and standard streams, and becomes the process that the command line would have
started. What such a process starts itself with `stage2` (the servers and the learner of `stage2 run`, torchrun's
processes) is forked as well, from that process.

A fork has only the thread that forks. So nothing here computes, joins a group or opens a device, and `load` fails if an
import starts a second thread. A copy that forks itself may have threads that wait, as torchrun's store has, but none of
OpenMP: its child takes over no file, and computes with threads of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import itertools
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from stage2_cli.processes import end_with_parent
from stage2_trainer.serve.server_command import STUB_MODULE, VLLM_MODULE

_spawn_by_executing = multiprocessing.util.spawnv_passfds

REQUEST_BYTES = 1 << 18
STRUCK = "tests.integration.struck"
COPIED_MODULES = ("stage2_cli", STUB_MODULE, VLLM_MODULE, STRUCK)
REGISTRY_VARIABLE = "STAGE2_TEST_PROCESSES"
"""A folder in which each copy leaves a file under its process id: /proc has the fork server's own command line."""


def copied(command: Sequence[str]) -> bool:
    """Whether a command line is one that is forked: the command `stage2`, or what it starts itself."""
    match _without_flags(command):
        case [_, "-m", module, *_]:
            return module in COPIED_MODULES
        case [_, "-c", code, *_]:
            return "multiprocessing.spawn" in code  # as which vLLM starts its engine
        case [program, *_]:
            return Path(program).name == "stage2"
    return False


def _without_flags(command: Sequence[object]) -> list[str]:
    """Return a command line without the flags of the interpreter, which is the same one."""
    program, *words = (str(word) for word in command)
    if Path(program).name == "stage2":
        return [program, *words]
    flags = itertools.takewhile(lambda word: word.startswith("-") and word not in ("-c", "-m"), words)
    return [program, *words[len(list(flags)) :]]


class Copies(subprocess.Popen[bytes]):
    """`subprocess.Popen`, in a copy: what is to be forked is forked, and everything else is executed."""

    def __init__(self, args: Any, *, preexec_fn: Any = None, env: Any = None, **options: Any) -> None:
        if not isinstance(args, str | bytes) and copied(args):
            # CPython calls it in the child, when streams, folder and session are set and before it executes anything
            preexec_fn = partial(become, args, dict(os.environ if env is None else env), preexec_fn)
        super().__init__(args, preexec_fn=preexec_fn, env=env, **options)


def become(
    command: Sequence[str], environment: Mapping[str, str], first: Any = None, *, kept: Sequence[int] = ()
) -> NoReturn:
    """Be the process that a command line starts, to its end; for the child's side of a fork."""
    code = 1
    try:
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in kept:
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(number)
        gc.freeze()  # what was imported: no collection need look at it, or copy its pages
        gc.enable()  # subprocess turns it off around its fork
        _forget_handlers()
        if first is not None:
            first()
        _enter(environment, forks_itself=VLLM_MODULE in command)
        _register(command)
        _run(command)
        code = os.EX_OK
    except SystemExit as ended:
        code = _exit_code(ended)
    except BaseException:  # noqa: BLE001 - nothing may pass to the code that forked
        traceback.print_exc()
    finally:
        _leave(code)


def _forget_handlers() -> None:
    """Handle signals as a new interpreter does; other signals that the parent ignores stay ignored."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # subprocess restores them for what it executes
        signal.signal(number, signal.SIG_IGN)


def _enter(environment: Mapping[str, str], *, forks_itself: bool) -> None:
    """Take over an environment, with what libraries have read of another one when they were imported.

    forks_itself: a process that forks others may have no OpenMP threads, which its children would wait for.
    """
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if (torch := sys.modules.get("torch")) is not None:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(1 if forks_itself else min(cores, int(environment.get("OMP_NUM_THREADS", cores))))
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _register(command: Sequence[str]) -> None:
    folder = os.environ.get(REGISTRY_VARIABLE)
    if folder is not None:
        written = Path(folder) / f".{os.getpid()}"
        written.write_text(json.dumps({"command": [str(word) for word in command], "environment": dict(os.environ)}))
        written.rename(written.with_name(str(os.getpid())))


def _run(command: Sequence[object]) -> None:
    match _without_flags(command):
        case [_, "-c", code, *arguments]:
            sys.argv = ["-c", *arguments]
            exec(code, {"__name__": "__main__"})
        case [_, "-m", module, *arguments]:
            sys.argv = [module, *arguments]
            sys.modules.pop(module, None)  # it runs under the name of __main__
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case words:
            sys.argv = words
            importlib.import_module("stage2_cli.main").main()


def _spawn(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Start a process of multiprocessing."""
    if not copied(arguments):
        return _spawn_by_executing(path, arguments, descriptors)
    pid = os.fork()
    if pid == 0:
        become(arguments, dict(os.environ), kept=descriptors)
    return pid


def _execute(path: str, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    become([path, *command[1:]], environment)


def _exit_code(ended: SystemExit) -> int:
    if isinstance(ended.code, int):
        return ended.code & 0xFF
    if ended.code is not None:
        print(ended.code, file=sys.stderr)
    return int(ended.code is not None)


def _leave(code: int) -> NoReturn:
    """End as the interpreter does: threads are waited for, exit handlers run, output is written."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def load(modules: Sequence[str]) -> dict[str, str]:
    """Import modules; return what that has set in the environment."""
    before = dict(os.environ)
    for module in modules:
        importlib.import_module(module)
    if len(threads := os.listdir("/proc/self/task")) > 1:
        names = sorted(Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in threads)
        raise RuntimeError(f"a fork must have one thread, and these run: {names}")
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def keep(request: Mapping[str, Any], streams: Sequence[int], client: socket.socket) -> None:
    """Fork for a request, send the client the child's process id, and its status when it has ended."""
    end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    begun, ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.chdir(request["folder"])
        os.setsid()
        become(request["command"], request["environment"], end_with_parent)
    os.close(ready)
    os.read(begun, 1)  # until the child has closed what it inherited: it leads its session then
    with contextlib.suppress(BrokenPipeError):  # a client that was killed
        client.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        client.send(str(os.waitstatus_to_exitcode(status)).encode())


def serve(listener: socket.socket) -> NoReturn:
    """Answer requests until the tests end: a keeper, forked for each, forks what was requested."""
    end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no keeper becomes a zombie
    changed: dict[str, str] = {}
    while True:
        client, _ = listener.accept()
        message, streams, *_ = socket.recv_fds(client, REQUEST_BYTES, 3)
        request = json.loads(message)
        changed |= load(request["imports"])
        request["environment"] |= changed
        if os.fork() == 0:
            keep(request, streams, client)
            os._exit(os.EX_OK)
        client.close()
        for stream in streams:
            os.close(stream)


if __name__ == "__main__":
    subprocess.Popen = Copies  # type: ignore[misc]
    os.execve = _execute  # `stage2 serve` becomes its server
    multiprocessing.util.spawnv_passfds = _spawn
    serve(socket.socket(fileno=0))
