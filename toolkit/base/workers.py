"""Worker processes as the trainer sees them: asked in lines of JSON, never without a limit, replaced when they die."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

from toolkit import UsageError


class JailError(UsageError):
    """The jail does not hold on this machine, or a player could not be put into it."""

    def __str__(self) -> str:
        return f"model-written code cannot be jailed here ({self.args[0]}); --unsafe-no-jail runs it all the same"


class WorkerError(UsageError):
    """No worker starts or lives, although the jail may hold."""

    def __str__(self) -> str:
        return f"the players' processes fail ({self.args[0]}): free memory, or allow more processes"


# How a worker ends by itself while it reads a text: too slow, or too deep.  The kernel and people send other signals.
_OWN_ENDS = (-signal.SIGVTALRM, -signal.SIGSEGV, -signal.SIGABRT)


class Worker:
    """One referee process after another.  A dead one is replaced before its next job, at most `tries` times for a job.

    It has `start_seconds` to start, and to begin with a job.
    """

    def __init__(self, command: Sequence[str], start_seconds: float, tries: int) -> None:
        self._command, self._start_seconds, self._tries = command, start_seconds, tries
        self._turn, self._closed = threading.Lock(), False
        self._start()

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._answers = self._socket.makefile("rb")
        with theirs:  # a socket, because reads and writes of a pipe have no time limit
            self._process = subprocess.Popen(
                self._command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                cwd="/",
                env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"},
                start_new_session=True,
            )
        if self._closed:  # by another thread, at this moment
            self._process.kill()

    def check(self, priority: int = 0) -> None:
        """Wait until it is ready.

        Raises JailError if no player could be jailed or the canary's game went wrong, and WorkerError if it died.
        """
        line = self._exchange("", self._start_seconds)
        if line is None or line["refusal"]:
            self._end()
            raise JailError(line["refusal"]) if line else WorkerError("a worker died at its start")
        os.setpriority(os.PRIO_PGRP, self._process.pid, max(priority, os.nice(0)))  # with its zygote and its players

    def _exchange(self, line: str, seconds: float) -> dict[str, Any] | None:
        """Send a line, if there is one, and read one; None when the worker dies over it or takes too long."""
        with contextlib.suppress(OSError, ValueError):
            self._socket.settimeout(seconds)
            self._socket.sendall(line.encode())
            answer = self._answers.readline()
            return json.loads(answer) if answer.endswith(b"\n") else None
        return None

    def _begin(self, line: str, seconds: float) -> None:
        """Hand a job to a worker, and wait until it begins.  One that is dead is replaced.

        If none begins in time (memory is short), raises as check().
        """
        failure: UsageError = WorkerError("workers die at once")
        deadline = time.monotonic() + self._start_seconds
        while True:
            if self._closed:
                raise RuntimeError("the pool is closed")
            if time.monotonic() > deadline:
                raise failure
            try:
                if self._process.poll() is not None:
                    self._end()
                    self._start()
                    self.check()
            except (UsageError, OSError) as error:
                failure = error if isinstance(error, UsageError) else WorkerError(str(error))
                time.sleep(0.5)
                continue
            if self._exchange(line, seconds) is not None:
                return
            self._end()

    def ask(self, job: str, seconds: float) -> dict[str, Any] | None:
        """The answer to a job, which is a line.  None if its text ends the parser that reads it.

        No program can end its referee or its zygote.  So one that dies is replaced, and the job is done again.  Raises
        as check(), and WorkerError when several workers in a row die over the job.
        """
        with self._turn:
            for _ in range(self._tries):
                self._begin(job, min(seconds, self._start_seconds))
                if reply := self._exchange("", seconds):
                    return reply
                self._end()
                if self._process.returncode in _OWN_ENDS:
                    return None
        if self._closed:
            raise RuntimeError("the pool is closed")
        raise WorkerError(f"{self._tries} referees in a row died over one game, which no program can cause")

    def is_busy(self) -> bool:
        """Whether another thread waits for its answer."""
        return self._turn.locked()

    def _end(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._start_seconds)
        self._answers.close()
        self._socket.close()

    def close(self) -> None:
        """End the process, its zygote and its player for good.  A thread that waits for a verdict sees the end too."""
        self._closed = True
        self._process.kill()
        with self._turn:
            self._end()
