"""The jailed players: what the jail lets through, where it holds, what becomes of processes, and what games share."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest

import gpt_2048_rl as program
from gpt_2048_rl import GameResult, Job, Pool, execute_strategies, seccomp_filter
from tests import helpers
from tests.conftest import AS_ROOT, ON_X86
from tests.helpers import FOR_EVER, HONEST, ORDINARY, alive, descendants, run_python, wait_until, without_seconds

MACHINE = os.uname().machine
MAPPING = (0, 4096, 3, 0x20, 0, 0)  # arguments that no condition forbids


@pytest.fixture
def lone() -> Iterator[Pool]:
    """A pool of one worker, for tests that kill parts of it."""
    with Pool(1) as pool:
        yield pool


def play(pool: Pool, source: str, *seeds: int, timeout: float = 5.0, target: int = 256) -> list[GameResult]:
    return execute_strategies([source], seeds or (0,), target=target, timeout=timeout, pool=pool)[0]


def answers_right(pool: Pool) -> bool:
    """Whether the pool gives what any pool gives: the results of a fixed strategy on fixed boards."""
    results = play(pool, 'def strategy(board):\n    return "a"\n', 1, 2)
    return [(r.outcome, r.steps, r.max_tile) for r in results] == [("stuck", 81, 8), ("stuck", 76, 8)]


# ---------------------------------------------------------------------------------------------------------------------
# The filter


@pytest.mark.parametrize("machine", program.SYSTEM_CALLS)
def test_filter_allows_exactly_the_list(machine: str) -> None:
    """In a simulator of the filter, for both machines: 0 to 1023, and numbers around the edges of 32 bits."""
    code, architecture = seccomp_filter(machine), program._AUDIT_ARCH[machine]
    numbers = [*range(1024), (1 << 30) - 1]
    answers = {number: helpers.simulate(code, architecture, number, MAPPING) for number in numbers}
    allowed = {number for number, answer in answers.items() if answer == helpers.ALLOW}
    assert allowed == set(program.SYSTEM_CALLS[machine].values())
    assert {answers[number] for number in numbers if number not in allowed} == {helpers.ERRNO | errno.EPERM}


@pytest.mark.parametrize("machine", program.SYSTEM_CALLS)
def test_filter_kills_another_architecture(machine: str) -> None:
    """Numbers mean other calls there (i386: 0x40000003, and the other machine's own)."""
    own = program._AUDIT_ARCH[machine]
    for architecture in (set(program._AUDIT_ARCH.values()) | {0x40000003, 0x40000028, 0}) - {own}:
        answers = {helpers.simulate(seccomp_filter(machine), architecture, n, MAPPING) for n in range(1024)}
        assert answers == {helpers.KILL}


def test_filter_kills_x32() -> None:
    """The x32 calls have the architecture of x86-64 and bit 30 in their numbers."""
    code, architecture = seccomp_filter("x86_64"), program._AUDIT_ARCH["x86_64"]
    numbers = [base + n for base in (1 << 30, 1 << 31, (1 << 32) - 1024) for n in range(1024)]
    assert {helpers.simulate(code, architecture, number, MAPPING) for number in numbers} == {helpers.KILL}


@pytest.mark.parametrize("machine", program.SYSTEM_CALLS)
@pytest.mark.parametrize(
    ("protection", "flags", "allowed"),
    [(3, 0x22, True), (0, 0x22, True), (3, 0x20022, True), (3, 0x4022, True), (7, 0x22, False), (4, 0x22, False),
     (5, 0x22, False), (3, 0x02, False), (1, 0x01, False), (3, 0x12, False), (7, 0x02, False),
     (0x1_0000_0003, 0x22, True), (3, 0x21, False), (1, 0x21, False), (3, 0x23, False), (3, 0x40022, False),
     (3, 0x8022, False), (3, 0x2022, False), (3, 0x122, False)],
)  # fmt: skip
def test_filter_allows_only_private_data_mappings(machine: str, protection: int, flags: int, allowed: bool) -> None:
    """Anonymous (0x20) and private (2), nothing executable (PROT_EXEC, 4), no huge pages and nothing locked.

    Shared ones were allowed: what is unmapped but for a page stays in the machine's memory, past every limit.
    """
    arguments = (0, 4096, protection, flags, 3, 0)
    number = program.SYSTEM_CALLS[machine]["mmap"]
    answer = helpers.simulate(seccomp_filter(machine), program._AUDIT_ARCH[machine], number, arguments)
    assert answer == (helpers.ALLOW if allowed else helpers.ERRNO | errno.EPERM)


@pytest.mark.parametrize("machine", program.SYSTEM_CALLS)
@pytest.mark.parametrize(
    ("call", "arguments", "allowed"),
    [("mmap", (0, 4096, 3, 0x22), True), ("mmap", (1 << 40, 4096, 3, 0x22), False),
     ("mmap", (4096, 4096, 3, 0x22), False), ("mremap", (4096, 4096, 8192, 1), True),
     ("mremap", (4096, 4096, 8192, 3), False), ("mremap", (4096, 4096, 4096, 5), False),
     ("clock_gettime", (0,), True), ("clock_gettime", (2,), True), ("clock_gettime", (2**32 - 6,), False),
     ("clock_gettime", (2**64 - 6,), False), ("clock_gettime", ((~1 << 3 | 2) % 2**32,), False)],
)  # fmt: skip
def test_filter_looks_at_arguments(machine: str, call: str, arguments: tuple[int, ...], allowed: bool) -> None:
    """No address is chosen: a page every 2 GB took 457 MB of page tables, beside all limits.

    And no other process's CPU clock is read: two players of a batch could have signalled to each other by it.
    """
    padded = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    number = program.SYSTEM_CALLS[machine][call]
    answer = helpers.simulate(seccomp_filter(machine), program._AUDIT_ARCH[machine], number, padded)
    assert answer == (helpers.ALLOW if allowed else helpers.ERRNO | errno.EPERM)


# ---------------------------------------------------------------------------------------------------------------------
# The jail, in real processes

EXPECTED = set(program.SYSTEM_CALLS.get(MACHINE, {}).values())
SWEEP = "import json, os; from tests import helpers; {prepare}; print(json.dumps([os.geteuid(), helpers.sweep()]))"


@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param("pass", id="as it is"),
        pytest.param(ORDINARY, id="ordinary user", marks=AS_ROOT),
        pytest.param("helpers.install_docker_profile()", id="Docker profile", marks=ON_X86),
        pytest.param(f"helpers.install_docker_profile(); {ORDINARY}", id="both", marks=[AS_ROOT, ON_X86]),
    ],
)
def test_sweep_of_the_system_calls_finds_exactly_the_list(prepare: str) -> None:
    """From inside a jailed process, 0 to 1023: those that return something else than EPERM, or end the process."""
    done = run_python(SWEEP.format(prepare=prepare))
    assert done.returncode == 0, done.stderr
    user, reached = json.loads(done.stdout)
    assert user == (12345 if ORDINARY in prepare else os.geteuid())
    assert set(reached) - helpers.PROBES == EXPECTED


IN_JAIL = """
import ctypes, mmap, os, sys
import gpt_2048_rl as program
file = os.open(program.__file__, os.O_RDONLY)
child = os.fork()
if child == 0:
    parent = os.getppid()
    jail = program.Jail()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    program.limit_resources(10)
    jail.enter(parent)
    def call(*arguments):
        return ctypes.get_errno() if libc.syscall(*map(ctypes.c_long, arguments)) == -1 else 0
    os._exit({attempt})
print(os.waitpid(child, 0)[1])
"""


@ON_X86
@pytest.mark.parametrize(
    ("attempt", "status"),
    [
        ("call(9, 0, 4096, 3, 0x22, -1, 0)", 0),
        ("call(9, 0, 4096, 7, 0x22, -1, 0)", errno.EPERM << 8),
        ("call(9, 0, 4096, 5, 0x22, -1, 0)", errno.EPERM << 8),
        ("call(9, 0, 4096, 1, 0x02, file, 0)", errno.EPERM << 8),
        ("call(9, 0, 4096, 1, 0x01, file, 0)", errno.EPERM << 8),
        ("call(10, 0, 4096, 7)", errno.EPERM << 8),
        ("call((1 << 30) + 39)", signal.SIGSYS),
        ("call((1 << 30) + 1)", signal.SIGSYS),
    ],
    ids=["data", "writable code", "code", "private file", "shared file", "mprotect", "x32 getpid", "x32 write"],
)
def test_mappings_and_foreign_calls_in_a_real_jail(attempt: str, status: int) -> None:
    """What the simulator says of the filter, the kernel does."""
    done = run_python(IN_JAIL.format(attempt=attempt))
    assert (done.stdout.strip(), done.returncode) == (str(int(status)), 0), done.stderr


@AS_ROOT
def test_jail_gives_up_root() -> None:
    """A jailed process of root belongs to nobody, in all three user and group ids."""
    attempt = "0 if (os.getresuid, os.getresgid) else 1"
    code = IN_JAIL.replace("    jail.enter(parent)", "    jail._prctl = prctl\n    jail.enter(parent)").replace(
        "    parent =", "    prctl = lambda option, *_: seen(option)\n    parent ="
    )
    seen = textwrap.dedent("""
        def seen(option):  # the last thing that enter() does as an ordinary process is to switch seccomp on
            if option == 22:
                os._exit(0 if {*os.getresuid(), *os.getresgid()} == {65534} and not os.getgroups() else 1)
        """)
    done = run_python(seen + code.format(attempt=attempt))
    assert done.stdout.strip() == "0", done.stderr


WATCHED = f"""
import os, threading
import gpt_2048_rl as program
from pathlib import Path
from tests import helpers
{{prepare}}
with program.Pool(1) as pool:
    worker = pool._workers[0]._process.pid
    thread = threading.Thread(target=program.execute_strategies, args=([{FOR_EVER!r}], (1,)), kwargs=dict(pool=pool))
    thread.start()
    assert helpers.wait_until(lambda: len(helpers.descendants(worker)) == 2)
    zygote, player = sorted(helpers.descendants(worker), key=lambda pid: helpers.read_stat(pid)[1] != worker)
    seccomp = lambda: "Seccomp:\\t2" in Path(f"/proc/{{{{player}}}}/status").read_text()
    assert helpers.wait_until(seccomp)
    for name in ("oom_score_adj", "status"):
        print(Path(f"/proc/{{{{player}}}}/{{{{name}}}}").read_text())
    os.kill(player, 9)
    thread.join()
"""


@AS_ROOT
@pytest.mark.parametrize(
    ("prepare", "uid"), [("", 65534), ("helpers.enter_user_namespace()", 0)], ids=["root", "only uid 0"]
)
def test_a_player_is_worth_nothing_to_the_kernel(prepare: str, uid: int) -> None:
    """Nobody, no capability, the first to be ended where memory is short.

    Where setgroups was refused, as in a user namespace, the other two calls were not tried, and nothing was said: the
    player stayed uid 0 with all capabilities.
    """
    done = run_python(WATCHED.format(prepare=prepare).replace("{{", "{").replace("}}", "}"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "1000"
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert status["Uid"].split() == [str(uid)] * 4
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}


def test_resources_are_limited_for_good() -> None:
    """Memory, file size, processes, descriptors, core dumps: hard limits, as low as they can be."""
    code = """
import json, resource
import gpt_2048_rl as program
program.limit_resources(7)
print(json.dumps({n: resource.getrlimit(getattr(resource, "RLIMIT_" + n)) for n in
      ("AS", "FSIZE", "CORE", "NPROC", "NOFILE", "MEMLOCK", "CPU")}))
"""
    done = run_python(code)
    assert json.loads(done.stdout) == {
        "AS": [256 << 20] * 2, "FSIZE": [0, 0], "CORE": [0, 0], "NPROC": [0, 0], "NOFILE": [4, 4], "MEMLOCK": [0, 0],
        "CPU": [7, 8],
    }  # fmt: skip


PLAY = """
import os, sys
from tests import helpers
{prepare}
import gpt_2048_rl as program
with program.Pool(1, jailed={jailed}) as pool:
    print([r.outcome for r in program.execute_strategies(['def strategy(board): return "a"'], (1, 2), pool=pool)[0]])
"""


@AS_ROOT
def test_worker_works_as_an_ordinary_user() -> None:
    """Nothing of it needs root: referee, zygote and player of uid 12345, as the trainer would start them."""
    job = Job('def strategy(board): return "a"', (1, 2))
    modules = ", ".join(("os", "unicodedata", *program.ALLOWED_MODULES))  # root's interpreter may be closed to others
    before = f"import {modules}\nimport gpt_2048_rl as program"
    code = f"{before}\n{ORDINARY}\nprogram.worker_main(0, True)"
    done = run_python(code, input=json.dumps(dataclasses.asdict(job)) + "\n")
    start, begun, verdict = map(json.loads, done.stdout.splitlines())
    assert (start, begun) == ({"refusal": ""}, {"begun": True})
    assert [result["outcome"] for result in verdict["results"]] == ["stuck", "stuck"]


@ON_X86
def test_pool_works_under_dockers_profile() -> None:
    """A filter of the container's lies under the jail's own."""
    done = run_python(PLAY.format(prepare="helpers.install_docker_profile()", jailed=True))
    assert done.stdout.strip() == "['stuck', 'stuck']", done.stderr


@pytest.mark.parametrize(
    ("error", "says"),
    [(errno.EPERM, "Operation not permitted"), (errno.EINVAL, "Invalid argument"), (0, "the player's process ended")],
    ids=["refused", "unknown", "only pretended"],
)
def test_pool_refuses_where_the_jail_cannot_hold(error: int, says: str) -> None:
    """No seccomp, or one that says yes and does nothing: one clear line, because a player proves its jail first."""
    prepare = f"helpers.install_filter_on_seccomp({error})"
    code = PLAY.format(prepare=prepare, jailed=True)
    refused = f"try:\n{textwrap.indent(code, '    ')}\nexcept program.JailError as error:\n    print(error)\n"
    done = run_python(refused)
    assert "cannot be jailed here (a player could not be jailed: " in done.stdout, done.stderr
    assert says in done.stdout
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


def test_pool_without_the_jail_works_where_there_is_no_seccomp() -> None:
    """What --unsafe-no-jail asks for."""
    done = run_python(PLAY.format(prepare=f"helpers.install_filter_on_seccomp({errno.EPERM})", jailed=False))
    assert done.stdout.strip() == "['stuck', 'stuck']", done.stderr


def test_a_zygote_that_cannot_start_says_why() -> None:
    """Its reason reaches the trainer as the one line of the JailError; it used to be lost."""
    code = """
import gpt_2048_rl as program
program.ALLOWED_MODULES = ("no_such_module",)
try:
    program.Referee()
except program.JailError as error:
    print(error)
"""
    assert "(ModuleNotFoundError: No module named 'no_such_module')" in run_python(code).stdout


def test_a_refused_pool_leaves_no_process() -> None:
    """The workers that had started are ended."""
    prepare = f"helpers.install_filter_on_seccomp({errno.EPERM})"
    code = "import os\nimport gpt_2048_rl as program\nfrom tests import helpers\n" + textwrap.dedent(f"""
        {prepare}
        try:
            program.Pool(3)
        except program.JailError:
            print(helpers.wait_until(lambda: not helpers.descendants(os.getpid())))
        """)
    assert run_python(code).stdout.strip() == "True"


# ---------------------------------------------------------------------------------------------------------------------
# Processes


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
        ("program.shared_pool()", signal.SIGTERM),
        ("program.Pool(2)", signal.SIGINT),
        ("program.Pool(2, jailed=False)", signal.SIGKILL),
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
    """A pool that is not closed when the program ends: its workers find their input at its end."""
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


@pytest.mark.parametrize("victim", ["worker", "zygote", "player"])
def test_a_process_killed_during_a_game(lone: Pool, victim: str) -> None:
    """Its strategy gets "error", and the next one right answers; a killed player is not tried again on one board."""
    results: list[GameResult] = []
    thread = threading.Thread(target=lambda: results.extend(play(lone, FOR_EVER, timeout=60)))
    thread.start()
    (worker,) = {worker._process.pid for worker in lone._workers}
    assert wait_until(lambda: len(descendants(worker)) == 2)
    zygote, player = sorted(descendants(worker), key=lambda pid: helpers.read_stat(pid)[1] != worker)
    os.kill({"worker": worker, "zygote": zygote, "player": player}[victim], signal.SIGKILL)
    thread.join(20)
    assert [result.outcome for result in results] == ["error"]
    assert answers_right(lone)


@pytest.mark.parametrize("source", [HONEST, "#" * 10_000_000 + "\n" + HONEST], ids=["short", "long"])
def test_a_worker_that_stands_still_is_replaced(lone: Pool, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """The trainer waited without a limit, for its verdict and, with a job that no buffer holds, for its own send."""
    (pid,) = {worker._process.pid for worker in lone._workers}
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(Job, "wall_seconds", lambda job: 1.0)
    assert play(lone, source)[0].outcome in ("success", "error")  # the source is too long
    monkeypatch.undo()
    assert answers_right(lone)


def test_a_job_is_not_blamed_for_a_worker_that_was_dying(lone: Pool) -> None:
    """Six of twelve harmless jobs got "the referee's process ended over it" for what another had begun."""
    for _ in range(3):
        os.kill(lone._workers[0]._process.pid, signal.SIGKILL)
        assert answers_right(lone)


LEAVES = """
import threading, time
import gpt_2048_rl as program
pool = program.shared_pool()
jobs = [program.Job("def strategy(board):\\n    while True: pass #" + str(i), (1, 2)) for i in range(400)]
threading.Thread(target=pool.judge, args=(jobs,), daemon=True).start()
time.sleep(0.5)
{end}
"""


@pytest.mark.parametrize("end", ["", "raise KeyboardInterrupt"])
def test_leaving_does_not_wait_for_games(end: str) -> None:
    """concurrent.futures plays the whole queue before Python may end: these games would take minutes."""
    assert run_python(LEAVES.format(end=end)).returncode == (0 if not end else -signal.SIGINT)


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
    """It waited for ever on the control socket; as a worker it ends, and the trainer starts another."""
    assert run_python(STANDS_STILL).stdout == "gave up\n"


def test_a_future_without_a_verdict_ends_the_pool(lone: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A last resort, should a thread of the trainer itself stand still."""
    monkeypatch.setattr(program, "LIMITS", dataclasses.replace(program.LIMITS, start_seconds=0.1))
    monkeypatch.setattr(Job, "wall_seconds", lambda job: 0.1)
    monkeypatch.setattr(program._Worker, "judge", lambda worker, job: time.sleep(2))
    with pytest.raises(program.JailError, match="no verdict"):
        play(lone, HONEST)


def test_training_goes_on_where_a_worker_cannot_be_replaced_at_once(
    pool: Pool, lone: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory or processes may be short for a moment: one failed start ended the training."""
    start, failures = program._Worker._start, [OSError(errno.EAGAIN, "fork"), program.JailError("died at its start")]

    def fails_at_first(worker: program._Worker) -> None:
        if failures:
            raise failures.pop()
        start(worker)

    monkeypatch.setattr(program._Worker, "_start", fails_at_first)
    os.kill(lone._workers[0]._process.pid, signal.SIGKILL)
    assert wait_until(lambda: not alive(lone._workers[0]._process.pid))
    assert answers_right(lone)
    assert failures == []


def test_a_closed_pool_takes_no_jobs(lone: Pool) -> None:
    """Rather an exception than a verdict that nobody gave."""
    lone.close()
    with pytest.raises(RuntimeError):
        play(lone, HONEST)


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


def test_verdicts_come_in_the_order_of_the_jobs(pool: Pool) -> None:
    """Also where some take longer, and equal jobs are judged once."""
    keys = ["é", "x", "a", "x", "u"]
    sources = [f'def strategy(board):\n    return "{key}"' for key in keys]
    results = execute_strategies(sources, (5, 6), pool=pool)
    assert [[r.seed for r in rs] for rs in results] == [[5, 6]] * 5
    assert [rs[0].outcome == "invalid_move" for rs in results] == [key == "x" for key in keys]


# ---------------------------------------------------------------------------------------------------------------------
# Games


GAMES = {
    "random moves": HONEST,
    "a constant": """
def strategy(board):
    return "a"
""",
    "state in a global": """
n = 0
def strategy(board):
    global n
    n += 1
    return 'auié'[n % 4]""",
    "state in a mutable default": """
def strategy(board, n=[]):
    n.append(0)
    return 'auié'[len(n) % 4]""",
    "state in an attribute of the function": """
def strategy(board):
    strategy.n = getattr(strategy, "n", 0) + 1
    return "auié"[strategy.n // 3 % 4]""",
    "state in a module": """
import math, collections
def strategy(board):
    math.n = getattr(math, "n", 0) + 1
    return "auié"[math.n // 2 % 4]""",
    "state in the builtins": """
def strategy(board):
    __builtins__["n"] = __builtins__.get("n", 0) + 1
    return "auié"[n // 2 % 4]""",
    "state in a class": """
class A:
    n = 0
def strategy(board):
    A.n += 1
    return "auié"[A.n // 2 % 4]""",
    "state in a closure and a cache": """
import functools, itertools
count = itertools.count()
@functools.cache
def of(cell):
    return next(count)
def strategy(board):
    return "auié"[of(board[0][0] + 3 * board[5][5]) % 4]""",
    "reseeds random": """
import random
def strategy(board):
    random.seed(sum(map(sum, board)))
    return random.choice('auié')""",
    "a patched random": """
import random
def strategy(board):
    random.n = getattr(random, "n", 0) + 1
    random.random = lambda: random.n % 7 / 7
    return "auié"[int(random.random() * 4)]""",
    "Random of its own": """
import random
r = random.Random(7)
def strategy(board):
    return r.choice('auié')""",
    "Random without a seed": """
import random
r = random.Random()
def strategy(board):
    return r.choice('auié')""",
    "seed() without a seed": """
import random
random.seed()
def strategy(board):
    return random.choice('auié')""",
    "from random import": """
from random import choice, shuffle
def strategy(board):
    return choice('auié')""",
    "order of a set": """
def strategy(board):
    return next(iter({'a', 'u', 'i', 'é'} - {'auié'[sum(map(sum, board)) // 2 % 4]}))""",
    "writes into the board": """
def strategy(board):
    k = 'auié'[board[0][0] % 3]
    board[0][0] = 2048
    board.clear()
    return k""",
    "raises with the board in it": """
def strategy(board):
    if board[2][2]: raise ValueError(str(board))
    return 'a' if board[0][1] else 'u'""",
    "a wrong key with the board in it": """
def strategy(board):
    return str(board) if board[3][3] else 'aiué'[board[0][0] % 4]""",
    "ends the process on one board": """
import random
def strategy(board):
    if board[1][1]: random._os._exit(3)
    return random.choice('auié')""",
    "kills the stack on one board": """
import random
def strategy(board):
    if board[1][2] > 2:
        random._os.sys.setrecursionlimit(10 ** 9)
        f = lambda x: sorted([x], key=f)
        f(0)
    return random.choice("auié")""",
    "eats memory on one board": """
def strategy(board):
    if board[1][1]: x = [0] * 10 ** 9
    return 'auié'[sum(map(sum, board)) // 2 % 4]""",
    "breaks the protocol on one board": """
import random
def strategy(board):
    if board[1][1]:
        random._os.closerange(0, 9)
        for fd in range(9):
            try: random._os.write(fd, b"")
            except OSError: pass
    return random.choice("auié")""",
}


@pytest.mark.parametrize("source", GAMES.values(), ids=GAMES.keys())
def test_games_of_one_job_equal_games_played_alone(pool: Pool, source: str) -> None:
    """Nothing that a strategy does in one game is seen in another, up to the text of its errors."""

    def comparable(results: list[GameResult]) -> list[GameResult]:
        # Python 3.12 adds where the stack ended: "while calling a Python object"
        return [dataclasses.replace(r, detail=r.detail.partition(" while ")[0]) for r in without_seconds(results)]

    seeds = (0, 1, 2, 3, 10, 11)
    alone = [play(pool, source, seed)[0] for seed in seeds]
    assert comparable(play(pool, source, *seeds)) == comparable(alone)


SHARED_PLACES = {
    "a class of the standard library": ("import collections", "collections.Counter"),
    "a module": ("import math", "math"),
    "a class in Python": ("import collections", "collections.UserList"),
    "an exception's class": ("import decimal", "decimal.InvalidOperation"),
    "an enum": ("import re", "re.RegexFlag"),
    "a function of a module": ("import copy", "copy.deepcopy"),
    "an abstract class": ("import numbers", "numbers.Number"),
    "random's class": ("import random", "random.Random"),
    "the interpreter's modules": ("import random", "random._os.sys"),
    "dataclasses": ("import dataclasses", "dataclasses.Field"),
    "the environment": ("import random", "random._os.environ.__class__"),
}


@pytest.mark.parametrize("place", SHARED_PLACES.values(), ids=SHARED_PLACES.keys())
def test_games_cannot_see_each_other(pool: Pool, place: tuple[str, str]) -> None:
    """A mark that one game leaves is not there in the next; "x" would be a wrong key.

    Four games shared a process: a program that counted its games and exited after two losses had all of them played
    again, and won 68% instead of 51%.
    """
    imports, where = place
    source = f"{imports}\nseen = hasattr({where}, 'mark')\n{where}.mark = 1\n" \
             "def strategy(board):\n    return 'x' if seen else 'a'"  # fmt: skip
    assert {result.outcome for result in play(pool, source, 1, 2, 3, 4)} == {"stuck"}


CARRIES = """
import random
sys = random._os.sys
frame, found = sys._getframe(), []
while frame:
    found += [(n, str(v)) for n, v in frame.f_locals.items() if n in ("status", "usage", "cpu")]
    frame = frame.f_back
first = found
def strategy(board):
    raise ValueError(first)
"""


def test_a_player_does_not_learn_how_the_last_one_fared(pool: Pool) -> None:
    """Its parent's variables held the exit status, CPU time and memory of the player before, another program's too."""
    details = {play(pool, source, 1)[0].detail for source in (HONEST, CARRIES, FOR_EVER, CARRIES) if source == CARRIES}
    assert details == {"ValueError: []"}


CLOCKS = """
import random
clock = random._os.sys.modules["time"].clock_gettime
def seen(pid):
    try: return clock((~pid << 3) | 2) >= 0
    except OSError: return False
def strategy(board):
    raise ValueError(sum(map(seen, range(1, 70000))))
"""


def test_a_player_reads_no_other_process_clock(pool: Pool) -> None:
    """By number it could read every process's CPU time in nanoseconds: its referee's, and other players'."""
    assert play(pool, CLOCKS, 1)[0].detail == "ValueError: 0"


WAYS_TO_DIE = {
    "exits": "os._exit(0)",
    "exits with a code": "os._exit(3)",
    "aborts": "os.abort()",
    "reads address 0": "os.sys.modules['ctypes'].string_at(0)",
    "closes its socket": "os.close(3)",
    "breaks the protocol": "os.write(3, b'lost')",
    "eats memory": "[0] * 10 ** 10",
    "overflows the stack": "os.sys.setrecursionlimit(10 ** 9); f = lambda x: sorted([x], key=f); f(0)",
    "waits on a lock": "l = os.sys.modules['_thread'].allocate_lock(); l.acquire(); l.acquire()",
    "raises": "1 / 0",
    "SystemExit": "raise SystemExit",
}


COUNTS = """
import json, sys
import gpt_2048_rl as program
players, begin = [], program._PlayerProcess.__init__
def counted(self, *arguments):
    players.append(self)
    begin(self, *arguments)
program._PlayerProcess.__init__ = counted
referee = program.Referee()
for source in json.loads(sys.argv[1]):
    players.clear()
    _, results = referee.play(source, program.Job(source, (1, 2, 3, 4)))
    print(json.dumps([len(players), [result.outcome for result in results]]))
"""


def test_a_game_is_played_once() -> None:
    """Whoever ends a game in the middle ends that game: one player for each of four boards, and no second try.

    All games of a process were replayed, also those already lost.
    """
    sources = [
        f"import random\nos, n = random._os, 0\ndef strategy(board):\n    global n\n    n += 1\n    if n > 3: {way}\n"
        "    return 'auié'[n % 4]"
        for way in WAYS_TO_DIE.values()
    ]
    done = run_python(COUNTS, json.dumps(sources))
    assert done.returncode == 0, done.stderr
    played = dict(zip(WAYS_TO_DIE, map(json.loads, done.stdout.splitlines()), strict=True))
    assert played == {way: [4, ["error"] * 4] for way in WAYS_TO_DIE}


RANDOM = {
    "SystemRandom": "random.SystemRandom().choice('éuai')",
    "SystemRandom kept": "system.choice('éuai')",
    "Random without a seed": "random.Random().choice('éuai')",
    "seed without a seed": "(random.seed(), random.choice('éuai'))[1]",
    "Random, seeded again": "(system.seed(), system.choice('éuai'))[1]",
    "a subclass": "Own().choice('éuai')",
    "the inherited method": "'éuai'[int(random.Random.random(system) * 4)]",
    "getrandbits": "'éuai'[random.SystemRandom().getrandbits(2)]",
    "shuffle": "(order := list('éuai'), random.SystemRandom().shuffle(order))[0][0]",
    "sample": "random.SystemRandom().sample('éuai', 1)[0]",
    "statistics": "'éuai'[int(abs(statistics.NormalDist().samples(1)[0]) * 9) % 4]",
}


@pytest.mark.parametrize("draw", RANDOM.values(), ids=RANDOM.keys())
def test_luck_is_the_boards_own(pool: Pool, draw: str) -> None:
    """SystemRandom drew from the kernel: no score could be repeated, and each replay had new luck."""
    source = f"""
import random, statistics
class Own(random.Random): pass
system = random.SystemRandom()
def strategy(board):
    return {draw}"""
    first, again = (without_seconds(play(pool, source, 1, 2)) for _ in range(2))
    assert first == again
    assert {result.outcome for result in first} <= {"success", "lost"}


@pytest.mark.parametrize(
    ("target", "moves", "seconds"),
    [(2048, 0, 5), (2048, 1000, 5), (2048, 2000, 10), (2048, 9000, 10.24), (256, 9000, 5), (65536, 1000, 5),
     (65536, 30_000, 150), (1 << 64, 10**6, 163.84)],
)  # fmt: skip
def test_time_grows_with_the_game(target: int, moves: int, seconds: float) -> None:
    """5 s for a thousand moves and 5 ms for each further one, up to the moves of a game to 65536.

    5 s for a whole game paid a search that reaches 65536 at 1 ms a move like a program that hangs.
    """
    assert Job("", (), target=target).cpu_seconds(moves) == pytest.approx(seconds)


def test_time_is_granted_as_moves_come(pool: Pool) -> None:
    """A slow program gets the time of the moves that it has made, and not in advance that of a whole game."""
    source = HONEST.replace("    return", "    for _ in range(50_000): pass\n    return")
    (result,) = play(pool, source, timeout=0.05, target=1 << 64)
    assert (result.outcome, result.detail) == ("timeout", f"more than 0.05 s of CPU time in {result.steps} moves")


def test_more_boards_than_one_job_takes(pool: Pool) -> None:
    """37 boards are split over several jobs; the results come in the order of the seeds."""
    seeds = tuple(range(100, 137))
    results = play(pool, HONEST, *seeds, target=64)
    assert [result.seed for result in results] == list(seeds)
    assert without_seconds([results[20]]) == without_seconds(play(pool, HONEST, 120, target=64))


@pytest.mark.parametrize("source", [GAMES["random moves"], GAMES["Random without a seed"], GAMES["order of a set"]])
def test_the_same_board_gives_the_same_result_in_every_pool(pool: Pool, lone: Pool, source: str) -> None:
    """A strategy's random numbers and the order of its sets are fixed, so that a reward can be worked out again."""
    assert without_seconds(play(pool, source, 1, 2, 3)) == without_seconds(play(lone, source, 1, 2, 3))


def test_every_board_has_random_numbers_of_its_own(pool: Pool) -> None:
    """Different first boards, different streams."""
    source = "import random\ndef strategy(board):\n    raise ValueError(random.random())"
    details = {result.detail for result in play(pool, source, *range(10))}
    assert len(details) == 10


def test_random_numbers_tell_nothing_of_the_boards_seed() -> None:
    """They come from the first board, which the player sees.

    They came from a hash of the seed: by trying all small numbers a strategy could find the seed, and with it every
    tile to come.
    """
    boards: dict[bytes, set[int]] = {}
    for seed in range(300):
        game = program.GameBoard(2, seed)
        boards.setdefault(game.flat(), set()).add(program._random_seed(game))
    assert len(boards) < 60
    assert {len(seeds) for seeds in boards.values()} == {1}


def test_the_players_process_does_not_hold_the_seed(pool: Pool) -> None:
    """A walk over all objects of its interpreter, from the collector's lists on, does not meet the board's seed."""
    seed = 918_273_645_546_372
    source = f"""
import random
def strategy(board):
    gc = random._os.sys.modules["gc"]
    gc.unfreeze()
    found = [type(o).__name__ for o in gc.get_objects() for r in gc.get_referents(o)
             if type(r) is int and r ^ 0xFFFF == {seed ^ 0xFFFF}
             or type(r) is str and str({seed ^ 0xFFFF} ^ 0xFFF0)[:-2] in r]
    raise ValueError(len(gc.get_objects()) > 5000, found)"""
    assert [result.detail for result in play(pool, source, seed)] == ["ValueError: (True, [])"]


def test_the_environment_inside_is_empty(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the trainer's environment, where people keep keys; what is left fixes hashes and encodings."""
    monkeypatch.setenv("SECRET", "1")
    source = "import random\ndef strategy(board):\n    raise ValueError(sorted(random._os.environ.items()))"
    with Pool(1) as own:
        (result,) = play(own, source)
    assert result.detail == "ValueError: [('LC_ALL', 'C.UTF-8'), ('PYTHONHASHSEED', '0')]"


def test_a_player_has_no_descriptor_but_its_socket(pool: Pool) -> None:
    """Not the trainer's files, not the standard streams, not the zygote's socket."""
    source = """
import random
def strategy(board):
    taken = []
    for fd in range(1024):
        try:
            random._os.write(fd, b"") if fd != 3 else None
            taken.append(fd)
        except OSError as error:
            if error.errno != 9: taken.append((fd, error.errno))
    raise ValueError(taken)"""
    assert play(pool, source)[0].detail == "ValueError: [3]"


def test_a_stopped_player_is_not_charged_for_the_wait(lone: Pool) -> None:
    """Limits count the CPU time of the player, not the wall clock: a busy machine changes no reward.

    The player is stopped in the middle of its first move for longer than a move may take.
    """
    source = "def strategy(board):\n    for _ in range(8_000_000): pass\n    return 'x'"
    results: list[GameResult] = []
    thread = threading.Thread(target=lambda: results.extend(play(lone, source)))
    thread.start()
    (worker,) = {worker._process.pid for worker in lone._workers}
    assert wait_until(lambda: len(descendants(worker)) == 2)
    player = max(descendants(worker), key=lambda pid: helpers.read_stat(pid)[1] != worker)
    os.kill(player, signal.SIGSTOP)
    time.sleep(1.5 * program.LIMITS.move_seconds)
    os.kill(player, signal.SIGCONT)
    thread.join(30)
    assert [result.outcome for result in results] == ["invalid_move"]


def test_seconds_are_the_players_cpu_time(pool: Pool) -> None:
    """A player that counts for long uses more than one that answers at once."""
    quick, slow = (f"def strategy(board):\n    for _ in range({n}): pass\n    return 'x'" for n in (1, 3_000_000))
    assert 0 < play(pool, quick, 1)[0].seconds < play(pool, slow, 1)[0].seconds


@pytest.mark.parametrize(
    ("size", "target", "keys"), [(2, 16, "wasd"), (3, 64, "zqsd"), (4, 128, "arrows"), (6, 32, "bepo"), (16, 8, "bepo")]
)
def test_games_are_what_the_engine_says(pool: Pool, size: int, target: int, keys: str) -> None:
    """A strategy that needs nothing but the board, played here by hand: same steps, tile, score and outcome."""
    letters = program.LAYOUTS[keys]
    source = f"def strategy(board):\n    return {letters!r}[sum(i * c for i, c in enumerate(sum(board, []))) // 2 % 4]"
    expected = []
    for seed in range(8):
        game, steps, idle = program.GameBoard(size, seed, target, keys=keys), 0, 0
        while game.state() == "ongoing" and idle < program.LIMITS.idle_moves:
            key = letters[sum(i * c for i, c in enumerate(itertools.chain(*game.board()))) // 2 % 4]
            idle = 0 if game.do_action(key) else idle + 1
            steps += 1
        outcome = {"success": "success", "failed": "lost", "ongoing": "stuck"}[game.state()]
        expected.append((seed, outcome, steps, game.max_tile(), game.score()))
    results = execute_strategies([source], range(8), size, target, keys, pool=pool)[0]
    assert [(r.seed, r.outcome, r.steps, r.max_tile, r.score) for r in results] == expected


def test_a_board_that_is_won_at_the_start(pool: Pool) -> None:
    """No move is asked for."""
    (result,) = execute_strategies([HONEST], (0,), target=2, pool=pool)[0]
    assert (result.outcome, result.steps) == ("success", 0)


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


MODULES = {
    "math": """
assert math.log2(8) == 3
assert math.isqrt(10) == 3
assert math.inf > 1""",
    "random": """
assert 0 <= random.random() < 1
assert random.randint(1, 3) in (1, 2, 3)
random.shuffle([1, 2])
assert random.choices('ab', [1, 0]) == ['a']
assert random.sample(range(9), 9)
assert random.gauss(0, 1) < 99""",
    "itertools": """
assert list(itertools.accumulate([1, 2])) == [1, 3]
assert len(list(itertools.product('ab', repeat=3))) == 8""",
    "functools": """
@functools.lru_cache(maxsize=9)
def f(x): return x + 1
assert f(1) == f(1) == 2
assert f.cache_info().hits
@functools.singledispatch
def g(x): return 0
@g.register
def _(x: int): return 1
assert (g(1), g('')) == (1, 0)
class A:
    @functools.cached_property
    def x(self): return 3
assert A().x == 3
assert functools.reduce(max, [1, 2]) == 2
assert functools.partial(max, 3)(2) == 3""",
    "collections": """
assert collections.Counter('aab').most_common(1) == [('a', 2)]
P = collections.namedtuple('P', 'x y', defaults=[0])
assert P(1)._replace(y=2) == (1, 2)
assert collections.deque([1], maxlen=1)
assert collections.defaultdict(list)[0] == []
assert collections.OrderedDict(a=1)""",
    "collections.abc": "assert isinstance([], collections.abc.Sequence)",
    "heapq": """
h = [3, 1]
heapq.heapify(h)
heapq.heappush(h, 0)
assert heapq.heappop(h) == 0
assert heapq.nlargest(1, h) == [3]
assert list(heapq.merge([1], [0])) == [0, 1]""",
    "copy": """
class A: pass
a = A()
a.x = [[1]]
b = copy.deepcopy(a)
b.x[0][0] = 2
assert a.x == [[1]]
assert copy.copy(a).x is a.x""",
    "operator": """
assert operator.itemgetter(1)([1, 2]) == 2
assert operator.mul(2, 3) == 6
assert operator.methodcaller('upper')('a') == 'A'""",
    "statistics": """
assert statistics.mean([1, 2]) == 1.5
assert statistics.median([3, 1, 2]) == 2
assert statistics.pstdev([1, 1]) == 0
assert statistics.NormalDist(0, 1).cdf(0) == 0.5
assert statistics.quantiles([1, 2, 3])""",
    "string": """
assert string.ascii_lowercase[0] == 'a'
assert string.Template('$x').substitute(x=1) == '1'
assert string.Formatter().format('{0:>3}', 1) == '  1'""",
    "re": """
assert re.findall('(?P<x>\\\\d+)', 'a1b22') == ['1', '22']
assert re.sub('a', 'b', 'aa', flags=re.I) == 'bb'
assert re.compile('é')""",
    "typing": """
class P(typing.NamedTuple):
    x: int
    y: typing.Optional[int] = None
assert P(1) == (1, None)
T = typing.TypeVar('T')
class G(typing.Generic[T]): pass
G[int]()
class D(typing.TypedDict):
    x: int
assert D(x=1)
assert typing.get_type_hints(P)
assert typing.cast(int, 1)
class Q(typing.Protocol): pass""",
    "dataclasses": """
@dataclasses.dataclass(order=True, frozen=True, slots=True)
class P:
    x: int
    y: list = dataclasses.field(default_factory=list)
assert P(1) < P(2)
assert dataclasses.replace(P(1), x=3).x == 3
assert dataclasses.asdict(P(1)) == {'x': 1, 'y': []}
assert dataclasses.make_dataclass('Q', ['a'])(1).a == 1""",
    "bisect": """
a = [1, 3]
bisect.insort(a, 2)
assert a == [1, 2, 3]
assert bisect.bisect_left(a, 2) == 1""",
    "enum": """
class M(enum.Enum):
    UP = 'é'
    DOWN = 'u'
assert M('é') is M.UP
assert M['UP'].value == 'é'
assert len(M) == 2
class F(enum.IntFlag):
    A = enum.auto()
    B = enum.auto()
assert F.A | F.B == 3""",
    "abc": """
class A(abc.ABC):
    @abc.abstractmethod
    def f(self): ...
class B(A):
    def f(self): return 1
assert B().f() == 1""",
    "numbers": """
assert isinstance(1, numbers.Integral)
assert isinstance(1.5, numbers.Real)""",
    "fractions": "assert fractions.Fraction(1, 3) + fractions.Fraction('1/6') == fractions.Fraction(1, 2)",
    "decimal": """
assert decimal.Decimal('0.1') * 3 == decimal.Decimal('0.3')
with decimal.localcontext() as c:
    c.prec = 5
    assert str(decimal.Decimal(2).sqrt()) == '1.4142'""",
}


def test_modules_are_all_tried() -> None:
    """One entry for each allowed module."""
    assert set(MODULES) == {*program.ALLOWED_MODULES, "collections.abc"}


@pytest.mark.parametrize("where", ["above", "inside", "future annotations"])
@pytest.mark.parametrize("module", MODULES)
def test_an_allowed_module_does_its_work(pool: Pool, module: str, where: str) -> None:
    """Imported and put to typical use, in a process that can open no file: at loading, within the function, and where
    annotations are strings (for which dataclasses wants the strategy's module to exist, and raised without it)."""
    use = f"import {module}\n{MODULES[module]}\n"
    if where == "inside":
        source = f"def strategy(board):\n{textwrap.indent(use, '    ')}\n    return 'a'"
    else:
        source = f"{use}\ndef strategy(board):\n    return 'a'"
    if where == "future annotations":
        source = f"from __future__ import annotations\n{source}"
    (result,) = play(pool, source)
    assert (result.outcome, result.detail) == ("stuck", "64 moves in a row changed nothing")


@pytest.mark.parametrize("use", ["clé = 1", "x = '\\N{SNOWMAN}'", "x = re.compile('(?i)É').match('é').group()"])
def test_what_python_itself_imports_is_there(pool: Pool, use: str) -> None:
    """The compiler asks for unicodedata at a name with an accent; in the jail it cannot be read from disk any more, and
    such a strategy counted as one that does not parse."""
    (result,) = play(pool, f"import re\ndef strategy(board):\n    {use}\n    return 'a'")
    assert (result.outcome, result.detail) == ("stuck", "64 moves in a row changed nothing")


@pytest.mark.parametrize("name", ["os", "sys", "time", "socket", "threading", "ctypes", "builtins", "gc", "numpy"])
def test_other_modules_cannot_be_imported(pool: Pool, name: str) -> None:
    """Also those that are long loaded in the player's process."""
    (result,) = play(pool, f"def strategy(board):\n    import {name}\n    return 'a'")
    assert result.outcome == "error"
    assert result.detail.startswith(f"ImportError: {name} may not be imported here")
