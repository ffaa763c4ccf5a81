"""Runs of the program without its imports: one process has imported the libraries, and is forked for each run.

Unsloth and TRL take ten seconds of CPU to import, as much as a training of the embedded model.  A fork is a process of
its own, with its own arguments, folder, streams and signals, and it ends as an interpreter ends.  It shares what was
decided before the fork: what libraries read from the environment at their import, and the seed of hashes.  What depends
on those is run by `helpers.run`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Protocol

from tests.helpers import ROOT
from tests.helpers import run as run_fresh

SCRIPT = ROOT / "gpt_2048_rl.py"
GPU = any(Path("/dev").glob("nvidia[0-9]*"))  # CUDA does not survive a fork


class Process(Protocol):
    """What a test may do with a run: a part of subprocess.Popen."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


# ---------------------------------------------------------------------------------------------------------------------
# The process that is forked


def serve() -> None:
    """Import the libraries; then fork for every request that comes by stdin, until that is closed."""
    from toolkit import machine

    machine.prepare_environment(offline="HF_ENDPOINT" not in os.environ)
    if sys.argv[1:] == ["gpu"]:
        from tests import gpu_on_cpu

        gpu_on_cpu.become_gpu()
    for name in ("unsloth", "datasets", "torch.utils.tensorboard", "tyro", "rich.live"):  # unsloth before all others
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers leave no zombies
    with socket.socket(fileno=os.dup(0)) as requests:
        while True:
            message, descriptors, *_ = socket.recv_fds(requests, 1 << 20, 3)
            if not message:
                return
            if not os.fork():
                break
            for descriptor in descriptors:
                os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    keep(descriptors[0])
    become(descriptors, json.loads(message))


def keep(reply: int) -> None:
    """Fork once more.  The parent says the child's number and how it ended, and ends; only the child returns."""
    if child := os.fork():
        os.write(reply, b"%d\n" % child)
        os.write(reply, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(0)
    os.setsid()


def become(descriptors: list[int], arguments: list[str]) -> None:
    """Run a script as `python SCRIPT ARGUMENTS` would, in the environment that the libraries were imported in."""
    reply, *streams = descriptors
    os.close(reply)
    for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), *streams)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv[:] = arguments
    sys.path[0] = str(Path(arguments[0]).parent)
    runpy.run_path(arguments[0], run_name="__main__")


# ---------------------------------------------------------------------------------------------------------------------
# The tests' end


class Fork:
    """A run in such a fork."""

    def __init__(self, pid: int, reply: IO[str]) -> None:
        self.pid = pid
        self._reply = reply
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.  Returns the exit code; raises subprocess.TimeoutExpired."""
        if self._code is None:
            if not select.select([self._reply], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self._code = int(self._reply.readline())
            self._reply.close()
        return self._code

    def send_signal(self, sig: int) -> None:
        """Not to a process that has ended: its number may be another's by now."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The process that is forked; it imports while the test goes on, and ends with this one or when it is closed."""

    def __init__(self, *mode: str, env: Mapping[str, str] | None = None) -> None:
        """`gpu` as the mode: on a CPU that says it is a GPU."""
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.preloaded", *mode]
            self._process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=theirs.fileno(),
                                             stdout=subprocess.DEVNULL, start_new_session=True)  # fmt: skip

    def start(self, command: list[str], stdout: IO[str], stderr: IO[str]) -> Fork:
        """Run a script with its arguments."""
        ours, theirs = os.pipe()
        socket.send_fds(self._requests, [json.dumps(command).encode()], [theirs, stdout.fileno(), stderr.fileno()])
        os.close(theirs)
        reply = os.fdopen(ours)
        return Fork(int(reply.readline()), reply)

    def close(self) -> None:
        """Runs under way go on."""
        self._requests.close()
        self._process.wait()


@functools.cache
def shared_server() -> Server:
    """The server of this process's tests, started when first asked for."""
    server = Server()
    atexit.register(server.close)
    return server


@contextlib.contextmanager
def started(*arguments: object, log: Path) -> Iterator[Process]:
    """The program in the background, in a session of its own, writing to a file."""
    command = [str(SCRIPT), *map(str, arguments)]
    with log.open("w") as file:
        process: Process = shared_server().start(command, file, file) if not GPU else subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, text=True, stdout=file, stderr=file, start_new_session=True
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def run(*arguments: object, script: Path = SCRIPT, server: Server | None = None) -> subprocess.CompletedProcess[str]:
    """The program, to its end."""
    if GPU and server is None:
        return run_fresh(*arguments, script=script)
    command = [str(script), *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = (server or shared_server()).start(command, stdout, stderr)
        try:
            code = process.wait(600)
        finally:
            process.kill()
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(command, code, stdout.read(), stderr.read())


if __name__ == "__main__":
    serve()
