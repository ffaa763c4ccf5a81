"""The jail: which system calls its filter allows, what the kernel then refuses, and what a player can see and use."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import signal
import textwrap
import threading
import time

import pytest

import gpt_2048_rl as program
from gpt_2048_rl import GameResult, Job, Pool
from tests import helpers
from tests.conftest import AS_ROOT, ON_X86
from tests.helpers import FOR_EVER, HONEST, ORDINARY, descendants, play, run_python, wait_until
from toolkit.referee.jail import AUDIT_ARCH, SYSTEM_CALLS, seccomp_filter

MAPPING = (0, 4096, 3, 0x20, 0, 0)  # arguments that no condition forbids


# ---------------------------------------------------------------------------------------------------------------------
# The filter


@pytest.mark.parametrize("machine", SYSTEM_CALLS)
def test_filter_allows_exactly_the_list(machine: str) -> None:
    """Simulated, for both machines: calls 0 to 1023, and the largest number below those of x32."""
    code, architecture = seccomp_filter(machine), AUDIT_ARCH[machine]
    numbers = [*range(1024), (1 << 30) - 1]
    answers = {number: helpers.simulate(code, architecture, number, MAPPING) for number in numbers}
    allowed = {number for number, answer in answers.items() if answer == helpers.ALLOW}
    assert allowed == set(SYSTEM_CALLS[machine].values())
    assert {answers[number] for number in numbers if number not in allowed} == {helpers.ERRNO | errno.EPERM}


@pytest.mark.parametrize("machine", SYSTEM_CALLS)
def test_filter_kills_another_architecture(machine: str) -> None:
    """Numbers mean other calls there (i386: 0x40000003, and the other machine's own)."""
    own = AUDIT_ARCH[machine]
    for architecture in (set(AUDIT_ARCH.values()) | {0x40000003, 0x40000028, 0}) - {own}:
        answers = {helpers.simulate(seccomp_filter(machine), architecture, n, MAPPING) for n in range(1024)}
        assert answers == {helpers.KILL}


def test_filter_kills_x32() -> None:
    """The x32 calls have the architecture of x86-64 and bit 30 in their numbers."""
    code, architecture = seccomp_filter("x86_64"), AUDIT_ARCH["x86_64"]
    numbers = [base + n for base in (1 << 30, 1 << 31, (1 << 32) - 1024) for n in range(1024)]
    assert {helpers.simulate(code, architecture, number, MAPPING) for number in numbers} == {helpers.KILL}


@pytest.mark.parametrize("machine", SYSTEM_CALLS)
@pytest.mark.parametrize(
    ("protection", "flags", "allowed"),
    [(3, 0x22, True), (0, 0x22, True), (3, 0x20022, True), (3, 0x4022, True), (7, 0x22, False), (4, 0x22, False),
     (5, 0x22, False), (3, 0x02, False), (1, 0x01, False), (3, 0x12, False), (7, 0x02, False),
     (0x1_0000_0003, 0x22, True), (3, 0x21, False), (1, 0x21, False), (3, 0x23, False), (3, 0x40022, False),
     (3, 0x8022, False), (3, 0x2022, False), (3, 0x122, False)],
)  # fmt: skip
def test_filter_allows_only_private_data_mappings(machine: str, protection: int, flags: int, allowed: bool) -> None:
    """Anonymous (0x20) and private (2), nothing executable (PROT_EXEC, 4), no huge pages and nothing locked.

    Shared mappings were allowed: after unmapping all but a page, the rest stays in memory and no limit counts it.
    """
    arguments = (0, 4096, protection, flags, 3, 0)
    number = SYSTEM_CALLS[machine]["mmap"]
    answer = helpers.simulate(seccomp_filter(machine), AUDIT_ARCH[machine], number, arguments)
    assert answer == (helpers.ALLOW if allowed else helpers.ERRNO | errno.EPERM)


@pytest.mark.parametrize("machine", SYSTEM_CALLS)
@pytest.mark.parametrize(
    ("call", "arguments", "allowed"),
    [("mmap", (0, 4096, 3, 0x22), True), ("mmap", (1 << 40, 4096, 3, 0x22), False),
     ("mmap", (4096, 4096, 3, 0x22), False), ("mremap", (4096, 4096, 8192, 1), True),
     ("mremap", (4096, 4096, 8192, 3), False), ("mremap", (4096, 4096, 4096, 5), False),
     ("clock_gettime", (0,), True), ("clock_gettime", (2,), True), ("clock_gettime", (2**32 - 6,), False),
     ("clock_gettime", (2**64 - 6,), False), ("clock_gettime", ((~1 << 3 | 2) % 2**32,), False)],
)  # fmt: skip
def test_filter_looks_at_arguments(machine: str, call: str, arguments: tuple[int, ...], allowed: bool) -> None:
    """The kernel chooses addresses: a page every 2 GB took 457 MB of page tables, which no limit counts.

    Other processes' CPU clocks are unreadable: two players of a batch could have signalled through them.
    """
    padded = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    number = SYSTEM_CALLS[machine][call]
    answer = helpers.simulate(seccomp_filter(machine), AUDIT_ARCH[machine], number, padded)
    assert answer == (helpers.ALLOW if allowed else helpers.ERRNO | errno.EPERM)


# ---------------------------------------------------------------------------------------------------------------------
# The jail, in real processes

EXPECTED = set(SYSTEM_CALLS.get(os.uname().machine, {}).values())
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
    """A jailed process tries calls 0 to 1023.  Reached are those that end it or return anything but EPERM."""
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
    program.limit_resources(10, program.LIMITS.memory_bytes)
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
    """The kernel agrees with the simulator."""
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
    filters = lambda who: int(Path(f"/proc/{{{{who}}}}/status").read_text().partition("Seccomp_filters:")[2].split()[0])
    assert helpers.wait_until(lambda: filters(player) > filters(zygote))  # a container has one for all
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
    """User nobody, no capabilities, and the first to be killed when memory is short.

    Where setgroups was refused, as in a user namespace, the other two calls were skipped silently, and the player
    stayed uid 0 with all capabilities.
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
program.limit_resources(7, program.LIMITS.memory_bytes)
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
from toolkit.base.workers import JailError
with program.Pool(1, jailed={jailed}) as pool:
    print([r.outcome for r in program.execute_strategies(['def strategy(board): return "a"'], (1, 2), pool=pool)[0]])
"""


@AS_ROOT
def test_worker_works_as_an_ordinary_user() -> None:
    """Referee, zygote and player run as uid 12345: none of them needs root."""
    job = Job('def strategy(board): return "a"', (1, 2))
    modules = ", ".join(("os", *program.PRELOADED))  # root's interpreter may be closed to others
    before = f"import {modules}\nimport gpt_2048_rl as program"
    code = f"{before}\n{ORDINARY}\nprogram.worker_main(0, True)"
    done = run_python(code, input=json.dumps(dataclasses.asdict(job)) + "\n")
    start, begun, verdict = map(json.loads, done.stdout.splitlines())
    assert (start, begun) == ({"refusal": ""}, {"begun": True})
    assert [result["outcome"] for result in verdict["results"]] == ["stuck", "stuck"]


@ON_X86
def test_pool_works_under_dockers_profile() -> None:
    """The container's filter holds below the jail's."""
    done = run_python(PLAY.format(prepare="helpers.install_docker_profile()", jailed=True))
    assert done.stdout.strip() == "['stuck', 'stuck']", done.stderr


@pytest.mark.parametrize(
    ("error", "says"),
    [(errno.EPERM, "Operation not permitted"), (errno.EINVAL, "Invalid argument"), (0, "the player's process ended")],
    ids=["refused", "unknown", "only pretended"],
)
def test_pool_refuses_where_the_jail_cannot_hold(error: int, says: str) -> None:
    """Without seccomp, or with one that does nothing, the message is one line: a player proves its jail first."""
    prepare = f"helpers.install_filter_on_seccomp({error})"
    code = PLAY.format(prepare=prepare, jailed=True)
    refused = f"try:\n{textwrap.indent(code, '    ')}\nexcept JailError as error:\n    print(error)\n"
    done = run_python(refused)
    assert "cannot be jailed here (a player could not be jailed: " in done.stdout, done.stderr
    assert says in done.stdout
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


def test_pool_without_the_jail_works_where_there_is_no_seccomp() -> None:
    """What --unsafe-no-jail asks for."""
    done = run_python(PLAY.format(prepare=f"helpers.install_filter_on_seccomp({errno.EPERM})", jailed=False))
    assert done.stdout.strip() == "['stuck', 'stuck']", done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# What a player can see


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
    """Its parent's variables held the exit status, CPU time and memory of the previous player."""
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
    """By process number it could read the CPU time of its referee and of other players."""
    assert play(pool, CLOCKS, 1)[0].detail == "ValueError: 0"


def test_the_players_process_does_not_hold_the_seed(pool: Pool) -> None:
    """A walk over all objects of its interpreter does not find the board's seed."""
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
    """The trainer's environment, where people keep keys, is gone.  Two variables fix hashes and encodings."""
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


# ---------------------------------------------------------------------------------------------------------------------
# How often and how long it plays


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
    """A strategy that ends its process ends that game: one player for each of four boards, and no second try.

    All games of a process were replayed, even those already lost.
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


@pytest.mark.parametrize(
    ("target", "moves", "seconds"),
    [(2048, 0, 5), (2048, 1000, 5), (2048, 2000, 10), (2048, 9000, 10.24), (256, 9000, 5), (65536, 1000, 5),
     (65536, 30_000, 150), (1 << 64, 10**6, 163.84)],
)  # fmt: skip
def test_time_grows_with_the_game(target: int, moves: int, seconds: float) -> None:
    """5 s for a thousand moves and 5 ms for each further one, up to the moves of a game to 65536.

    With 5 s for a whole game, a search that reaches 65536 at 1 ms a move was paid like a program that hangs.
    """
    assert Job("", (), target=target).cpu_seconds(moves) == pytest.approx(seconds)


def test_time_is_granted_as_moves_come(pool: Pool) -> None:
    """A slow program gets the time of the moves that it has made, and not in advance that of a whole game."""
    source = HONEST.replace("    return", "    for _ in range(50_000): pass\n    return")
    (result,) = play(pool, source, timeout=0.05, target=1 << 64)
    assert result.outcome == "timeout"
    assert result.detail.startswith("more than 0.05 s of CPU time, and ")


IDLES = """
idle = 0
def changes(rows):
    packed = [[x for x in row if x] for row in rows]
    pairs = any(a == b for row in packed for a, b in zip(row, row[1:]))
    return pairs or any(row[: len(tiles)] != tiles for row, tiles in zip(rows, packed))
def strategy(board):
    global idle
    columns = [list(column) for column in zip(*board)]
    views = {"a": board, "i": [row[::-1] for row in board], "é": columns, "u": [row[::-1] for row in columns]}
    useless = [key for key, rows in views.items() if not changes(rows)]
    idle = idle + 1 if useless and idle < 60 else 0
    return useless[0] if idle else next(key for key in views if key not in useless)
"""


def test_idle_moves_buy_no_time(pool: Pool) -> None:
    """A search that returned keys without effect before each move had 164 s for a game: tile 1024 and not 512.

    Its limit would grow with a thousand moves that change the board.  About one in eight of this program's does: a slow
    machine makes 2,500 moves and 300 changes, one four times as fast 9,000 and 800.
    """
    ((result,),) = program.execute_strategies([IDLES], (2,), 8, 1 << 64, timeout=0.25, pool=pool)
    changed = re.fullmatch(r"more than 0.25 s of CPU time, and (\d+) moves changed the board", result.detail)
    assert (result.outcome, bool(changed)) == ("timeout", True)
    assert changed
    assert int(changed[1]) < 1000 < result.steps


@pytest.mark.parametrize(("share", "outcome"), [(2, "stuck"), (1, "error")])
def test_a_player_has_the_memory_of_its_limit_and_no_more(pool: Pool, share: int, outcome: str) -> None:
    """The limit of its referee, four times as high, failed no test."""
    source = f"held = bytearray({program.LIMITS.memory_bytes // share})\ndef strategy(board): return 'a'"
    (result,) = play(pool, source, 1)
    assert (result.outcome, "MemoryError" in result.detail) == (outcome, outcome == "error")


def test_a_player_is_not_charged_for_its_jail(lone: Pool) -> None:
    """A limit below what fork and jail cost ended the worker with a traceback.  Its time begins when it is jailed."""
    (worker,) = {worker._process.pid for worker in lone._workers}
    (result,) = play(lone, FOR_EVER, timeout=1e-6)  # a quick game may be over before the first look at the clock
    assert (result.outcome, result.detail.split(" s ")[0]) == ("timeout", "more than 1e-06")
    assert {worker._process.pid for worker in lone._workers} == {worker}


def test_a_stopped_player_is_not_charged_for_the_wait(lone: Pool) -> None:
    """Limits count the player's CPU time, not wall time, so a busy machine changes no reward.

    The player is stopped during its first move for longer than a move may take.
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
    """A player that counts for long uses more than one that answers immediately."""
    quick, slow = (f"def strategy(board):\n    for _ in range({n}): pass\n    return 'x'" for n in (1, 3_000_000))
    assert 0 < play(pool, quick, 1)[0].seconds < play(pool, slow, 1)[0].seconds
