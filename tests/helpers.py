"""Processes and seccomp filters, for the tests of the jailed players.  Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gpt_2048_rl as program
from toolkit.referee.jail import Jail, limit_resources

ROOT = Path(program.__file__).resolve().parent
HONEST = 'import random\ndef strategy(board):\n    return random.choice("éuai")\n'
ORDINARY = "os.setgroups([]); os.setresgid(12345, 12345, 12345); os.setresuid(12345, 12345, 12345)"
HELD_OUT = ("--held-out", "3:64", "4:16")  # short games, also for the expert among the controls
ALWAYS_UP = 'def strategy(board):\n    return "é"\n'  # gets stuck
FOR_EVER = "def strategy(board):\n    while True:\n        pass\n"


def without_seconds(results: Iterable[program.GameResult]) -> list[program.GameResult]:
    """Results without the seconds, the one field that differs between runs."""
    return [dataclasses.replace(result, seconds=0.0) for result in results]


def play(
    pool: program.Pool, source: str, *seeds: int, timeout: float = 5.0, target: int = 256
) -> list[program.GameResult]:
    """A strategy's games in a pool; on one board if no seeds are given."""
    return program.execute_strategies([source], seeds or (0,), target=target, timeout=timeout, pool=pool)[0]


def read_stat(pid: int) -> tuple[str, int]:
    """State letter and parent of a process; ("", 0) when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[1])


def alive(pid: int) -> bool:
    """Whether a process still runs.  A zombie does not."""
    return read_stat(pid)[0] not in ("", "Z", "X")


def descendants(pid: int) -> set[int]:
    """All living processes below this one."""
    parents = {int(p.name): read_stat(int(p.name))[1] for p in Path("/proc").iterdir() if p.name.isdigit()}
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {child for child in found - {pid} if alive(child)}


def cmdline(pid: int) -> bytes:
    """A process's arguments, each with a zero after it; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> bool:
    """Wait until a condition holds, much longer than it should take.  Returns whether it holds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())


NO_TENSORS = b"\x02" + bytes(7) + b"{}"  # a whole safetensors file


def run_python(code: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter that finds the program and these helpers."""
    command = [sys.executable, "-c", code, *arguments]
    options.setdefault("env", {**os.environ, "PYTHONPATH": str(ROOT)})
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)  # type: ignore[call-overload, no-any-return]


def run(
    *arguments: object,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    script: Path | str = ROOT / "gpt_2048_rl.py",
) -> subprocess.CompletedProcess[str]:
    """The program as its user runs it."""
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=300, check=False)


# ---------------------------------------------------------------------------------------------------------------------
# seccomp

LOAD, EQUAL, AT_LEAST, ANY_BIT, GIVE = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000

DOCKER_DENIES = {  # x86-64 numbers that Docker's default profile refuses to a container without extra capabilities
    "ptrace": 101, "uselib": 134, "ustat": 136, "sysfs": 139, "vhangup": 153, "pivot_root": 155, "_sysctl": 156,
    "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169,
    "iopl": 172, "ioperm": 173, "create_module": 174, "init_module": 175, "delete_module": 176, "get_kernel_syms": 177,
    "query_module": 178, "quotactl": 179, "nfsservctl": 180, "lookup_dcookie": 212, "clock_settime": 227, "mbind": 237,
    "set_mempolicy": 238, "get_mempolicy": 239, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
    "unshare": 272, "move_pages": 279, "perf_event_open": 298, "name_to_handle_at": 303, "open_by_handle_at": 304,
    "clock_adjtime": 305, "setns": 308, "kcmp": 312, "finit_module": 313, "kexec_file_load": 320, "bpf": 321,
    "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438,
    "mount_setattr": 442,
}  # fmt: skip
CLONE_NEW = 0x7E020000  # any of CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET


def install(code: Sequence[tuple[int, int, int, int]]) -> None:
    """Put the calling process, and all that it starts, under a filter."""
    libc = ctypes.CDLL(None, use_errno=True)
    packed = b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer)))
    for option, value, pointer in ((38, 1, 0), (22, 2, ctypes.addressof(header))):
        if libc.prctl(option, *map(ctypes.c_ulong, (value, pointer, 0, 0))):
            raise OSError(ctypes.get_errno(), f"prctl({option})")


def install_docker_profile() -> None:
    """Docker's default profile as far as it matters here: its refusals, and clone without new namespaces."""
    code = [(LOAD, 0, 0, 0)]
    for number in DOCKER_DENIES.values():
        code += [(EQUAL, 0, 1, number), (GIVE, 0, 0, ERRNO | errno.EPERM)]
    code += [(EQUAL, 0, 1, 435), (GIVE, 0, 0, ERRNO | errno.ENOSYS)]  # clone3
    code += [(EQUAL, 0, 3, 56), (LOAD, 0, 0, 16), (ANY_BIT, 0, 1, CLONE_NEW), (GIVE, 0, 0, ERRNO | errno.EPERM)]
    install([*code, (GIVE, 0, 0, ALLOW)])


def enter_user_namespace() -> None:
    """Move to a user namespace whose only user and group are 0, as in some rootless containers."""
    user, group = os.geteuid(), os.getegid()
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):  # CLONE_NEWUSER
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path(f"/proc/self/{name}").write_text(text)


def install_filter_on_seccomp(error: int) -> None:
    """From here on seccomp cannot be switched on: the call fails with `error`, or (0) only pretends to succeed."""
    prctl, seccomp = {"x86_64": (157, 317), "aarch64": (167, 277)}[os.uname().machine]
    code = [(LOAD, 0, 0, 0), (EQUAL, 3, 0, seccomp), (EQUAL, 0, 3, prctl), (LOAD, 0, 0, 16), (EQUAL, 0, 1, 22)]
    install([*code, (GIVE, 0, 0, ERRNO | error), (GIVE, 0, 0, ALLOW)])


def simulate(code: bytes, architecture: int, number: int, arguments: Sequence[int] = (0,) * 6) -> int:
    """What a filter answers to a system call, by a small interpreter of seccomp's classic BPF."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments)
    program_counter, accumulator = 0, 0
    while True:
        operation, if_true, if_false, k = struct.unpack_from("<HBBI", code, 8 * program_counter)
        program_counter += 1
        if operation == LOAD:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif operation == GIVE:
            return int(k)
        else:
            holds = {EQUAL: accumulator == k, AT_LEAST: accumulator >= k, ANY_BIT: bool(accumulator & k)}[operation]
            program_counter += if_true if holds else if_false


ARGUMENTS = (0, 4096, 3, 0x20, -1, 0)  # to mmap a mapping that the filter allows and the kernel refuses; harmless


def _attempt_from(first: int, report: int) -> None:
    """In a jailed child: try every system call from `first` on, and write the result of each."""
    parent = os.getppid()
    jail = Jail()
    libc = ctypes.CDLL(None, use_errno=True)
    limit_resources(10, program.LIMITS.memory_bytes)
    jail.enter(parent)
    for number in range(first, 1024):
        os.write(report, struct.pack("=ii", number, -1))  # the last record if the call does not return
        ctypes.set_errno(0)
        failed = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, ARGUMENTS)) == -1
        os.write(report, struct.pack("=ii", number, ctypes.get_errno() if failed else 0))


def sweep() -> list[int]:
    """The system calls below 1024 that a jailed process reaches, whether they return or end it."""
    reached, first = [], 0
    while first < 1024:
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                _attempt_from(first, theirs)
            os._exit(0)
        os.close(theirs)
        results = {}
        with os.fdopen(ours, "rb") as report:
            while record := report.read(8):
                number, error = struct.unpack("=ii", record)
                results[number] = error
        os.waitpid(child, 0)
        if not results:
            raise RuntimeError("the child could not be jailed")
        reached += [number for number, error in sorted(results.items()) if error != errno.EPERM]
        first = max(results) + 1
    return reached


PROBES = {335, 336} if os.uname().machine == "x86_64" else set[int]()
"""uretprobe and uprobe: a kernel from 6.14 on takes these two past every filter, whatever it says.  Outside of a kernel
probe the first kills its caller and the second fails, so nothing is lost."""


@contextlib.contextmanager
def serving(handler: Any) -> Iterator[str]:
    """The address of an HTTP server of this process."""
    from http.server import ThreadingHTTPServer  # here, because players of some tests inherit this module's imports

    listening = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        listening.server_close()
