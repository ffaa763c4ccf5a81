"""Workers and their pool: how they start, die, are replaced and end, and which verdict belongs to which job."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import pytest

import gpt_2048_rl as program
from gpt_2048_rl import GameResult, Job, Pool, execute_strategies
from tests import helpers
from tests.helpers import FOR_EVER, HONEST, ORDINARY, alive, descendants, play, run_python, wait_until, without_seconds
from toolkit import UsageError
from toolkit.base.workers import JailError, WorkerError


def answers_right(pool: Pool) -> bool:
    """Whether the pool gives the known results of a fixed strategy on fixed boards."""
    results = play(pool, 'def strategy(board):\n    return "a"\n', 1, 2)
    return [(r.outcome, r.steps, r.max_tile) for r in results] == [("stuck", 81, 8), ("stuck", 76, 8)]


# ---------------------------------------------------------------------------------------------------------------------
# Start


def test_a_zygote_that_cannot_start_says_why() -> None:
    """Its reason reaches the trainer as the one line of the JailError; it used to be lost."""
    code = """
import gpt_2048_rl as program
program.PRELOADED = ("no_such_module",)
try:
    program.Referee()
except program.NotJailed as error:
    print(error)
"""
    assert "ModuleNotFoundError: No module named 'no_such_module'" in run_python(code).stdout


def test_a_refused_pool_leaves_no_process() -> None:
    """The workers that had started are ended."""
    prepare = f"helpers.install_filter_on_seccomp({errno.EPERM})"
    code = "import os\nimport gpt_2048_rl as program\nfrom tests import helpers\n" + textwrap.dedent(f"""
        from toolkit.base.workers import JailError
        {prepare}
        try:
            program.Pool(3)
        except JailError:
            print(helpers.wait_until(lambda: not helpers.descendants(os.getpid())))
        """)
    assert run_python(code).stdout.strip() == "True"


def test_one_shared_pool_for_all_threads() -> None:
    """Four threads at once started four, and three of them were never closed."""
    code = """
import threading
import gpt_2048_rl as program
pools = []
threads = [threading.Thread(target=lambda: pools.append(program.shared_pool())) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(pools), len(set(map(id, pools))))
"""
    assert run_python(code).stdout == "4 1\n"


def test_the_shared_pool_starts_again_after_it_was_closed() -> None:
    """Ctrl-C in a notebook closes it; the next cell goes on with a new one."""
    code = """
import gpt_2048_rl as program
first = program.shared_pool()
assert program.shared_pool() is first
first.close()
assert program.shared_pool() is not first
print(program.execute_strategies(['def strategy(board): return "a"'], (1,))[0][0].outcome)
"""
    done = run_python(code)
    assert done.stdout.strip() == "stuck", done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# End


def family(pool: Pool) -> set[int]:
    """All processes of a pool: workers, zygotes, players."""
    workers = {worker._process.pid for worker in pool._workers}
    return workers.union(*map(descendants, workers))


def test_close_leaves_no_process() -> None:
    """Idle workers and their zygotes are gone soon after."""
    pool = Pool(2)
    processes = family(pool)
    assert len(processes) == 4
    pool.close()
    assert wait_until(lambda: not any(map(alive, processes)))


def test_a_worker_whose_trainer_is_gone_says_nothing() -> None:
    """A trainer that ended with an error left an answer unread, and the worker's traceback behind its own last line."""
    mine, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-s", "-S", str(helpers.ROOT / "gpt_2048_rl.py"), "worker", "0", "1"]
    with subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.PIPE) as worker:
        theirs.close()
        assert select.select([mine], [], [], 20)[0]
        mine.close()
        assert worker.communicate(timeout=20)[1] == b""


@pytest.mark.parametrize("priority", [0, 19])
def test_a_pool_can_leave_the_cores_to_others(priority: int) -> None:
    """With all of its processes.  By default it has the priority of its trainer."""
    with Pool(1, priority=priority) as pool:
        given = {os.getpriority(os.PRIO_PROCESS, process) for process in family(pool)}
    assert given == {max(priority, os.nice(0))}


def test_close_ends_players_in_the_middle_of_a_game() -> None:
    """Another thread that waits for a verdict gets an exception, and starts no new worker."""
    pool = Pool(1)
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            play(pool, FOR_EVER, timeout=60)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert wait_until(lambda: len(family(pool)) == 3)
    processes = family(pool)
    pool.close()
    thread.join(20)
    assert (thread.is_alive(), len(failures)) == (False, 1)
    assert wait_until(lambda: not any(map(alive, processes | family(pool))))


TRAINER = f"""
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores Ctrl-C
import gpt_2048_rl as program
pool = {{pool}}
sources = [{FOR_EVER!r} + "# " + str(i) for i in range(40)]
print("playing", flush=True)
program.execute_strategies(sources, (1, 2), pool=pool)
"""


def trainer(pool: str) -> tuple[subprocess.Popen[str], set[int]]:
    """A trainer in the middle of `while True` strategies, and the processes below it."""
    environment = {**os.environ, "PYTHONPATH": str(helpers.ROOT)}
    process = subprocess.Popen([sys.executable, "-c", TRAINER.format(pool=pool)], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env=environment)  # fmt: skip
    assert process.stdout
    assert process.stdout.readline() == "playing\n"
    assert wait_until(lambda: len(descendants(process.pid)) >= 6)  # two of each: worker, zygote, player
    return process, descendants(process.pid)


@pytest.mark.parametrize(
    ("pool", "sign"),
    [
        ("program.shared_pool()", signal.SIGKILL),
        ("program.shared_pool()", signal.SIGINT),
        pytest.param("program.shared_pool()", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("program.Pool(2)", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("program.Pool(2, jailed=False)", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_no_process_outlives_its_trainer(pool: str, sign: signal.Signals) -> None:
    """kill -9, Ctrl-C and kill, in the middle of endless strategies.

    Ctrl-C used to wait for all that was being played; here it ends at once, long before the 40 strategies are through.
    """
    if pool == "program.shared_pool()" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("the shared pool has one worker per core")
    process, processes = trainer(pool)
    process.send_signal(sign)
    process.communicate(timeout=20)
    assert process.returncode == -sign
    assert wait_until(lambda: not any(map(alive, processes)))


def players_of(process: int) -> set[int]:
    """The players below a trainer: children of children of its workers."""
    below = {process}
    for _ in range(3):
        below = {pid for parent in below for pid in descendants(parent) if helpers.read_stat(pid)[1] == parent}
    return below


def test_a_worker_leaves_with_its_trainer_while_a_player_thinks() -> None:
    """A worker that waits for a move reads no input, and its player's limits may allow minutes.

    Here the players are stopped, so they use no time and never answer.
    """
    process, processes = trainer("program.Pool(2)")

    def are_stopped() -> bool:
        players = players_of(process.pid)
        for player in players:
            with contextlib.suppress(ProcessLookupError):
                os.kill(player, signal.SIGSTOP)
        return [helpers.read_stat(player)[0] for player in players] == ["T", "T"]

    assert wait_until(are_stopped)
    processes |= descendants(process.pid)
    process.kill()
    assert wait_until(lambda: not any(map(alive, processes)))
    process.communicate()


def test_no_process_outlives_a_trainer_that_closes_nothing() -> None:
    """Workers of a pool that nobody closed end when their input ends."""
    code = """
import os
from tests import helpers
import gpt_2048_rl as program
pools = [program.Pool(1), program.shared_pool()]
print(*helpers.descendants(os.getpid()))
"""
    done = run_python(code)
    processes = set(map(int, done.stdout.split()))
    assert len(processes) >= 4
    assert done.stderr == ""
    assert wait_until(lambda: not any(map(alive, processes)))


LEAVES = """
import threading, time
import gpt_2048_rl as program
pool = program.shared_pool()
jobs = [program.Job("def strategy(board):\\n    while True: pass #" + str(i), (1, 2)) for i in range(400)]
threading.Thread(target=pool.judge, args=(jobs,), daemon=True).start()
time.sleep(0.5)
{end}
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "raise KeyboardInterrupt"])
def test_leaving_does_not_wait_for_games(end: str) -> None:
    """concurrent.futures plays the whole queue before Python may end: these games would take minutes."""
    assert run_python(LEAVES.format(end=end)).returncode == (0 if not end else -signal.SIGINT)


def test_a_closed_pool_takes_no_jobs(lone: Pool) -> None:
    """It raises; it does not invent a verdict."""
    lone.close()
    with pytest.raises(RuntimeError):
        play(lone, HONEST)


# ---------------------------------------------------------------------------------------------------------------------
# Failures on the way


def test_a_worker_killed_while_idle_is_replaced(lone: Pool) -> None:
    """The next job does not notice."""
    (pid,) = {worker._process.pid for worker in lone._workers}
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not alive(pid))
    assert answers_right(lone)


def test_a_zygote_killed_while_idle_is_replaced(lone: Pool) -> None:
    """The next job used to end its worker, and got an "error" for it."""
    (worker,) = lone._workers
    (zygote,) = descendants(worker._process.pid)
    os.kill(zygote, signal.SIGKILL)
    assert wait_until(lambda: not alive(zygote))
    assert answers_right(lone)
    assert descendants(worker._process.pid).isdisjoint({zygote})


SLOW = "def strategy(board):\n    for _ in range(8_000_000): pass\n    return 'x'"


@pytest.mark.parametrize(
    ("victim", "outcome"),
    [
        pytest.param("worker", "invalid_move", marks=pytest.mark.slow),
        pytest.param("zygote", "invalid_move", marks=pytest.mark.slow),
        ("player", "error"),
    ],
)
def test_a_process_killed_during_a_game(lone: Pool, victim: str, outcome: str) -> None:
    """No program can end its referee or its zygote, so the game is played with new ones: it was charged as "error".
    A player may have ended itself, so its game is not tried again.  One that ends before it is jailed has not: so this
    waits for one that plays.
    """
    results: list[GameResult] = []
    thread = threading.Thread(target=lambda: results.extend(play(lone, SLOW, timeout=60)))
    thread.start()
    (worker,) = {worker._process.pid for worker in lone._workers}
    assert wait_until(lambda: len(descendants(worker)) == 2)
    zygote, player = sorted(descendants(worker), key=lambda pid: helpers.read_stat(pid)[1] != worker)
    assert wait_until(lambda: time.clock_gettime((~player << 3) | 2) > 0.05)  # its CPU time: see clock_getcpuclockid(3)
    os.kill({"worker": worker, "zygote": zygote, "player": player}[victim], signal.SIGKILL)
    thread.join(60)
    assert [result.outcome for result in results] == [outcome]
    assert answers_right(lone)


ON_A_WORKER = """
import json, os, resource, signal, sys, threading, time
import {modules}
import gpt_2048_rl as program
from tests import helpers
if os.geteuid() == 0:  # root may fork in spite of limits
    {ordinary}
{code}
"""


def on_a_worker(code: str) -> subprocess.CompletedProcess[str]:
    """Run a script as an ordinary user."""
    return run_python(ON_A_WORKER.format(modules=", ".join(program.PRELOADED), ordinary=ORDINARY, code=code))


FULL = """
referee = program.Referee()
before = resource.getrlimit(resource.RLIMIT_NPROC)
limit = lambda most: resource.prlimit(referee._zygote_pid, resource.RLIMIT_NPROC, (most, before[1]))
limit(0)
threading.Timer(1, limit, [before[0]]).start()
began = time.monotonic()
works, (result,) = referee.play("def strategy(board): return 'a'", program.Job("", (1,)))
print(works, result.outcome, time.monotonic() - began > 0.9)
"""


def test_a_fork_that_fails_is_tried_again() -> None:
    """With no process left for a moment, an honest program earned "none" and "error"."""
    done = on_a_worker(FULL)
    assert done.stdout == "load stuck True\n", done.stderr


NO_PROCESS = """
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
program.worker_main(0, True)
"""


def test_a_worker_without_processes_does_not_blame_the_jail() -> None:
    """It ends, and the trainer says to free memory or to allow processes.  It advised --unsafe-no-jail."""
    done = on_a_worker(NO_PROCESS)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


DEAD_ZYGOTE = """
players, begin = [], program._PlayerProcess.__init__
def begins(self, zygote, *arguments):
    if players:  # not that of the canary
        (child,) = helpers.descendants(os.getpid())
        os.kill(child, signal.SIGKILL)
    players.append(self)
    begin(self, zygote, *arguments)
program._PlayerProcess.__init__ = begins
program.worker_main(0, True)
"""


def test_a_worker_whose_zygote_is_gone_ends_without_a_traceback() -> None:
    """It ended with one, and the job was charged for it."""
    job = json.dumps(dataclasses.asdict(Job(HONEST, (1,)))) + "\n"
    code = "import os, signal\nimport gpt_2048_rl as program\nfrom tests import helpers\n" + DEAD_ZYGOTE
    done = run_python(code, input=job)
    assert done.stdout.splitlines() == ['{"refusal": ""}', '{"begun": true}']
    assert (done.returncode, done.stderr) == (1, "")


def test_a_text_that_ends_the_parser_is_charged_at_once(lone: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal is the worker's own, and the next worker would get it too."""
    began: list[str] = []
    begin = program._Worker._begin

    def die(worker: program._Worker, line: str, seconds: float) -> None:
        began.append(line)
        os.kill(worker._process.pid, signal.SIGSTOP)
        worker._socket.sendall(line.encode())
        os.kill(worker._process.pid, signal.SIGVTALRM)
        os.kill(worker._process.pid, signal.SIGCONT)

    monkeypatch.setattr(program._Worker, "_begin", die)
    (result,) = play(lone, HONEST)
    assert (result.outcome, result.detail) == ("error", "the text ends Python's parser")
    assert len(began) == 1
    monkeypatch.setattr(program._Worker, "_begin", begin)
    assert answers_right(lone)


def test_a_text_that_takes_too_much_to_read_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python notices it, the worker lives on; otherwise three would die, and the training with them."""

    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(program, "extract_function", fails)
    referee: Any = None  # is not asked
    verdict = program._judge_in_worker(referee, Job("", (1,), completion=True))
    assert (verdict.works, verdict.results[0].outcome) == ("none", "error")
    assert verdict.results[0].detail == "the text cannot be read (MemoryError)"


def test_workers_that_die_again_and_again_are_nobodys_fault(lone: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer is told; the program gets no verdict that it did not earn."""
    begin = program._Worker._begin

    def die(worker: program._Worker, line: str, seconds: float) -> None:
        begin(worker, line, seconds)
        os.kill(worker._process.pid, signal.SIGKILL)

    monkeypatch.setattr(program._Worker, "_begin", die)
    with pytest.raises(UsageError, match="3 referees in a row died"):
        play(lone, FOR_EVER)


@pytest.mark.parametrize(
    "source",
    [HONEST, pytest.param("#" * 500_000 + "\n" + HONEST, marks=pytest.mark.slow)],
    ids=["short", "long"],
)
def test_a_worker_that_stands_still_is_replaced(lone: Pool, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """The trainer waited without limit: for the verdict, or for its own send if no buffer holds the job."""
    (pid,) = {worker._process.pid for worker in lone._workers}
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(Job, "wall_seconds", lambda job: 1.0)
    assert play(lone, source)[0].outcome in ("success", "error")  # the source is too long
    monkeypatch.undo()
    assert answers_right(lone)


def test_a_worker_whose_memory_a_text_has_filled_is_replaced() -> None:
    """From Python 3.12 on, names that were parsed stay.  After 60 texts full of new ones, no other text had a verdict
    but `error`, and the worker went on.  How large the process is that starts it says nothing.
    """
    ballast, names = b"x" * program.LIMITS.worn_bytes, ";".join(f"n{i:x}" for i in range(70_000))
    with Pool(1) as pool:
        (worker,) = pool._workers
        before = worker._process.pid
        assert answers_right(pool)
        assert worker._process.pid == before
        (verdict,) = pool.judge([Job(f"```python\n{names}\n```", (1,), completion=True)])
        assert verdict.works == "none"
        assert answers_right(pool)
        after = worker._process.pid
        assert before != after
        assert answers_right(pool)
        assert worker._process.pid == after
    assert ballast


def test_a_job_is_not_blamed_for_a_worker_that_was_dying(lone: Pool) -> None:
    """Six of twelve harmless jobs were blamed for a death that another job had caused."""
    for _ in range(3):
        os.kill(lone._workers[0]._process.pid, signal.SIGKILL)
        assert answers_right(lone)


STANDS_STILL = """
import dataclasses, os, signal
import gpt_2048_rl as program
referee = program.Referee()
program.LIMITS = dataclasses.replace(program.LIMITS, control_seconds=0.2)
os.kill(referee._zygote_pid, signal.SIGSTOP)
try:
    referee.play("def strategy(board): return 'a'", program.Job("", (1,)))
except TimeoutError:
    print("gave up")
"""


def test_a_referee_gives_up_on_a_zygote_that_stands_still() -> None:
    """It waited for ever on the control socket.  Now the worker ends, and the trainer starts another."""
    assert run_python(STANDS_STILL).stdout == "gave up\n"


@pytest.mark.slow
def test_training_goes_on_where_a_worker_cannot_be_replaced_at_once(
    pool: Pool, lone: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory or processes may be short for a moment: one failed start ended the training."""
    start, failures = program._Worker._start, [OSError(errno.EAGAIN, "fork"), JailError("died at its start")]

    def fails_at_first(worker: program._Worker) -> None:
        if failures:
            raise failures.pop()
        start(worker)

    monkeypatch.setattr(program._Worker, "_start", fails_at_first)
    os.kill(lone._workers[0]._process.pid, signal.SIGKILL)
    assert wait_until(lambda: not alive(lone._workers[0]._process.pid))
    assert answers_right(lone)
    assert failures == []


@pytest.mark.slow
def test_an_error_of_one_job_closes_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the games of all other threads.  And what is lack of memory was said to be the jail's failure."""
    with Pool(2) as pool:
        with monkeypatch.context() as broken:
            broken.setattr(program._Worker, "_start", no_memory)
            for worker in pool._workers:
                broken.setattr(worker, "_start_seconds", 1.0)
                os.kill(worker._process.pid, signal.SIGKILL)
                assert wait_until(lambda worker=worker: not alive(worker._process.pid))  # type: ignore[misc]
            with pytest.raises(WorkerError, match=r"Cannot allocate memory.*: free memory") as raised:
                answers_right(pool)
        assert "unsafe" not in str(raised.value)
        assert answers_right(pool)


def no_memory(worker: program._Worker) -> None:
    """As fork fails where memory is short."""
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_a_text_that_is_too_long_to_read_is_sent_to_no_worker(lone: Pool) -> None:
    """With 800 MB, a worker died over it, and so did those after it."""
    before = lone._workers[0]._process.pid
    long, short = Job(HONEST + "#" * program.LIMITS.text_chars, (1, 2)), Job(HONEST, (1,), target=8)
    first, second = lone.judge([long, short])
    assert (first.works, [result.outcome for result in first.results]) == ("none", ["no_function"] * 2)
    assert second.results[0].outcome == "success"
    assert lone._workers[0]._process.pid == before


# ---------------------------------------------------------------------------------------------------------------------
# Jobs


def test_pool_from_many_threads(pool: Pool) -> None:
    """Verdicts reach the thread that asked for them."""
    wrong: list[int] = []

    def ask(seed: int) -> None:
        source = f'def strategy(board):\n    raise ValueError("thread {seed}")'
        results = play(pool, source, seed)
        if (results[0].seed, results[0].detail) != (seed, f"ValueError: thread {seed}"):
            wrong.append(seed)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_job_of_another_thread_goes_to_an_idle_worker() -> None:
    """A server's sessions each have one answer; all of them waited for the first worker."""

    def play_until_closed() -> None:
        with contextlib.suppress(RuntimeError):
            play(pool, FOR_EVER, 1, timeout=60.0)

    with Pool(2) as pool:
        busy = threading.Thread(target=play_until_closed, daemon=True)
        busy.start()
        assert wait_until(lambda: any(worker._turn.locked() for worker in pool._workers))
        assert answers_right(pool)
        assert busy.is_alive()


def test_verdicts_come_in_the_order_of_the_jobs(pool: Pool) -> None:
    """Even if some take longer.  Equal jobs are judged once."""
    keys = ["é", "x", "a", "x", "u"]
    sources = [f'def strategy(board):\n    return "{key}"' for key in keys]
    results = execute_strategies(sources, (5, 6), pool=pool)
    assert [[r.seed for r in rs] for rs in results] == [[5, 6]] * 5
    assert [rs[0].outcome == "invalid_move" for rs in results] == [key == "x" for key in keys]


def test_more_boards_than_one_job_takes(pool: Pool) -> None:
    """37 boards are split over several jobs; the results come in the order of the seeds."""
    seeds = tuple(range(100, 137))
    results = play(pool, HONEST, *seeds, target=64)
    assert [result.seed for result in results] == list(seeds)
    assert without_seconds([results[20]]) == without_seconds(play(pool, HONEST, 120, target=64))


def test_no_boards_no_results(pool: Pool) -> None:
    """Nothing to play."""
    assert execute_strategies([HONEST, ""], (), pool=pool) == [[], []]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [({"size": 1}, "size"), ({"target": 3}, "target"), ({"keys": "x"}, "keys"), ({"timeout": 0}, "timeout"),
     ({"timeout": float("nan")}, "timeout"), ({"seeds": (1.5,)}, "seeds"), ({"seeds": (True,)}, "seeds")],
)  # fmt: skip
def test_a_job_refuses_what_cannot_be_played(arguments: dict[str, object], name: str) -> None:
    """In the trainer, before anything is sent to a worker."""
    with pytest.raises(ValueError, match=f"^{name} "):
        Job(**{"text": HONEST, "seeds": (0,), **arguments})  # type: ignore[arg-type]
