"""Runs of the program without its imports: one process has imported the libraries, and is forked for each run.

Unsloth and TRL take ten seconds of CPU to import, as much as a training of the embedded model.  A fork is a process of
its own, with its own arguments, folder, streams and signals.  It shares what was decided before the fork: what
libraries read from the environment at their import, and the seed of hashes.  What depends on those is run by
`helpers.run`.  The processes of one pytest share one such server.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import functools
import gc
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
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, NoReturn, Protocol

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
    """Import the libraries, then fork for every request.  End when nobody is connected any more."""
    from toolkit.model import machine

    machine.prepare_environment(offline="HF_ENDPOINT" not in os.environ)
    if sys.argv[1:] == ["gpu"]:
        from tests import gpu_on_cpu

        gpu_on_cpu.become_gpu()
    gc.disable()  # as in loading.import_libraries
    importlib.import_module("unsloth")  # before all others
    for name in ("datasets", "torch.utils.tensorboard", "trl.trainer.grpo_trainer", "tyro", "rich.live"):
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would touch half a million objects, and so copy their memory
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers leave no zombies
    if request := next_request():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
        arguments, (reply, *streams) = request
        keep(reply)
        become(arguments, streams)


def next_request() -> tuple[list[str], list[int]] | None:
    """Take connections from the socket that is stdin, and fork for each request.

    Returns the request and its descriptors in the fork; None in the server, when the last connection is closed.
    """
    listener = socket.socket(fileno=os.dup(0))
    sockets = [listener]
    while True:
        for ready in select.select(sockets, [], [])[0]:
            if ready is listener:
                sockets.append(listener.accept()[0])
                continue
            message, descriptors, *_ = socket.recv_fds(ready, 1 << 20, 3)
            if not message:
                ready.close()
                sockets.remove(ready)
                if sockets == [listener]:
                    return None
            elif not os.fork():
                for each in sockets:
                    each.close()
                return json.loads(message), descriptors
            for descriptor in descriptors:
                os.close(descriptor)


def keep(reply: int) -> None:
    """Fork once more.  The parent says the child's number and how it ended, and ends; only the child returns."""
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    if child := os.fork():
        os.write(reply, b"%d\n" % child)
        os.write(reply, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(0)
    os.close(reply)
    os.setsid()


def become(arguments: list[str], streams: list[int]) -> NoReturn:
    """Run a script as `python SCRIPT ARGUMENTS` would, or `module:function` with arguments, and end.

    It ends as an interpreter does, but without freeing its objects: that would copy the memory of all libraries.
    """
    for number, descriptor in enumerate(streams, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    module, _, function = arguments[0].partition(":")
    code = 0
    try:
        if function:
            getattr(importlib.import_module(module), function)(*arguments[1:])
        else:
            sys.argv[:] = arguments
            sys.path[0] = str(Path(arguments[0]).parent)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        code = 1
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
        """Send a signal unless the process has ended, because its number may be reused."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """A connection to the process that is forked.  It imports while the tests go on, and ends with the last of them."""

    _process: subprocess.Popen[bytes] | None = None  # where it was started here

    def __init__(self, name: str, *mode: str, env: Mapping[str, str] | None = None) -> None:
        """The first process to ask for a name starts its server.  Mode `gpu`: on a CPU that plays a GPU."""
        address = f"\0gpt-2048-tests-{name}"  # vanishes with its owner
        self._requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        while self._requests.connect_ex(address):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                try:
                    listener.bind(address)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                    continue  # another is about to listen
                listener.listen()
                command = [sys.executable, "-m", "tests.preloaded", *mode]
                self._process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=listener.fileno(),
                                                 stdout=subprocess.DEVNULL, start_new_session=True)  # fmt: skip

    def send(self, command: list[str], reply: int, stdout: IO[str], stderr: IO[str]) -> None:
        """Have a command run.  Its number and, when it has ended, its exit code are written to `reply`."""
        socket.send_fds(self._requests, [json.dumps(command).encode()], [reply, stdout.fileno(), stderr.fileno()])

    def start(self, command: list[str], stdout: IO[str], stderr: IO[str]) -> Fork:
        """Run a script with its arguments."""
        ours, theirs = os.pipe()
        self.send(command, theirs, stdout, stderr)
        os.close(theirs)
        reply = os.fdopen(ours)
        return Fork(int(reply.readline()), reply)

    def close(self) -> None:
        """Close the connection.  Runs under way go on."""
        self._requests.close()
        if self._process:
            self._process.wait()


@functools.cache
def shared_server() -> Server:
    """The server of these tests, started when one of their processes first asks for it."""
    return Server(os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid())))


def begin(*arguments: object, folder: Path) -> None:
    """Run the program in the background, once for all processes of these tests; its streams go to files in a folder.

    A lock on a file there is held until the run ends; the file then has its number and its exit code.
    """
    with (folder / "process").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another process has begun it
        if lock.tell():
            return  # and it has ended
        command = [str(SCRIPT), *map(str, arguments)]
        with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
            if GPU:
                done = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=stdout, stderr=stderr, check=False)
                lock.write(f"0\n{done.returncode}\n")
            else:
                shared_server().send(command, lock.fileno(), stdout, stderr)


def finished(folder: Path) -> subprocess.CompletedProcess[str]:
    """Wait for the run that was begun there."""
    with (folder / "process").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        _, code = map(int, lock.read().split())
    return subprocess.CompletedProcess([], code, (folder / "stdout").read_text(), (folder / "stderr").read_text())


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


def run(
    *arguments: object, script: Path | str = SCRIPT, server: Server | None = None
) -> subprocess.CompletedProcess[str]:
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


def call(function: Callable[..., None], *arguments: object) -> None:
    """Call a test module's function in a fork that has the libraries.  Its failure fails the caller."""
    if GPU:
        return function(*map(str, arguments))
    done = run(*arguments, script=f"{function.__module__}:{function.__qualname__}")
    assert done.returncode == 0, done.stdout + done.stderr
    return None


if __name__ == "__main__":
    serve()
