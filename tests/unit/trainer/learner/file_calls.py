"""What a process does to the files of a folder, call by call, and faults in it that the kernel puts there.

seccomp hands each call that changes a file to this process (seccomp_unotify(2)), which lets it be, fails it, or kills
the caller before it: whatever made the call, Python, PyTorch's C++ or safetensors' Rust. What the process starts is
watched as well. Linux on x86-64, no root.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import signal
import socket
import struct
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

KILL = "SIGKILL"
KILL_ALL = "SIGKILL to all"
FULL = errno.ENOSPC
BROKEN = errno.EIO
Fault = str | int | None
"""KILL: the caller; KILL_ALL: every process; an error's number, which the call fails with; None: the call is let be."""

TAKES_ROOM = frozenset({"openat", "write", "pwrite64", "writev", "sendfile", "copy_file_range", "mkdir", "mkdirat"})
FLUSHES = frozenset({"fsync", "fdatasync"})

_OPENAT = 257  # reported only where it may create a file
_OF_FILES = {1: "write", 18: "pwrite64", 20: "writev", 40: "sendfile", 74: "fsync", 75: "fdatasync", 77: "ftruncate"}
_OF_PATHS = {82: "rename", 83: "mkdir", 84: "rmdir", 87: "unlink"}
_OF_ENTRIES = {_OPENAT: "openat", 258: "mkdirat", 263: "unlinkat", 264: "renameat", 316: "renameat2"}
_COPY = 326  # its file is the third argument
_NAMES = {**_OF_FILES, **_OF_PATHS, **_OF_ENTRIES, _COPY: "copy_file_range"}

_PRCTL_NO_NEW_PRIVILEGES, _SECCOMP, _SET_FILTER, _NEW_LISTENER = 38, 317, 1, 8
_NOTIFY, _ALLOW = 0x7FC00000, 0x7FFF0000
_LOAD, _IF_EQUAL, _IF_ANY, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER_AT, _OPEN_FLAGS_AT = 0, 32
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
_LONGEST_PATH = 4096
_AT_FOLDER = -100


@dataclass(frozen=True)
class FileCall:
    """A call that is about to change a file."""

    name: str
    path: Path


def run_with_faults(main: Callable[[], int], decide: Callable[[FileCall], Fault]) -> int:
    """Run `main` in a copy of this process, each of whose calls `decide` sees before it is made.

    Returns the exit status, negative for a signal, when all that it started has ended too.
    """
    ours, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        ours.close()
        _run(main, theirs)
    theirs.close()
    with closing(ours):
        _, (listener,), _, _ = socket.recv_fds(ours, 1, 1)
    try:
        _supervise(child, listener, decide)
    finally:
        os.close(listener)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _run(main: Callable[[], int], parent: socket.socket) -> NoReturn:
    code = 1
    try:
        listener = _install()
        socket.send_fds(parent, [b"."], [listener])
        os.close(listener)
        code = main()
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(code)


def _install() -> int:
    """Make the kernel report the calls of this thread and of those that it starts; return the listener."""
    checks = [_step(_IF_EQUAL, number, yes=len(_NAMES) - place) for place, number in enumerate(sorted(_NAMES))]
    allow, notify = _step(_RETURN, _ALLOW), _step(_RETURN, _NOTIFY)
    opens = [_step(_LOAD, _OPEN_FLAGS_AT), _step(_IF_ANY, os.O_CREAT, no=1), notify, allow]
    steps = [_step(_LOAD, _NUMBER_AT), _step(_IF_EQUAL, _OPENAT, no=len(opens)), *opens, *checks, allow, notify]
    program = b"".join(steps)
    kept = ctypes.create_string_buffer(program)
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(kept)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PRCTL_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    found = int(libc.syscall(_SECCOMP, _SET_FILTER, _NEW_LISTENER, head))
    if found < 0:
        raise OSError(ctypes.get_errno(), "seccomp: the kernel does not hand calls over")
    return found


def _step(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", code, yes, no, value)


def _supervise(child: int, listener: int, decide: Callable[[FileCall], Fault]) -> None:
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    while True:
        ((_, events),) = waiting.poll()
        if not events & select.POLLIN:
            return  # all threads have ended
        notification = bytearray(80)
        try:
            fcntl.ioctl(listener, _RECEIVE, notification)
        except FileNotFoundError:  # it has been killed
            continue
        identity, task, _, number = struct.unpack_from("QIIi", notification)
        call = _call(task, number, struct.unpack_from("6Q", notification, 32))
        fault = decide(call) if call is not None else None
        if fault == KILL:
            os.kill(task, signal.SIGKILL)
        elif fault == KILL_ALL:
            for one in (child, *_started_by(child)):
                os.kill(one, signal.SIGKILL)
        else:
            answer = (0, 0, _CONTINUE) if fault is None else (0, -int(fault), 0)
            _answer(listener, struct.pack("QqiI", identity, *answer))


def _started_by(process: int) -> list[int]:
    """Return the processes that stand below a process."""
    lists = Path(f"/proc/{process}/task").glob("*/children")
    children = [int(one) for found in lists for one in found.read_text().split()]
    return [*children, *(one for child in children for one in _started_by(child))]


def _answer(listener: int, answer: bytes) -> None:
    try:
        fcntl.ioctl(listener, _SEND, answer)
    except FileNotFoundError:
        return  # another thread has ended the process


def _call(task: int, number: int, arguments: tuple[int, ...]) -> FileCall | None:
    """Return a call with the file or folder that it changes; None where that has gone, or is none."""
    try:
        if number in _OF_PATHS:
            path = Path(os.readlink(f"/proc/{task}/cwd")) / _text(task, arguments[0])
        elif number in _OF_ENTRIES:
            path = _folder(task, arguments[0]) / _text(task, arguments[1])
        else:
            path = Path(os.readlink(f"/proc/{task}/fd/{arguments[2 if number == _COPY else 0]}"))
    except OSError:
        return None
    return FileCall(_NAMES[number], path)


def _folder(task: int, descriptor: int) -> Path:
    signed = ctypes.c_int(descriptor & 0xFFFFFFFF).value
    return Path(os.readlink(f"/proc/{task}/cwd" if signed == _AT_FOLDER else f"/proc/{task}/fd/{signed}"))


def _text(task: int, address: int) -> str:
    with open(f"/proc/{task}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return os.fsdecode(memory.read(_LONGEST_PATH).partition(b"\0")[0])
