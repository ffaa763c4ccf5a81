"""The jail of a player: a seccomp filter, another user, no capabilities, and limits of resources."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import struct
from collections.abc import Callable
from functools import partial


class NotJailed(Exception):
    """A player could not be put into the jail; the message says why."""


_ALLOW, _DENY, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000  # SECCOMP_RET_*
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Only read and write on the player's own socket can wait: without futex, a lock is no way to sleep.
SYSTEM_CALLS = {
    "x86_64": {"read": 0, "write": 1, "mmap": 9, "munmap": 11, "brk": 12, "rt_sigreturn": 15, "mremap": 25,
               "exit": 60, "gettimeofday": 96, "clock_gettime": 228, "exit_group": 231},
    "aarch64": {"read": 63, "write": 64, "mmap": 222, "munmap": 215, "brk": 214, "rt_sigreturn": 139, "mremap": 216,
                "exit": 93, "gettimeofday": 169, "clock_gettime": 113, "exit_group": 94}}  # fmt: skip
_PROT_EXEC, _MAP_ANONYMOUS = 0x4, 0x20
_MAP_OTHER = 0xFFFFFFFF & ~(_MAP_ANONYMOUS | 0x2 | 0x4000 | 0x20000)  # all but MAP_PRIVATE, MAP_NORESERVE, MAP_STACK
# Call -> conditions: offset of half an argument in struct seccomp_data, mask, whether one of its bits has to be set.
# A program may not choose addresses, because pages far apart need page tables, which no limit counts.  RLIMIT_AS does
# not count shared memory once it is unmapped, although it still uses RAM.  A negative clock is another process's.
CONDITIONS = {
    "mmap": ((16, 0xFFFFFFFF, False), (20, 0xFFFFFFFF, False), (32, _PROT_EXEC, False), (40, _MAP_OTHER, False),
             (40, _MAP_ANONYMOUS, True)),
    "mremap": ((40, 0x2 | 0x4, False),),  # MREMAP_FIXED, MREMAP_DONTUNMAP
    "clock_gettime": ((16, 0x80000000, False),)}  # fmt: skip


def seccomp_filter(machine: str) -> bytes:
    """The jail's filter as classic BPF (linux/filter.h: 8 bytes an instruction) over struct seccomp_data.  Allows
    SYSTEM_CALLS under their CONDITIONS.  Other calls fail with EPERM; a foreign ABI kills the process."""
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    deny = -1  # stands for a jump to the last instruction
    code = [(load, 0, 0, 4), (equal, 1, 0, AUDIT_ARCH[machine]), (give, 0, 0, _KILL), (load, 0, 0, 0)]
    if machine == "x86_64":  # the x32 ABI has the same architecture and a bit in its numbers
        code += [(at_least, 0, 1, 0x40000000), (give, 0, 0, _KILL)]
    for name, number in SYSTEM_CALLS[machine].items():
        checks = []
        for offset, mask, wanted in CONDITIONS.get(name, ()):
            checks += [(load, 0, 0, offset), (any_bit, 0, deny, mask) if wanted else (any_bit, deny, 0, mask)]
        allowed = [*checks, (give, 0, 0, _ALLOW)]
        code += [(equal, 0, len(allowed), number), *allowed]  # another call jumps past them
    code.append((give, 0, 0, _DENY))
    return b"".join(
        struct.pack("<HBBI", operation, *(len(code) - 2 - i if jump == deny else jump for jump in jumps), value)
        for i, (operation, *jumps, value) in enumerate(code)
    )


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(1, *map(ctypes.c_ulong, (signal.SIGKILL, 0, 0, 0)))  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


class Jail:
    """An irreversible jail for the calling process: another user, no capabilities, no new privileges, seccomp.  Created
    in the zygote, where files can still be read; entered in each player.  NotJailed where it has no filter."""

    def __init__(self) -> None:
        machine = os.uname().machine
        if machine not in AUDIT_ARCH:
            raise NotJailed(f"there is no seccomp filter for machine {machine}")
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._capset = self._libc.capset  # looked up here, where it costs nothing
        code = seccomp_filter(machine)
        self._code = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(self._code))  # struct sock_fprog
        self._program = ctypes.create_string_buffer(program)

    def _prctl(self, option: int, value: int, pointer: int = 0) -> None:
        if self._libc.prctl(option, *map(ctypes.c_ulong, (value, pointer, 0, 0))):
            raise NotJailed(f"prctl({option}): {os.strerror(ctypes.get_errno())}")

    def enter(self, parent: int) -> None:
        """Lock the calling process in, and prove it."""
        if os.geteuid() == 0:
            nobody = [65534] * 3
            for give_up in (partial(os.setgroups, []), partial(os.setresgid, *nobody), partial(os.setresuid, *nobody)):
                with contextlib.suppress(OSError):  # each by itself: a user namespace can refuse one, or have no nobody
                    give_up()
        if self._capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)):  # linux/capability.h, version 3: none at all
            raise NotJailed(f"capset: {os.strerror(ctypes.get_errno())}")
        self._prctl(4, 0)  # PR_SET_DUMPABLE
        die_with(parent)  # again, because a change of user clears it
        self._prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
        self._prctl(22, 2, ctypes.addressof(self._program))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        attempts: tuple[Callable[[], int], ...] = (lambda: os.open("/", os.O_RDONLY), os.fork)
        for attempt in attempts:
            try:
                attempt()
            except PermissionError:
                continue
            os._exit(1)


def limit_resources(cpu_seconds: int, memory_bytes: int) -> None:
    """Bound memory and CPU of the calling process; no files, no children, no core dump."""
    for name, limit in (("AS", memory_bytes), ("FSIZE", 0), ("CORE", 0), ("NPROC", 0), ("NOFILE", 4), ("MEMLOCK", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
