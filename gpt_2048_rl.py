#!/usr/bin/env python3
"""Reinforcement learning with verifiable rewards: a language model learns to write Python that plays 2048.

The model answers a prompt with the source of `strategy(board)`.  A group of answers plays the same boards, each in a
process that the kernel has locked in.  What a program reaches is its reward, and GRPO makes the better answers of a
group more likely.  gpt-oss-20b trains where there is a CUDA GPU.  Elsewhere an embedded gpt-oss with about 1 M
parameters trains through the same code.

    ./setup.sh python gpt_2048_rl.py                    train, then compare with the untrained model and controls
    python gpt_2048_rl.py eval MODEL_OR_FILE.py         a model, adapter, checkpoint or strategy on held-out boards
    python gpt_2048_rl.py play FILE.py --watch          one strategy, or with --model a model's best: games, or a replay
    python gpt_2048_rl.py compare RUN RUN ...           several runs, with paired tests on their common boards
    python gpt_2048_rl.py export RUN --format lora      the adapter, or the whole model, for other programs
    python gpt_2048_rl.py doctor                        what this machine has, what is switched and why
    python gpt_2048_rl.py COMMAND --help                the options of train (the default), eval, play, compare, ...

Read it from top to bottom.  It differs from the published notebook (docs/from_the_notebook.md): strategies run in a
jail and not in the trainer; losers are graded by their tile; the answers of a group share their boards and start in
the final channel; a solved task gives way to a harder one; results stand beside controls, on boards that training
never saw.

`toolkit/` holds what this file uses and does not explain.
Shapes: B completions, T tokens, R reward functions.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
import dataclasses
import gc
import hashlib
import io
import json
import math
import os
import random
import re
import resource
import select
import signal
import socket
import statistics
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import cycle, islice, product
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

if sys.flags.safe_path:  # a worker: this folder comes last, because its files may have the names of the library's
    sys.path.append(str(Path(__file__).resolve().parent))
try:
    from toolkit import UsageError, spelled, visible
    from toolkit.referee.extract import extract_function, visible_program
    from toolkit.referee.jail import Jail, NotJailed, die_with, limit_resources
    from toolkit.referee.names import globals_of, parse
except ModuleNotFoundError as error:
    if error.name != "toolkit":
        raise
    print("error: the folder toolkit/ has to be beside this file: clone the whole repository", file=sys.stderr)
    sys.exit(2)

if TYPE_CHECKING:
    from rich.console import Console

    from toolkit.games.programs import BackgroundGames
    from toolkit.model.tiny import GameSpec

# ---------------------------------------------------------------------------------------------------------------------
# Game

DIRECTIONS = ("up", "down", "left", "right")
LAYOUTS = MappingProxyType({"bepo": "éuai", "wasd": "wsad", "zqsd": "zsqd", "arrows": "↑↓←→"})  # in DIRECTIONS' order


@cache
def key_table(layout: str = "bepo") -> Mapping[str, int]:
    """Every accepted lower-case spelling of a layout's keys -> its index in DIRECTIONS."""
    if layout not in LAYOUTS:
        raise ValueError(f"keys must be one of {', '.join(LAYOUTS)}, not {layout!r}")
    table = {key: direction for direction, key in enumerate(LAYOUTS[layout])}
    if layout == "bepo":
        table["e\N{COMBINING ACUTE ACCENT}"] = table["é"]
    if layout == "arrows":
        table |= {name: direction for direction, name in enumerate(DIRECTIONS)}
    return table


def direction_of(key: object, table: Mapping[str, int]) -> int | None:
    """The direction of a key, or None.  Case and surrounding blanks do not matter.  The unbound methods read the real
    characters of a str subclass.  `type(key)`, not isinstance: an object can claim any `__class__`."""
    return table.get(str.lower(str.strip(key))) if issubclass(type(key), str) else None  # type: ignore[arg-type]


def check_game(size: int, target: int) -> None:
    """Raise ValueError, in one line, for an argument that no game can have."""
    if type(size) is not int or not 2 <= size <= 16:
        raise ValueError(f"size must be a whole number from 2 to 16, not {size!r}")
    if type(target) is not int or not 2 <= target <= 1 << 64 or target & (target - 1):
        raise ValueError(f"target must be a power of two from 2 to 2**64, not {target!r}")


class _LineMemo(dict[bytes, tuple[bytes, int]]):
    """A line of exponents -> (the line after a slide, points gained).  Each line is computed once."""

    LIMIT: ClassVar[int] = 1 << 17  # lines; about 25 MB

    def __init__(self, towards_end: bool) -> None:
        super().__init__()
        self.towards_end = towards_end

    def __missing__(self, line: bytes) -> tuple[bytes, int]:
        order = -1 if self.towards_end else 1
        tiles, slid, gain, i = line.replace(b"\0", b"")[::order], bytearray(), 0, 0
        while i < len(tiles):
            merges = i + 1 < len(tiles) and tiles[i] == tiles[i + 1]
            slid.append(tiles[i] + merges)
            gain += (1 << slid[-1]) * merges
            i += 1 + merges
        if len(self) >= self.LIMIT:
            self.clear()
        self[line] = after = bytes(slid).ljust(len(line), b"\0")[::order], gain
        return after


_TOWARDS_START = _LineMemo(towards_end=False).__getitem__
_TOWARDS_END = _LineMemo(towards_end=True).__getitem__
_TILES = [0, *(1 << exponent for exponent in range(1, 256))]  # a list: its __getitem__ is twice as fast as a tuple's


class GameBoard:
    """One game of 2048: a flat row-major `bytes` of exponents (0 is an empty cell, 11 the tile 2048).

    The random stream is the public reference's, so games can be compared move by move: `random.Random(seed)`; a spawn
    is a `choice` over the empty cells in row-major order, then a 4 if `random() < 0.1`, else a 2; two spawns at the
    start; a move that changes nothing spawns nothing.

    `spawned` is the cell of the newest tile.  Raises ValueError that names an argument out of range."""

    __slots__ = ("_bits", "_columns", "_exponent", "_flat", "_keys", "_random", "_rows", "_score", "_state", "size",
                 "spawned", "target")  # fmt: skip

    def __init__(self, size: int = 6, seed: int = 0, target: int = 2048, keys: str = "bepo") -> None:
        check_game(size, target)
        self.size, self.target, self._keys = size, target, key_table(keys)
        rng = random.Random(seed)
        self._random, self._bits = rng.random, rng.getrandbits
        self._rows = itemgetter(*(slice(i * size, (i + 1) * size) for i in range(size)))  # every row in one C call
        self._columns = itemgetter(*(slice(i, None, size) for i in range(size)))
        self._exponent = target.bit_length() - 1
        self._score, self._state, self._flat = 0, "ongoing", bytes(size * size)
        self._spawn()
        self._spawn()
        if max(self._flat) >= self._exponent:
            self._state = "success"

    def board(self) -> list[list[int]]:
        """Tile values, row by row; 0 is an empty cell.  A fresh copy."""
        return [[_TILES[exponent] for exponent in row] for row in self._rows(self._flat)]

    def flat(self) -> bytes:
        """The exponents, row-major."""
        return self._flat

    def state(self) -> str:
        """ "ongoing", "success" (the target tile was made) or "failed" (no move left, or a wrong key)."""
        return self._state

    def score(self) -> int:
        """The sum of all tiles made by merging."""
        return self._score

    def max_tile(self) -> int:
        """The value of the largest tile."""
        return _TILES[max(self._flat)]

    def do_action(self, key: object) -> bool:
        """Play one key.  True if the board changed; a wrong key (or "q" where it is none) ends the game as failed."""
        direction = direction_of(key, self._keys)
        if direction is None and self._state == "ongoing":
            self._state = "failed"
        return direction is not None and self.move(direction)

    def move(self, direction: int) -> bool:
        """Slide towards DIRECTIONS[direction].  True if the board changed."""
        if self._state != "ongoing":
            return False
        flat = self._flat
        vertical, slide = direction < 2, _TOWARDS_END if direction & 1 else _TOWARDS_START
        lines, gains = zip(*map(slide, (self._columns if vertical else self._rows)(flat)))  # noqa: B905 - hot
        moved = b"".join(lines)
        if vertical:
            moved = b"".join(self._columns(moved))  # back from columns to rows
        if moved == flat:
            return False
        self._flat = moved
        empty, gain = self._spawn(), sum(gains)
        self._score += gain
        if (gain >= self.target or self.target <= 4) and max(self._flat) >= self._exponent:
            self._state = "success"
        elif not empty and not any(_TOWARDS_START(i)[1] for i in self._rows(self._flat) + self._columns(self._flat)):
            self._state = "failed"
        return True

    def _spawn(self) -> int:
        """Put one tile on a random empty cell; return how many cells are still empty."""
        flat = self._flat
        empty = flat.count(0)
        bits = empty.bit_length()
        nth = self._bits(bits)
        while nth >= empty:  # the draws of Random.choice over the empty cells, in a third of its time
            nth = self._bits(bits)
        self.spawned = cell = len(flat) - 1 - len(flat.split(b"\0", nth + 1)[-1])
        tile = b"\2" if self._random() < 0.1 else b"\1"
        self._flat = flat[:cell] + tile + flat[cell + 1 :]
        return empty - 1


# ---------------------------------------------------------------------------------------------------------------------
# Prompt and answers
#
# Answers are hostile text.  toolkit/referee/ takes the program out of one, in a worker: see _read.


@dataclass(frozen=True)
class Limits:
    """What an answer and its program may use."""

    source_bytes: int = 64 << 10
    text_chars: int = 1 << 19  # of an answer with its analysis; a longer one is not even sent to a worker
    parse_seconds: float = 3.0  # CPU seconds for reading an answer
    move_seconds: float = 1.0  # CPU seconds for one move, and for loading
    paid_moves: int = 1 << 15  # moves that a game gets time for: a game to 65536 takes about 30,000
    tries: int = 3  # workers that a job gets, should they die
    wall_factor: float = 4.0  # ceiling of wall time on a busy machine: so many times the CPU limit, plus 10 s
    memory_bytes: int = 256 << 20  # address space of a player
    referee_bytes: int = 1 << 30  # address space of the process that parses answers
    worn_bytes: int = 128 << 20  # its peak of memory after which another one takes its place
    idle_moves: int = 64  # moves in a row that change nothing end a game as "stuck"
    poll_seconds: float = 0.1  # between two looks of a waiting referee at the clocks
    asleep_polls: int = 4  # only the referee sends input, so a player asleep for this many polls is deadlocked
    control_seconds: float = 30.0  # for the zygote to fork a player, for its jail, for its end
    start_seconds: float = 60.0  # for a worker to start
    detail_chars: int = 250  # the whole list of allowed modules


LIMITS = Limits()
ALLOWED_MODULES = ("math", "random", "itertools", "functools", "collections", "heapq", "copy", "operator", "statistics",
                   "string", "re", "typing", "dataclasses", "bisect", "enum", "abc", "numbers", "fractions",
                   "decimal")  # fmt: skip
RULES = """
`board` is a list of {size} lists of {size} whole numbers; 0 is an empty cell. The function returns one key: \
"{up}" for up, "{down}" for down, "{left}" for left, "{right}" for right. It must work for any board size. Use native \
Python only and import nothing but {modules}. Answer with one short function, and with helpers above it if it needs \
any, in a fenced block:
```python
{example}
```"""
EXAMPLES = {  # what the prompt shows of a program
    "blank": 'def strategy(board):\n    ...\n    return "{left}"',
    "random": 'import random\n\ndef strategy(board):\n    return random.choice(["{left}", "{right}"])',
}
WORDINGS = (
    "Write a Python function strategy(board) that plays 2048 on a {size}x{size} board and reaches the {target} tile.",
    "You play 2048 on a board of {size} by {size} cells. Give a short strategy(board) that makes the tile {target}.",
    "Create a new short 2048 strategy using only native Python code. The board is {size}x{size}, the goal is {target}.",
    "Implement strategy(board), called once per move of a {size}x{size} game of 2048, so that it gets to {target}.",
    "The game is 2048, the board {size}x{size}, the tile to reach {target}. Write the function that chooses each move.",
    "I need a small Python function that wins 2048: board of {size}x{size}, winning tile {target}, one key per call.",
    "Goal: a {target} tile on a {size}x{size} 2048 board. Program the player as strategy(board).",
    "Please code a 2048 bot. It sees the {size}x{size} board, returns one move, and must build the {target} tile.",
    "Devise a policy for 2048 ({size} rows, {size} columns) as Python code; it succeeds when {target} appears.",
)  # the last one is for evaluation only: training never uses it


def build_prompt(
    size: int = 6, target: int = 2048, keys: str = "bepo", wording: int = 0, example: str = "blank"
) -> str:
    """The user's message: the task in one of the WORDINGS, then the rules with one of the EXAMPLES."""
    names = dict(zip(DIRECTIONS, LAYOUTS[keys], strict=True))
    shown = EXAMPLES[example].format(**names)
    modules = ", ".join(ALLOWED_MODULES)
    return (WORDINGS[wording] + RULES).format(size=size, target=target, modules=modules, example=shown, **names)


_INTERPRETER_NAMES = frozenset({"eval", "exec", "compile", "open", "input", "__import__"})
_WAYS_OUT = frozenset(f"__{name}__" for name in (  # not what type(), vars() and getattr() give too, as __class__ does
    "bases", "base", "mro", "subclasses", "globals", "builtins", "code", "closure", "import", "loader", "spec",
    "reduce", "reduce_ex", "traceback", "self", "file", "cached", "path"))  # fmt: skip


def find_cheating(source: str) -> str:
    """Why a source counts as cheating, or "", also if it does not parse.  It shapes a reward; the jail protects."""
    tree = parse(source)
    nodes = list(ast.walk(tree)) if tree else []  # iterative, so long code cannot exhaust the stack
    for node in nodes:
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            modules = ["." * node.level + (node.module or "")]
        for module in modules:
            if module.partition(".")[0] not in (*ALLOWED_MODULES, "__future__"):
                return f"imports {module}"
    names = globals_of(tree)[1] if tree else set()
    if used := sorted(names & _INTERPRETER_NAMES):
        return f"uses {used[0]}"
    reached = sorted(_WAYS_OUT & (names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}))
    return f"reaches for {reached[0]}" if reached else ""


# ---------------------------------------------------------------------------------------------------------------------
# Jailed players
#
# trainer -> a worker per core (trusted referee: games, seeds, clock, score) -> its zygote -> a jailed player per game.
# A player only turns boards into keys.  Its first message says that the jail holds; everything after it is a claim.
# A player lives for one game and a game is played once, so no game influences another and no bad game is repeated.


@dataclass(frozen=True)
class GameResult:
    """How one strategy fared on one board.  `detail` is bounded and printable, `seconds` the player's CPU time."""

    seed: int
    outcome: str  # success, lost, stuck, timeout, error, invalid_move or no_function
    steps: int
    max_tile: int
    score: int
    seconds: float
    detail: str = ""
    moves: str = ""  # indices in DIRECTIONS, one digit per move; only if the job asks for a record


@dataclass(frozen=True)
class Job:
    """One text to judge: a strategy's source, or a completion that contains one; and the boards it plays."""

    text: str
    seeds: tuple[int, ...]
    size: int = 6
    target: int = 2048
    keys: str = "bepo"
    timeout: float = 5.0  # CPU seconds for a game's first thousand moves, and again for each further thousand
    completion: bool = False  # text is a model's answer: its program is extracted, and does not play if it cheats
    reasons: bool = False  # the model was asked to think before it answers: see final_channel
    record: bool = False  # keep the moves

    def __post_init__(self) -> None:
        check_game(self.size, self.target)
        key_table(self.keys)
        if not 0 < self.timeout < 1e6:
            raise ValueError(f"timeout must be a positive number of seconds, not {self.timeout!r}")
        if not all(type(seed) is int for seed in self.seeds):
            raise ValueError("seeds must be whole numbers")

    def cpu_seconds(self, moves: int) -> float:
        """CPU time that one game may have used after so many moves that changed the board: enough for twice what its
        target takes.  Idle moves buy none: a search could have made some before each move."""
        return self.timeout * max(1.0, min(moves, self.target, LIMITS.paid_moves) / 1000)

    def wall_seconds(self) -> float:
        """An upper bound for waits, far above what is normal: after it, the worker is at fault."""
        game = LIMITS.wall_factor * self.cpu_seconds(LIMITS.paid_moves) + 10 + 3 * LIMITS.control_seconds
        return LIMITS.parse_seconds * LIMITS.wall_factor + game * max(1, len(self.seeds))


@dataclass(frozen=True)
class Verdict:
    """Everything known about one text.  Rewards, logs and reports read this and nothing else."""

    source: str | None  # of the strategy; None where there is none
    works: str  # "load", "fail" (it parses but does not load) or "none" (no function, or it does not parse)
    cheating: str  # what it does that is not allowed, or ""
    results: tuple[GameResult, ...]  # one per seed; a completion that cheats does not play


# The player's side: code that runs in the jail.


class _NoStream(io.TextIOBase):
    """Standard streams of a player: printing goes nowhere, and reading raises OSError."""

    def write(self, text: str) -> int:
        return len(text)


def _fix_random(seed: int) -> None:
    """Derive all random numbers of this process from a seed, so that a strategy plays the same game twice.  Without
    the kernel's, which glibc 2.41 reads without a system call."""
    random.seed(seed)
    for module, name in product((os, sys.modules["posix"]), ("urandom", "getrandom")):
        setattr(module, name, lambda size, flags=0: random.randbytes(size))
    random._urandom = os.urandom  # type: ignore[attr-defined]
    own_seed, stream = random.Random.seed, random.getrandbits

    def seed_from_the_game(self: random.Random, a: Any = None, version: int = 2) -> None:
        own_seed(self, stream(64) if a is None else a, version)

    random.Random.seed = seed_from_the_game  # type: ignore[method-assign]
    random.SystemRandom = random.Random  # type: ignore[misc, assignment]
    random.seed = vars(random)["_inst"].seed


def _guarded_import(
    name: str, globals: object = None, locals: object = None, fromlist: object = (), level: int = 0
) -> ModuleType:
    """`__import__` for strategies: the allowed modules and no others, but for that which prints long numbers."""
    if level or name.partition(".")[0] not in (*ALLOWED_MODULES, "__future__", "_pylong"):
        raise ImportError(f"{name} may not be imported here; allowed are {', '.join(ALLOWED_MODULES)}")
    return __import__(name, None, None, fromlist, 0)  # type: ignore[arg-type]


def _describe(value: object) -> bytes:
    """A note about an exception or a wrong key, whatever it does when it is printed."""
    try:
        text = f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else f"returned {value!r:.100}"
        return text.encode("utf-8", "replace")[:1000]
    except BaseException:
        return b"something that cannot be printed"


def _load(source: bytes) -> tuple[bytes, Callable[[object], object] | None]:
    """Load a strategy: the player's claim about it with the reason, and the function."""
    try:
        code = compile(source.decode("utf-8", "surrogatepass"), "<strategy>", "exec", dont_inherit=True)
    except BaseException as error:
        return b"none" + _describe(error), None
    module = sys.modules["strategy"] = ModuleType("strategy")  # where dataclasses looks up string annotations
    namespace = vars(module)
    namespace["__builtins__"] = dict(vars(builtins), __import__=_guarded_import)
    try:
        exec(code, namespace)
    except BaseException as error:
        return b"fail" + _describe(error), None
    strategy = namespace.get("strategy")
    return (b"load", strategy) if callable(strategy) else (b"none" + b"no function strategy(board)", None)


_NONCE_BYTES = 4
_NOT_A_KEY, _RAISED = 254, 255


def _answer(strategy: Callable[[object], object], size: int, keys: str, channel: int) -> None:
    """Answer messages (a nonce, a board's exponents) with the nonce and a direction, or a larger number and a note."""
    table, tile = key_table(keys), _TILES.__getitem__
    rows = itemgetter(*(slice(start, start + size) for start in range(0, size * size, size)))
    read, write = os.read, os.write
    while message := read(channel, 512):
        note = b""
        try:
            key = strategy(list(rows(list(map(tile, message[_NONCE_BYTES:])))))  # fresh lists at every call
            direction = direction_of(key, table)
            if direction is None:
                direction, note = _NOT_A_KEY, _describe(key)
        except BaseException as error:
            direction, note = _RAISED, _describe(error)
        write(channel, message[:_NONCE_BYTES] + bytes((direction,)) + note)


def _player(jail: Jail | None, channel: int, parent: int) -> None:
    """A forked child of the zygote: enter the jail, say so, load the strategy, answer boards."""
    with contextlib.suppress(OSError):  # when memory is short, the kernel should end the player and not the trainer
        descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(descriptor, b"1000")
    header, _, source = os.read(channel, LIMITS.source_bytes + 1000).partition(b"\n")
    job = json.loads(header)
    if len(source) != job["bytes"]:
        raise ValueError("the source was cut")
    os.closerange(0, channel)
    os.closerange(channel + 1, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = sys.stdout = sys.stderr = _NoStream()
    limit_resources(job["cpu_seconds"], LIMITS.memory_bytes)
    if jail:
        jail.enter(parent)
    else:
        die_with(parent)
    os.write(channel, b"jailed")  # the last message that is trusted
    _fix_random(job["random_seed"])
    claim, strategy = _load(source)
    os.write(channel, claim)
    if strategy:
        _answer(strategy, job["size"], job["keys"], channel)


# The last are not for strategies: functools needs two, the compiler one for names like "ligne_complète".  From Python
# 3.12 on, printing a number of many thousand digits needs _pylong.
PRELOADED = (*ALLOWED_MODULES, "__future__", "collections.abc", "types", "weakref", "unicodedata",
             *(("_pylong",) if sys.version_info >= (3, 12) else ()))  # fmt: skip


def _fork() -> int:
    """os.fork(), until it succeeds: processes or memory may be short for a moment.  Its referee waits so long."""
    while True:
        with contextlib.suppress(OSError):
            return os.fork()
        time.sleep(LIMITS.poll_seconds)


def _zygote(control: socket.socket, jailed: bool, parent: int) -> None:
    """Fork a player for every channel received.  It knows no seed and no player's fate: players inherit its memory."""
    for name in PRELOADED:
        __import__(name)
    jail, zygote = Jail() if jailed else None, os.getpid()
    die_with(parent)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps, so no exit status reaches the next player
    gc.collect()
    gc.freeze()
    control.send(b"ready")
    while (received := socket.recv_fds(control, 16, 1))[0]:
        (channel,) = received[1]
        player = _fork()
        if player == 0:
            try:
                os.dup2(channel, 3)
                _player(jail, 3, zygote)
            except BaseException as error:
                with contextlib.suppress(BaseException):
                    os.write(3, _describe(error))
            os._exit(0)
        os.close(channel)
        control.send(struct.pack("=i", player))


# The referee's side: trusted code in a worker process.

_PROCESS = "the player's process"


@dataclass(eq=False)
class GameOver(Exception):
    """A game has ended or has to end: its outcome, and why."""

    outcome: str
    detail: str = ""


def printable(text: str) -> str:
    """Text from a player or a model, bounded and with control and invisible characters escaped."""
    return visible(repr(text[: LIMITS.detail_chars])[1:-1])[: LIMITS.detail_chars]


class _PlayerProcess:
    """A jailed player as its referee sees it: a board out, a direction in, under CPU and wall limits.  Its methods
    raise GameOver when the player breaks a limit or the protocol, or has died.  Raises NotJailed or OSError where there
    is no jailed player, which is no program's fault."""

    def __init__(self, zygote: socket.socket, job: Job, random_seed: int, source: bytes) -> None:
        self._job = job
        self.moves = bytearray()  # the player's answers, one byte per move
        self.changes = 0  # how many of them changed the board
        most = job.cpu_seconds(LIMITS.paid_moves)
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        zygote.settimeout(LIMITS.control_seconds)
        with theirs:
            socket.send_fds(zygote, [b"fork"], [theirs.fileno()])
            if not (answer := zygote.recv(16)):
                raise ConnectionError("the zygote is gone")
            self.pid: int = struct.unpack("=i", answer)[0]
        self._process, self._cpu_seconds = os.pidfd_open(self.pid), 0.0
        poll = struct.pack("ll", 0, int(LIMITS.poll_seconds * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._channel.setsockopt(socket.SOL_SOCKET, option, poll)
        self._descriptor = self._channel.fileno()
        self._clock = (~self.pid << 3) | 2  # the process's CPU clock: clock_getcpuclockid(3)
        self._next_look = 0.0
        header = {
            "size": job.size,
            "keys": job.keys,
            "random_seed": random_seed,
            "cpu_seconds": int(most) + 2,
            "bytes": len(source),
        }
        try:
            self._send(json.dumps(header).encode() + b"\n" + source)
            ready, _, _ = select.select([self._channel], [], [], LIMITS.control_seconds)
            said = os.read(self._descriptor, 4096) if ready else b"it takes too long"
        except (GameOver, ConnectionError):
            said = b""
        if said != b"jailed":
            self.close()
            why = said.decode("utf-8", "replace") or f"{_PROCESS} ended"
            raise NotJailed("a player could not be jailed: " + printable(why))
        self._deadline = time.monotonic() + LIMITS.wall_factor * most + 10
        self._began = self._cpu() + time.process_time()  # the program's time begins here: it did not ask for the jail

    def load(self) -> tuple[str, str]:
        """The player's claim about loading ("load", "fail" or "none"), and the reason."""
        said = self._receive().decode("utf-8", "replace")
        return (said[:4] if said[:4] in ("load", "none") else "fail"), said[4:]

    def choose(self, board: bytes) -> tuple[int, bytes]:
        """Its answer to a board of exponents: an index in DIRECTIONS, or a larger number and a note."""
        nonce = os.urandom(_NONCE_BYTES)  # only a player that has read this board knows it: no early or double answers
        self._send(nonce + board)
        answer = self._receive()
        if not answer.startswith(nonce) or len(answer) == _NONCE_BYTES:
            raise GameOver("error", "the player broke the protocol")
        self.moves.append(direction := answer[_NONCE_BYTES])
        return direction, answer[_NONCE_BYTES + 1 :]

    def _send(self, message: bytes) -> None:
        try:
            os.write(self._descriptor, message)  # never waits: all earlier messages were read
        except OSError:
            raise GameOver("error", f"{_PROCESS} ended") from None

    def _receive(self) -> bytes:
        """The next message.  The player may use the CPU seconds of one move for it."""
        try:
            try:
                message = os.read(self._descriptor, 4096)  # nearly always there in time: one system call
            except BlockingIOError:
                message = self._wait()
        except ConnectionError:
            message = b""
        if not message:
            raise GameOver("error", f"{_PROCESS} ended")
        if time.monotonic() > self._next_look:
            self._look()
        return message

    def _cpu(self) -> float:
        """CPU seconds of the player now, or when it was last seen."""
        with contextlib.suppress(OSError):
            self._cpu_seconds = time.clock_gettime(self._clock)
        return self._cpu_seconds

    def _look(self) -> None:
        """Compare the clocks with the limits.  The referee's own CPU counts too, which bounds the wall time."""
        self._next_look = time.monotonic() + LIMITS.poll_seconds / 2
        limit = self._job.cpu_seconds(self.changes)
        if self._cpu() + time.process_time() - self._began > limit:
            raise GameOver("timeout", f"more than {limit:g} s of CPU time, and {self.changes} moves changed the board")
        if time.monotonic() > self._deadline:
            raise GameOver("timeout", "the wall clock's ceiling")

    def _wait(self) -> bytes:
        allowed, asleep = max(0.0, self._cpu() - LIMITS.poll_seconds) + LIMITS.move_seconds, 0
        while True:
            self._look()
            if self._cpu() > allowed:
                raise GameOver("timeout", f"more than {LIMITS.move_seconds:g} s of CPU time for one move")
            try:
                stat = Path(f"/proc/{self.pid}/stat").read_bytes()
                asleep = asleep + 1 if stat.rpartition(b") ")[2][:1] == b"S" else 0
            except OSError:
                asleep = 0
            if asleep >= LIMITS.asleep_polls:
                raise GameOver("timeout", "blocked: it waits for what never comes")
            with contextlib.suppress(BlockingIOError):
                return os.read(self._descriptor, 4096)

    def close(self) -> float:
        """End the process and wait until it is gone.  Returns the CPU seconds that it used."""
        self._channel.close()
        seconds = self._cpu()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        gone, _, _ = select.select([self._process], [], [], LIMITS.control_seconds)
        os.close(self._process)
        if not gone:
            raise TimeoutError(f"{_PROCESS} does not end")
        return seconds


class Referee:
    """Plays one game at a time.  Raises NotJailed where no player can be jailed, OSError where its zygote is gone."""

    def __init__(self, jailed: bool = True) -> None:
        parent = os.getpid()
        self._zygote, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._zygote_pid = os.fork()
        if self._zygote_pid == 0:
            try:
                self._zygote.close()
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, 0)
                os.dup2(nowhere, 1)
                _zygote(theirs, jailed, parent)
            except NotJailed as error:
                theirs.send(error.args[0].encode())
            except Exception as error:
                theirs.send(_describe(error))
            finally:
                os._exit(0)
        theirs.close()
        self._zygote.settimeout(LIMITS.control_seconds)
        said = self._zygote.recv(1000)
        if said != b"ready":
            raise NotJailed(said.decode() or "the players' parent process did not start")

    def lives(self) -> bool:
        """Whether its zygote lives.  It is never forked again, because this process knows seeds by now."""
        return os.waitpid(self._zygote_pid, os.WNOHANG) == (0, 0)

    def play(self, source: str, job: Job) -> tuple[str, list[GameResult]]:
        """How loading went ("load", "fail" or "none": the worst of all games), and one result per seed of the job."""
        encoded = source.encode("utf-8", "surrogatepass")
        if not job.seeds:
            return self._play(encoded, job, 0)[0], []
        claims, results = zip(*(self._play(encoded, job, seed) for seed in job.seeds), strict=True)
        return min(claims, key=("none", "fail", "load").index), list(results)

    def _play(self, source: bytes, job: Job, seed: int) -> tuple[str, GameResult]:
        """Load the strategy in a player of its own and, if the job has boards, play one of them."""
        game, claim, idle = GameBoard(job.size, seed, job.target), "fail", 0
        # The strategy's own random numbers follow from the first board, which it may see.  If they followed from the
        # game's seed, a strategy that tries all small seeds could find it.
        random_seed = int.from_bytes(hashlib.sha256(b"player" + game.flat()).digest()[:8])
        player = _PlayerProcess(self._zygote, job, random_seed, source)
        try:
            claim, reason = player.load()
            if claim != "load":
                raise GameOver("no_function" if claim == "none" else "error", reason)
            while job.seeds and game.state() == "ongoing":
                direction, note = player.choose(game.flat())
                if direction >= len(DIRECTIONS):
                    outcome = "invalid_move" if direction == _NOT_A_KEY else "error"
                    raise GameOver(outcome, note.decode("utf-8", "replace"))
                changed = game.move(direction)
                player.changes += changed
                idle = 0 if changed else idle + 1
                if idle == LIMITS.idle_moves:
                    raise GameOver("stuck", f"{idle} moves in a row changed nothing")
            over = GameOver("success" if game.state() == "success" else "lost")
        except GameOver as end:
            over = end
        finally:
            cpu = player.close()
        if not self.lives():
            raise ConnectionError("the zygote is gone, and has taken its player along")
        moves = "".join(str(move) for move in player.moves if move < len(DIRECTIONS)) if job.record else ""
        return claim, GameResult(
            seed,
            over.outcome,
            len(player.moves),
            game.max_tile(),
            game.score(),
            round(cpu, 6),
            printable(over.detail),
            moves,
        )


def _no_verdict(job: Job, source: str | None, works: str, outcome: str, detail: str, cheating: str = "") -> Verdict:
    """The verdict on a text that never played: its boards stay as they start."""
    starts = [GameBoard(job.size, seed, job.target) for seed in job.seeds]
    results = (
        GameResult(seed, outcome, 0, game.max_tile(), game.score(), 0.0, printable(detail))
        for seed, game in zip(job.seeds, starts, strict=True)
    )
    return Verdict(source, works, cheating, tuple(results))


def _read(job: Job) -> tuple[str, str] | Verdict:
    """The source in a job's text and how it cheats, or the verdict on a text that never plays.  Nothing is run."""

    def is_too_long(source: str) -> bool:
        return len(source.encode("utf-8", "surrogatepass")) > LIMITS.source_bytes

    source = extract_function(job.text, job.reasons) if job.completion else job.text
    if source and job.completion and not is_too_long(source):
        source = visible_program(source)
    if source and is_too_long(source):
        return _no_verdict(job, None, "fail", "error", f"the source is longer than {LIMITS.source_bytes} bytes")
    if source is None or (job.completion and not parse(source)):  # of a file, its player says what is wrong
        return _no_verdict(job, source, "none", "no_function", "no strategy(board) that Python can parse")
    return source, printable(find_cheating(source))


def _judge_in_worker(referee: Referee, job: Job) -> Verdict:
    """Trusted code, hostile data: a jailed player runs the source."""
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMITS.parse_seconds)  # kills this worker if the parser runs for ever
    try:
        read = _read(job)
    except Exception as error:  # of memory or depth: another worker would fare no better
        return _no_verdict(job, None, "none", "error", f"the text cannot be read ({type(error).__name__})")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    if isinstance(read, Verdict):
        return read
    source, cheating = read
    if job.completion and cheating:
        works, _ = referee.play(source, dataclasses.replace(job, seeds=()))
        return _no_verdict(job, source, works, "error", f"does not play: it {cheating}", cheating)
    works, results = referee.play(source, job)
    return Verdict(source, works, cheating, tuple(results))


def _peak_bytes() -> int:
    """The most memory that this process has held.  getrusage's number begins with that of the process's parent."""
    peak = re.search(r"VmHWM:\s+([0-9]+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    return int(peak[1]) << 10 if peak else 0


def worker_main(core: int, jailed: bool) -> None:
    """A referee process: JSON lines in, JSON lines out, until its input ends or its trainer is gone."""
    trainer = os.getppid()

    def leave_with_trainer(*_: object) -> None:
        if os.getppid() != trainer:
            os._exit(1)

    signal.signal(signal.SIGALRM, leave_with_trainer)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    with contextlib.suppress(OSError):  # referee and player strictly alternate, so one core serves both best
        os.sched_setaffinity(0, {core})
    try:
        referee = Referee(jailed)
        canary = _judge_in_worker(referee, Job("def strategy(board): return 'a'", (0,)))
        refusal = "" if canary.results[0].outcome == "stuck" else canary.results[0].detail
    except NotJailed as error:
        refusal = error.args[0]
    except OSError:  # no process or no memory is left: the jail is not at fault
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_AS, (LIMITS.referee_bytes, LIMITS.referee_bytes))
    try:
        print(json.dumps({"refusal": refusal}), flush=True)
        if refusal:
            return
        for line in sys.stdin:
            if not referee.lives():
                return
            print(json.dumps({"begun": True}), flush=True)  # a worker that dies before this costs the job no try
            job = json.loads(line)
            verdict = _judge_in_worker(referee, Job(**{**job, "seeds": tuple(job["seeds"])}))
            print(json.dumps(dataclasses.asdict(verdict)), flush=True)
            if _peak_bytes() > LIMITS.worn_bytes:
                os._exit(0)  # from Python 3.12 on, names that were parsed stay, until no new one can be
    except (NotJailed, OSError):  # the trainer or the zygote is gone, or no player can be jailed any more
        os._exit(1)


if __name__ == "__main__" and sys.argv[1:2] == ["worker"] and len(sys.argv) == 4:  # see _Worker
    worker_main(int(sys.argv[2]), sys.argv[3] == "1")
    sys.exit()


# The trainer's side: it starts workers and hands out jobs (toolkit/base/workers.py).  A referee ends above this line,
# so what follows may use packages.

import threading

from toolkit.base import bars, ranks
from toolkit.base.files import no_link
from toolkit.base.ranks import RANK, RANKS, SHARDED, by_first_rank
from toolkit.base.workers import Worker
from toolkit.games.evaluation import board_key, board_name
from toolkit.model import adapters, cpu_speed, decoding, loading, machine, memory, models
from toolkit.run import advantages, watch
from toolkit.run.checkpoints import START, AtomicCheckpoints, check_one_adapter


class _Worker(Worker):
    """A referee process as the pool sees it."""

    def __init__(self, core: int, jailed: bool) -> None:
        # This file by its path: a copy works under any name.  Not -I, which would ignore PYTHONHASHSEED.
        this = [sys.executable, "-P", "-s", "-S", "-W", "ignore", str(Path(__file__).resolve())]
        super().__init__([*this, "worker", str(core), str(int(jailed))], LIMITS.start_seconds, LIMITS.tries)

    def judge(self, job: Job) -> Verdict:
        """The verdict on one job.  A text can end the parser that reads it, and gets "error"."""
        reply = self.ask(json.dumps(dataclasses.asdict(job)) + "\n", job.wall_seconds())
        if reply is None:
            return _no_verdict(job, None, "none", "error", "the text ends Python's parser")
        return Verdict(**reply | {"results": tuple(GameResult(**result) for result in reply["results"])})


class Pool(contextlib.AbstractContextManager["Pool"]):
    """Referee workers, by default one per core of this process's rank, at a `priority` as nice(1) has it.  Safe to use
    from several threads.  close() leaves no process behind.  Raises JailError where the jail does not hold."""

    def __init__(self, workers: int | None = None, jailed: bool = True, priority: int = 0) -> None:
        cores = sorted(os.sched_getaffinity(0))
        rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        cores = cores[rank::ranks] or [cores[rank % len(cores)]]  # torchrun's processes share the machine's cores
        self.jailed, self.closed = jailed, False
        self._workers = [_Worker(cores[i % len(cores)], jailed) for i in range(workers or len(cores))]
        try:
            for worker in self._workers:
                worker.check(priority)
        except BaseException:
            self.close()
            raise

    def judge(self, jobs: Sequence[Job]) -> list[Verdict]:
        """One verdict per job, in order; equal jobs are judged once."""
        said = f"the text is longer than {LIMITS.text_chars} characters"
        verdicts = {
            job: _no_verdict(job, None, "none", "no_function", said)
            for job in jobs
            if len(job.text) > LIMITS.text_chars
        }
        todo, errors = deque(job for job in dict.fromkeys(jobs) if job not in verdicts), list[BaseException]()

        def serve(worker: _Worker) -> None:
            with contextlib.suppress(IndexError):  # nothing left to do
                while not errors:
                    job = todo.popleft()
                    try:
                        verdicts[job] = worker.judge(job)
                    except BaseException as error:
                        errors.append(error)

        # Daemon threads, not an executor: that would play its whole queue before Python may exit.
        idle_first = sorted(self._workers, key=_Worker.is_busy)  # other threads keep some busy
        threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in idle_first]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()  # no timeout: every wait inside Worker.ask has one
        except (KeyboardInterrupt, SystemExit):  # nobody waits for the games under way
            self.close()
            raise
        if errors:  # of one job; those of other threads go on
            raise errors[0]
        return [verdicts[job] for job in jobs]

    def close(self) -> None:
        """End all processes.  Whoever waits for a verdict, or asks for one later, gets a RuntimeError."""
        self.closed = True
        for worker in self._workers:
            worker.close()

    def __exit__(self, *_: object) -> None:
        self.close()


_shared: list[Pool] = []
_sharing = threading.Lock()


def shared_pool(jailed: bool | None = None) -> Pool:
    """The pool that rewards and commands share, started on first use; jailed unless a caller says otherwise."""
    with _sharing:
        if _shared and jailed not in (None, _shared[0].jailed):
            _shared[0].close()
        if not _shared or _shared[0].closed:
            _shared[:] = [Pool(jailed=jailed is not False)]
            atexit.register(_shared[0].close)
        return _shared[0]


def execute_strategies(
    sources: Sequence[str],
    seeds: Sequence[int],
    size: int = 6,
    target: int = 2048,
    keys: str = "bepo",
    timeout: float = 5.0,
    record: bool = False,
    pool: Pool | None = None,
) -> list[list[GameResult]]:
    """Play many strategies, each on all seeds, over the pool's workers.  One result per seed, for each source.  Never
    raises for what a strategy does; ValueError for a game that cannot be.  `timeout` as in Job."""
    parts = [tuple(seeds[i : i + 4]) for i in range(0, len(seeds), 4)]  # small parts keep all workers busy to the end
    jobs = [Job(source, part, size, target, keys, timeout, record=record) for source in sources for part in parts]
    verdicts = iter((pool or shared_pool()).judge(jobs))
    return [[result for _ in parts for result in next(verdicts).results] for _ in sources]


def execute_strategy(source: str, seed: int = 0, **how: Any) -> GameResult:
    """One strategy's game on one board; `how` as above."""
    return execute_strategies([source], [seed], **how)[0][0]


# ---------------------------------------------------------------------------------------------------------------------
# Rewards

BOARDS = (0, 1, 2, 3)  # what a reward function plays without a column `seeds`: for tests and for trying things out
SUCCESS, NEARLY = 20.0, 10.0
LOST = {"lost": 2.0, "stuck": -1.0, "timeout": -1.0, "error": -3.0, "invalid_move": -3.0}  # where no tile was made
WORKS = {"load": 1.0, "fail": -0.5, "none": -2.0}
CLEAN, CHEATING, NOTHING_TO_CHECK = 1.0, -20.0, -1.0
CUT_OFF = -1.0

_judge_batch = lru_cache(maxsize=2)(lambda jobs: shared_pool().judge(jobs))  # all reward functions ask for a batch


def completion_text(completion: Any) -> str:
    """The text of a completion as TRL passes it: a string, or a list of messages."""
    return completion if isinstance(completion, str) else "".join(str(m.get("content") or "") for m in completion)


def judge(completions: Sequence[Any], **kwargs: Any) -> list[Verdict]:
    """The verdict on each completion.  A batch is judged once, whichever reward asks first.  The game comes from the
    dataset's columns, an entry per completion: `seeds`, `size`, `target`, `keys`, `timeout`, `reasons`, `record`."""
    names = kwargs.keys() & {"size", "target", "keys", "timeout", "reasons", "record"}
    rows = [{name: kwargs[name][i] for name in names} for i in range(len(completions))]
    boards = map(tuple, kwargs.get("seeds", [BOARDS] * len(completions)))
    jobs = (
        Job(completion_text(completion), seeds, completion=True, **row)
        for completion, seeds, row in zip(completions, boards, rows, strict=True)
    )
    return _judge_batch(tuple(jobs))


def function_works(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """TRL reward: is there a strategy, and does it load?"""
    return [WORKS[verdict.works] for verdict in judge(completions, **kwargs)]


def no_cheating(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """TRL reward: does it leave the interpreter and forbidden modules alone?"""
    verdicts = judge(completions, **kwargs)
    return [CHEATING if v.cheating else NOTHING_TO_CHECK if v.works == "none" else CLEAN for v in verdicts]


def game_reward(result: GameResult, target: int, flat: bool = False) -> float:
    """The reward of one game.  One that is not won is graded by its largest tile, up to NEARLY.  Breaking it off costs
    more with a small tile: up to 16, the difference in LOST.  `flat` is the published scheme."""
    if result.outcome in ("success", "no_function"):
        return SUCCESS if result.outcome == "success" else 0.0
    if flat:
        return LOST["lost" if result.outcome == "stuck" else result.outcome]
    least, progress = LOST["lost"], min(1.0, max(0, result.max_tile - 4) / max(4, target - 4))
    price = (least - LOST[result.outcome]) * min(1.0, 16 / result.max_tile)
    return least + (NEARLY - least) * progress - price


def strategy_succeeds(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """TRL reward: how far it gets, as the mean over its boards; 0 without a function and for one that cheats."""
    rewards = []
    for i, verdict in enumerate(judge(completions, **kwargs)):
        target = kwargs["target"][i] if "target" in kwargs else 2048
        flat = bool(kwargs["flat_reward"][i]) if "flat_reward" in kwargs else False
        games = [] if verdict.cheating else [game_reward(result, target, flat) for result in verdict.results]
        rewards.append(sum(games) / max(1, len(games)))
    return rewards


REWARDS = (function_works, no_cheating, strategy_succeeds)


def ends_in_time(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """TRL reward of the stable recipe: -1 for an answer cut off at the length limit, because further text is free."""
    lengths = zip(kwargs["completion_ids"], kwargs["max_new_tokens"], strict=True)
    return [CUT_OFF if len(ids) >= limit else 0.0 for ids, limit in lengths]


def flat_groups(totals: Sequence[float], group: int) -> list[bool]:
    """For each group of completions: are all sums of rewards equal?  Then the group has no gradient."""
    return [max(part) - min(part) < 1e-6 for part in (totals[i : i + group] for i in range(0, len(totals), group))]


class Stage(NamedTuple):
    """A game to solve: the cells along each side of its board, and the tile that wins."""

    size: int
    target: int

    @classmethod
    def read(cls, text: str) -> Stage:
        """A stage as people write it, "4:2048".  Raises ValueError, in one line."""
        if not re.fullmatch(r"[0-9]{1,2}:[0-9]{1,20}", text):
            raise ValueError(f"a stage is a board's size and a target, like 4:2048, not {text!r}")
        stage = cls(*map(int, text.split(":")))
        check_game(*stage)
        if not 4 < stage.target <= 2 << stage.size**2:
            raise ValueError(f"target on {stage.size}x{stage.size} must be a tile from 8 to {2 << stage.size**2}")
        return stage


class Ladder:
    """The stages of training.  The next one begins once more than `bar` of the games of the last `groups` groups are
    won; after the last one the target doubles.  With bar 1 the first stage never ends.  The data loader asks for a
    step's groups during the step before, so a new stage holds from the step after the next."""

    def __init__(self, stages: Sequence[Stage], bar: float = 0.9, groups: int = 8) -> None:
        self.bar, self._later = bar, deque(stages)
        self.since = [(0, self._later.popleft())]  # (first step of a stage, stage)
        self.recent: deque[float] = deque(maxlen=groups)  # shares of won games at the newest stage

    def at(self, step: int) -> Stage:
        """The stage of a step's groups; the first step is 0."""
        return next(stage for first, stage in reversed(self.since) if first <= step)

    def record(self, step: int, stage: Stage, won: float) -> None:
        """Note a group's share of won games, and begin the next stage if it is time."""
        size, target = newest = self.since[-1][1]
        if stage == newest:  # groups that were under way when a stage began do not count
            self.recent.append(won)
        if len(self.recent) == self.recent.maxlen and statistics.fmean(self.recent) > self.bar:
            self.since.append((step + 2, self._later.popleft() if self._later else Stage(size, 2 * target)))
            self.recent.clear()


# ---------------------------------------------------------------------------------------------------------------------
# Configuration
#
# One class per command, and one base class per heading of its --help.  A tuple beside a type is a number's range.  Each
# class may have a check() of what else its options need, which raises UsageError.  check_config in toolkit/cli.py calls
# all of them.

Layout = Literal["bepo", "wasd", "zqsd", "arrows"]
PROMPT_TOKENS = 568  # room for the prompt: 251 of gpt-oss's tokens at most, with other tokenizers more
REASONING = {"none": 768, "low": 1024, "medium": 2048, "high": 4096}  # tokens of a completion, analysis included


def check_several(option: str, values: Sequence[object]) -> None:
    """Raise UsageError for a list that is empty, or has a value twice."""
    if not values or len({*values}) < len(values):
        raise UsageError(f"{option} needs at least one value, and none of them twice")


def check_stages(option: str, stages: Sequence[str]) -> None:
    """Raise UsageError for stages that cannot be played."""
    try:
        list(map(Stage.read, stages))
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    check_several(option, stages)


@dataclass(kw_only=True)
class GameOptions:
    """The keys, the prompt's example, and what a program may use."""

    keys: Layout = "bepo"  # keyboard layout of the four moves
    example: Literal["blank", "random"] = "blank"  # in the prompt: one key, or one of two at random (for small models)
    timeout: Annotated[float, (0.01, 3600.0)] = 5.0  # CPU seconds for a game's first 1,000 moves, again per 1,000 more
    unsafe_no_jail: bool = False  # run model-written code without seccomp; the result records it


@dataclass(kw_only=True)
class HeldOutOptions:
    """Held-out games."""

    held_out: tuple[str, ...] = ("4:2048", "6:2048")  # SIZE:TARGET stages; the first one is the result
    games: Annotated[int, (1, 10**4)] = 256  # boards, of later stages a quarter; a model writes a program for each

    def check(self) -> None:
        """The stages can be played."""
        check_stages("--held-out", self.held_out)


@dataclass(kw_only=True)
class ModelOptions:
    """How the model is loaded and sampled."""

    reasoning: Literal["none", "low", "medium", "high"] = "none"  # analysis before the answer; none: answer at once
    temperature: Annotated[float, (0.01, 10.0)] = 1.0  # of sampling, in training and evaluation
    max_new_tokens: Annotated[int, (1, 1 << 20)] = REASONING["none"]  # of a completion; with reasoning 1024 to 4096
    eval_batch_size: Annotated[int, (1, 1024)] = 32  # completions generated at a time in evaluation
    # On a GPU; auto: what doctor --measure found, otherwise gpt-oss as stored (MXFP4) from 24 GB on, others in 4 bits.
    weights: Literal["auto", "4bit", "stored", "16bit"] = "auto"

    @property
    def max_seq_length(self) -> int:
        """Tokens of the longest prompt and its completion."""
        return PROMPT_TOKENS + self.max_new_tokens


@dataclass(kw_only=True)
class CommonOptions:
    """The options that people change first."""

    model: str = "auto"  # auto: gpt-oss-20b with a CUDA GPU, else tiny; or smollm2, a hub id, a folder, also a run's
    recipe: Literal["stable", "published"] = "stable"  # sets the defaults of the other options
    config: str = ""  # YAML or JSON file with options, like a run's config.json; those on the command line win
    steps: Annotated[int, (1, 10**7)] = 120  # optimizer steps
    minutes: Annotated[float, (0.0, 1e6)] = 0.0  # end after about this time, evaluations included; 0: no limit
    output_dir: Path = Path("outputs")  # where the run's folder is created
    run_name: str = ""  # name of the run's folder; default: the model and the time
    resume: bool = False  # continue the newest run in --output-dir; naming a run again with --run-name continues it too
    seed: Annotated[int, (0, 2**32 - 1)] = 3407  # of weights, sampling and training boards
    json: bool = False  # print one JSON object as the last line of stdout, and everything else to stderr

    def check(self) -> None:
        """The run has the name of one folder."""
        if not re.fullmatch(r"|(?!latest$)[^\s./][^/\x00-\x1f]{0,60}(?<!\s)", self.run_name):
            raise UsageError(f"--run-name must be the name of one folder, not {self.run_name[:60]!r}")


@dataclass(kw_only=True)
class GRPOOptions:
    """The algorithm: groups, optimizer, loss, rewards, stages."""

    generations: Annotated[int, (2, 1024)] = 16  # completions in a group, compared with one another
    batch_size: Annotated[int, (1, 1024)] = 8  # completions in a forward pass
    accumulation: Annotated[int, (1, 1024)] = 4  # forward passes in a step: batch_size * accumulation completions
    boards: Annotated[int, (1, 64)] = 4  # boards that every completion of a group plays
    wordings: Annotated[int, (1, len(WORDINGS) - 1)] = len(WORDINGS) - 1  # of the prompt, used in turn
    learning_rate: Annotated[float, (0.0, 1.0)] = 2e-5  # peak, after the warm-up
    lr_schedule: Literal["linear", "constant"] = "constant"  # after the warm-up: down to 0, or constant at first
    decay_steps: Annotated[float, (0.0, 1e6)] = 0.4  # last steps, in which the rate falls to 0; below 1 a share of all
    warmup_steps: Annotated[float, (0.0, 1e6)] = 10  # steps until the peak, the first at a rate of 0; below 1 a share
    weight_decay: Annotated[float, (0.0, 1.0)] = 0.001
    max_grad_norm: Annotated[float, (0.0, 1e6)] = 1.0  # gradients are clipped to this norm
    objective: Literal["shared", "mean"] = "shared"  # of a group: equal programs share one advantage, or GRPO's mean
    loss_type: Literal["dr_grpo", "dapo", "grpo"] = "dr_grpo"  # TRL's; its others do the same on-policy
    scale_rewards: Literal["group", "batch", "none"] = "none"  # TRL's scale_rewards
    entropy_coef: Annotated[float, (0.0, 1.0)] = 0.0  # bonus for entropy
    beta: Annotated[float, (0.0, 100.0)] = 0.0  # weight of the KL divergence from the initial model
    skip_flat_groups: bool = True  # leave groups whose rewards are all equal out of the mean
    flat_reward: bool = False  # the published reward: 20 for a win, 2 for anything that plays
    cut_off_price: Annotated[float, (0.0, 100.0)] = 1.0  # penalty for an answer cut off at the length limit
    ladder: tuple[str, ...] = ("4:64", "4:256", "4:512")  # SIZE:TARGET stages, in order
    curriculum: bool = True  # begin the ladder's next stage once one is solved; after the last one the target doubles
    curriculum_bar: Annotated[float, (0.0, 1.0)] = 0.5  # share of won games above which a stage is solved
    curriculum_groups: Annotated[int, (1, 1024)] = 2  # groups over which that share is taken

    def check(self) -> None:
        """The stages can be played, and a step's completions make whole groups."""
        check_stages("--ladder", self.ladder)
        together = self.batch_size * self.accumulation
        if together % self.generations:
            raise UsageError(
                f"--batch-size times --accumulation ({together}) must be a multiple of --generations "
                f"({self.generations})"
            )


@dataclass(kw_only=True)
class RunOptions:
    """The LoRA adapter, checkpoints, best programs, output."""

    lora_rank: Annotated[int, (1, 1024)] = 4  # of the adapters
    adapt: Literal["all", "attention"] = "all"  # what gets adapters: attention and experts or MLP, or attention alone
    lora_alpha: Annotated[int, (1, 4096)] = 8
    loader: Literal["unsloth", "transformers"] = "unsloth"  # transformers: for FSDP, and on a CPU
    sampler: Literal["generate", "vllm"] = "generate"  # of completions in training: the trained model, or vLLM
    vllm_server: str = ""  # URL of a vLLM server that runs already; default: the run starts one
    save_steps: Annotated[int, (1, 10**7)] = 20  # steps between checkpoints
    keep: Annotated[int, (1, 10**6)] = 3  # newest checkpoints to keep, besides the best
    patience: Annotated[int, (1, 10**7)] = 20  # steps in a row with nothing to learn that end training
    race_games: Annotated[int, (1, 10**6)] = 256  # by which the best program is chosen
    best_of: Annotated[int, (-1, 10**6)] = 512  # control: best of so many untrained programs; -1: as many as the run's
    report_to: str = "tensorboard"  # tensorboard, wandb, trackio, mlflow, with commas between several; or none
    quiet: bool = False  # print only the result


@dataclass(kw_only=True)
class TrainConfig(CommonOptions, HeldOutOptions, GameOptions, ModelOptions, GRPOOptions, RunOptions):
    """Train a model with GRPO.  Then compare it, on held-out boards, with the untrained model and the controls.

    The defaults are the stable recipe for gpt-oss-20b.  The embedded model and --recipe published have their own:
    --help shows those of the given --model and --recipe."""

    def check(self) -> None:
        """The recipe, the loss and the loader go together."""
        if self.recipe == "published" and self.objective != "mean":
            raise UsageError(f"--objective {self.objective} needs --recipe stable: the published recipe is TRL's own")
        if self.loader == "unsloth" and self.loss_type == "dr_grpo" and self.scale_rewards == "group":
            raise UsageError(
                "--loss-type dr_grpo with --scale-rewards group needs --loader transformers: Unsloth would leave the "
                "rewards unscaled; or name --scale-rewards none or batch"
            )
        if self.loader == "unsloth" and SHARDED:
            raise UsageError("FSDP needs --loader transformers: Unsloth keeps the whole model in one process")


EMBEDDED: dict[str, Any] = {  # the embedded model's own numbers, chosen by measurement: benchmarks/LOG.md
    "steps": 80, "generations": 64, "batch_size": 64, "accumulation": 1, "boards": 1,
    "learning_rate": 1.4e-3, "warmup_steps": 5, "decay_steps": 0.25, "max_grad_norm": 0.2, "entropy_coef": 0.04,
    "objective": "mean", "lora_rank": 32, "lora_alpha": 64, "max_new_tokens": 64, "eval_batch_size": 128, "best_of": -1,
    "ladder": ("6:2048", "4:512", "4:2048", "4:4096")}  # fmt: skip
SMOLLM2: dict[str, Any] = {
    "steps": 40, "generations": 32, "batch_size": 8, "accumulation": 4, "boards": 2,
    "learning_rate": 1e-4, "warmup_steps": 5, "lora_rank": 16, "lora_alpha": 32, "max_new_tokens": 96,
    "temperature": 0.8, "example": "random", "games": 64, "best_of": 256}  # fmt: skip
OWN_NUMBERS = {"tiny": EMBEDDED, "smollm2": SMOLLM2}
PUBLISHED: dict[str, Any] = {  # the public notebook's, for every model
    "recipe": "published", "steps": 1000, "generations": 2, "batch_size": 1, "accumulation": 4, "boards": 1,
    "wordings": 1, "learning_rate": 5e-5, "warmup_steps": 0.1, "lr_schedule": "linear", "loss_type": "dapo",
    "scale_rewards": "group", "save_steps": 100, "ladder": ("6:2048",), "curriculum": False, "flat_reward": True,
    "cut_off_price": 0.0, "skip_flat_groups": False, "max_grad_norm": 1.0, "entropy_coef": 0.0,
    "objective": "mean"}  # fmt: skip


def train_defaults(model: str, recipe: str = "stable", reasoning: str = "none") -> TrainConfig:
    """Defaults of the options for a model, a recipe and a reasoning effort."""
    effort = reasoning if reasoning in REASONING else "none"
    tokens = 200 if recipe == "published" and effort == "none" else REASONING[effort]
    room = models.positions_of(model, PROMPT_TOKENS + tokens) - PROMPT_TOKENS  # a small model has fewer positions
    numbers: dict[str, Any] = {"model": model, "reasoning": effort, "max_new_tokens": max(1, min(tokens, room))}
    numbers |= OWN_NUMBERS.get(models.base_of(model), {}) | (PUBLISHED if recipe == "published" else {})
    numbers |= adapters.decided_options(model)
    return TrainConfig(loader=models.default_loader(model), **numbers)


@dataclass(kw_only=True)
class EvalOptions:
    """What is evaluated."""

    model: str  # tiny, smollm2, a hub id, a folder (model, adapter, checkpoint or run) or a .py file
    seed: Annotated[int, (0, 2**32 - 1)] = 3407  # of sampling
    json: bool = False  # print one JSON object as the last line of stdout, and everything else to stderr


def check_unasked(config: Any, needed: str) -> None:
    """Raise UsageError for an option that only a model's answers depend on, where a program plays."""
    for name in ("answers", "seed", "example", *(field.name for field in dataclasses.fields(ModelOptions))):
        if getattr(config, name, None) != getattr(type(config), name, None):
            raise UsageError(f"{spelled(name)} needs {needed}")


@dataclass(kw_only=True)
class EvalConfig(EvalOptions, HeldOutOptions, GameOptions, ModelOptions):
    """Evaluate a model, an adapter, a checkpoint or a strategy file (.py) on held-out boards, beside the controls."""

    def check(self) -> None:
        """A program is not asked."""
        if self.model.endswith(".py"):
            check_unasked(self, f"a model: {self.model} is a program")


@dataclass(kw_only=True)
class PlayOptions:
    """Which games to play."""

    player: str  # Python source that defines strategy(board), or a run's folder; with --model, a URL or what eval takes
    model: bool = False  # the player is a model, a server's (http://HOST:PORT) or one that is loaded here
    answers: Annotated[int, (1, 1000)] = 8  # of the model; the best one's program plays
    served_name: str = ""  # the model's name at the server; default: the only one that it lists
    api_key_file: str = ""  # file that holds the server's key; default: OPENAI_API_KEY in the environment
    seed: Annotated[int, (0, 2**32 - 1)] = 3407  # of the model's sampling
    size: int = 4  # cells along each side of the board
    target: int = 2048  # the tile that wins
    seeds: Annotated[tuple[int, ...], (0, 1 << 63)] = tuple(range(10))  # a game each
    watch: bool = False  # replay the first game in the terminal
    delay: Annotated[float, (0.0, 60.0)] = 0.02  # seconds between its moves
    json: bool = False  # print one JSON object as the last line of stdout, and everything else to stderr

    def check(self) -> None:
        """The game can be played, and a model's options ask one."""
        if not self.model:
            check_unasked(self, "a model after --model: a program is not asked, and boards have --seeds")
        if self.served_name or self.api_key_file:
            from toolkit.serve.ask import URL

            if not (self.model and URL.match(self.player)):
                raise UsageError("--served-name and --api-key-file need a server's URL after --model")
        try:
            check_game(self.size, self.target)
            Stage.read(f"{self.size}:{self.target}")
        except ValueError as error:
            raise UsageError(f"--{error}") from None
        check_several("--seeds", self.seeds)


@dataclass(kw_only=True)
class PlayConfig(PlayOptions, GameOptions, ModelOptions):
    """Play one strategy file, or with --model URL_OR_FOLDER the best of some programs that a model writes."""


# ---------------------------------------------------------------------------------------------------------------------
# Model

AnyConfig = TrainConfig | EvalConfig
FINAL_CHANNEL = "<|channel|>final<|message|>"


def game_spec(layout: str = "bepo") -> GameSpec:
    """What the warm start of the embedded model has to know of the game."""
    from toolkit.model.tiny import GameSpec

    return GameSpec(layout, LAYOUTS, FINAL_CHANNEL, partial(build_prompt, keys=layout), len(WORDINGS) - 1)


def open_channel(tokenizer: Any, reasoning: str) -> None:
    """Let a harmony model start its answer in the final channel, or with an analysis if there is room for one.  Let a
    model with <think> leave that out or not, also where an export is served."""
    template, at_once = tokenizer.chat_template or "", reasoning == "none"
    opening = "{%- if add_generation_prompt -%}" + FINAL_CHANNEL + "{%- endif -%}"
    no_thoughts = "{%- set enable_thinking = false -%}"
    if "<|channel|>" in template:  # the template of a trained adapter may already have the opening
        tokenizer.chat_template = template.removesuffix(opening) + opening * at_once
    elif "enable_thinking" in template:
        tokenizer.chat_template = no_thoughts * at_once + template.removeprefix(no_thoughts)


def template_arguments(tokenizer: Any, reasoning: str) -> dict[str, Any]:
    """Arguments of the chat template, which ignores what it does not know.  Unnamed, gpt-oss's effort is medium."""
    effort = loading.least_effort(tokenizer) if reasoning == "none" else reasoning
    return {"reasoning_effort": effort, "enable_thinking": reasoning != "none"}


def load_model(name: str, config: AnyConfig, say: Callable[[Any], None], trains: bool = False) -> tuple[Any, Any]:
    """A model and its tokenizer; if it `trains`, of an adapter the base alone: see `begin_from`.  Raises UsageError, in
    one line."""
    plain = models.uses_transformers(config, name)
    name, load = loading.prepare(name, config, say, game_spec, trains)
    if not plain:
        import unsloth  # before transformers and trl, which it patches, and before torch, which it sets up
    import torch
    from safetensors import SafetensorError

    with models.reading_model(f"model {name!r} could not be loaded"):
        try:
            if plain:
                model, tokenizer = loading.load_plain(name, **load)
            else:
                model, loaded = unsloth.FastLanguageModel.from_pretrained(
                    model_name=name,
                    max_seq_length=config.max_seq_length,
                    random_state=config.seed,
                    trust_remote_code=False,
                    **load,
                )
                tokenizer = loading.text_tokenizer(loaded)
                loading.sample_as_trained(model, tokenizer)
        except SafetensorError as error:
            raise UsageError(
                f"the weights of {name} are damaged ({error}): restore them, or name another model"
            ) from error
        if not tokenizer.chat_template:
            raise UsageError(f"model {name!r} has no chat template: take its instruct variant")
        open_channel(tokenizer, config.reasoning)
        asked = [{"role": "user", "content": build_prompt()}]
        arguments = template_arguments(tokenizer, config.reasoning)
        tokenizer.apply_chat_template(asked, add_generation_prompt=True, **arguments)
    loading.check_weights(model, name, load)
    if SHARDED:
        return model, tokenizer
    if torch.cuda.is_available():
        decoding.Decoding(model)
    elif plain:
        cpu_speed.speed_up(model)
    else:  # by Unsloth: the embedded model
        cpu_speed.generate_merged(model, experts_alone=True)
    return model, tokenizer


def add_adapters(model: Any, config: TrainConfig) -> Any:
    """LoRA on attention and, unless the config says otherwise, on experts; all other weights are frozen."""
    # Where experts are fused into one parameter (16 bits, and on a CPU), naming their projections adapts nothing.
    fused = {name.split(".", 3)[-1] for name, _ in model.named_parameters() if re.search(r"experts\.\w+_proj$", name)}
    whole, modules = config.adapt == "all", ["q_proj", "k_proj", "v_proj", "o_proj"]
    numbers: dict[str, Any] = {
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": modules + ["gate_proj", "up_proj", "down_proj"] * whole,
        "target_parameters": sorted(fused) if fused and whole else None,
    }
    import torch

    if config.loader == "transformers":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(config.seed)  # the same weights on every rank
        towers = r".*\b(vision|audio|visual).*"  # they see and hear, and text does not pass them
        if any(re.fullmatch(towers, name) for name, _ in model.named_modules()):
            numbers["exclude_modules"] = towers
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **numbers))
    from unsloth import FastLanguageModel

    gpu = torch.cuda.is_available()
    adapted = FastLanguageModel.get_peft_model(
        model, use_gradient_checkpointing=gpu, random_state=config.seed, **numbers
    )
    if gpu:
        # TRL switches checkpointing off to generate, and on again in PyTorch's default way, in which Unsloth's experts
        # keep what they compute.
        base, way = adapted.get_base_model(), {"use_reentrant": True}
        base.gradient_checkpointing_enable = partial(
            base.gradient_checkpointing_enable, gradient_checkpointing_kwargs=way
        )
    return adapted


def computes_in_bfloat16(model: Any) -> bool:
    """Whether forward passes run under bfloat16's autocast: on a GPU, and where a CPU's settings say so."""
    import torch

    return torch.cuda.is_available() or model.dtype == torch.bfloat16


def sample_batch(model: Any, tokenizer: Any, prompts: Sequence[str], config: AnyConfig) -> list[str]:
    """A completion of each prompt, all at once."""
    batch = tokenizer.apply_chat_template(
        [[{"role": "user", "content": asked}] for asked in prompts],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        padding=True,
        tokenizer_kwargs={"padding_side": "left"},
        **template_arguments(tokenizer, config.reasoning),
    ).to(model.device)  # (B, T)
    ids = model.generate(
        **batch,
        max_new_tokens=config.max_new_tokens,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=config.temperature,
        pad_token_id=tokenizer.pad_token_id,
    )
    texts: list[str] = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def sample_completions(model: Any, tokenizer: Any, prompts: Sequence[str], config: AnyConfig) -> list[str]:
    """A completion of each prompt, sampled at the config's temperature; special tokens stripped, as in TRL.  Where
    memory runs out, half as many are sampled at a time."""
    import torch

    texts, rows = list[str](), config.eval_batch_size
    naming = memory.naming_memory("answers were sampled", "fewer --max-new-tokens")
    model.eval()
    bf16 = torch.autocast(model.device.type, torch.bfloat16, enabled=computes_in_bfloat16(model))  # as in training
    with torch.random.fork_rng(), torch.no_grad(), bf16, naming:  # training keeps its own random numbers
        torch.manual_seed(config.seed)
        for part in bars.in_parts(prompts, "sampling", config.eval_batch_size):
            done = 0
            while done < len(part):
                sample = partial(sample_batch, model, tokenizer, part[done : done + rows], config)
                # With FSDP all ranks have to sample batches of the same size.
                found = sample() if rows == 1 or SHARDED else memory.unless_out_of_memory(sample)
                if found is None:
                    rows = max(1, min(rows, len(part)) // 2)
                else:
                    texts += found
                    done += rows
    return texts


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation

TO_THE_END = 1 << 64  # a target that no board can reach


def board_seeds(count: int, *parts: object, held_out: bool = False) -> tuple[int, ...]:
    """Seeds of boards from this machine's key: even for training, odd for evaluation.  Equal parts, equal boards."""
    digests = (hashlib.sha256(json.dumps([board_key(), *parts, i]).encode()).digest()[:8] for i in range(count))
    return tuple(int.from_bytes(digest) >> 1 & ~1 | held_out for digest in digests)


class Evaluator:
    """Plays programs and models on the held-out boards of a stage, to their end or to a `goal`.  It has one board in
    `every` of those that the config asks for."""

    def __init__(self, config: AnyConfig, size: int, target: int, goal: int = TO_THE_END, every: int = 1) -> None:
        self.config, self.size, self.target, self.goal = config, size, target, goal
        self.letters = LAYOUTS[config.keys]  # for up, down, left and right
        self.held_out_seeds = board_seeds(math.ceil(config.games / every), held_out=True)
        self.at = partial(Evaluator, config)

    def boards(self, count: int, purpose: str) -> tuple[int, ...]:
        """Seeds of other boards, for one purpose of this run."""
        return board_seeds(count, self.config.seed, purpose)

    def new_game(self, seed: int) -> GameBoard:
        """A game as this evaluator plays it."""
        return GameBoard(self.size, seed, self.goal)

    def play(
        self, sources: Sequence[str], seeds: Sequence[int], record: bool = False, pool: Pool | None = None
    ) -> list[list[GameResult]]:
        """Every program's games on some boards, in the shared pool or another."""
        return execute_strategies(sources, seeds, **self._game(), record=record, pool=pool)

    def _game(self) -> dict[str, Any]:
        return {"size": self.size, "target": self.goal, "keys": self.config.keys, "timeout": self.config.timeout}

    def spare_pool(self) -> Pool:
        """A pool of one worker that gets what other work leaves of a core."""
        return Pool(1, shared_pool().jailed, priority=10)

    def answers(self, model: Any, tokenizer: Any, count: int, wordings: Sequence[int], **other: Any) -> list[str]:
        """Answers to this stage's prompt, its wordings in turn.  `other` options replace the config's."""
        c = self.config
        prompts = [build_prompt(self.size, self.target, c.keys, wording, c.example) for wording in wordings]
        asked = list(islice(cycle(prompts), count))
        sample = partial(sample_completions, model, tokenizer, asked, dataclasses.replace(self.config, **other))
        return sample() if SHARDED else by_first_rank(sample)  # with FSDP each rank holds a shard

    def judge(self, answers: Sequence[str], boards: Sequence[Sequence[int]]) -> list[Verdict]:
        """The verdict on each answer, after its games on its boards."""
        how = {**self._game(), "completion": True, "reasons": self.config.reasoning != "none"}
        jobs = [Job(answer, tuple(seeds), **how) for answer, seeds in zip(answers, boards, strict=True)]
        return by_first_rank(lambda: shared_pool().judge(jobs))


def held_out_games(config: AnyConfig, others: Mapping[str, str] | None = None) -> BackgroundGames:
    """The games of the controls, and of other programs by their names, on the held-out boards.  They begin now: a
    model's start leaves a core idle, and so does its training."""
    from toolkit.games import programs

    games = programs.BackgroundGames(map(Stage.read, config.held_out), partial(Evaluator, config))
    if RANK == 0:
        games.add({**programs.controls(LAYOUTS[config.keys]), **(others or {})})
    return games


# ---------------------------------------------------------------------------------------------------------------------
# Training


def training_row(config: TrainConfig, group: int, stage: Stage) -> dict[str, Any]:
    """A group's row of the dataset: a prompt, and boards of its own, which all of its completions play."""
    prompt = build_prompt(*stage, config.keys, group % config.wordings, config.example)
    same = {name: getattr(config, name) for name in ("keys", "timeout", "flat_reward", "max_new_tokens")}
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "seeds": board_seeds(config.boards, config.seed, group),
        **stage._asdict(),
        "reasons": config.reasoning != "none",
        **same,
    }


def training_set(config: TrainConfig, ladder: Ladder) -> Any:
    """A datasets.Dataset with one row per group.  Rows are made on demand, at the stage of their step."""
    from datasets import Dataset

    groups = RANKS * config.batch_size * config.accumulation // config.generations  # per step

    def rows(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        made = [training_row(config, n, ladder.at(n // groups)) for n in batch["group"]]
        return {name: [row[name] for row in made] for name in made[0]}

    return Dataset.from_dict({"group": list(range(config.steps * groups))}).with_transform(rows)


def logged(verdict: Verdict, size: int) -> dict[str, Any]:
    """A verdict for a file.  Boards have names there: with a seed, anyone can search for the moves that win."""
    games = [dataclasses.asdict(result) for result in verdict.results]
    return {**vars(verdict), "results": [{"board": board_name(size, game.pop("seed")), **game} for game in games]}


class Rollouts:
    """Every step's judged completions, a line each in rollouts.jsonl.  The ladder follows from them."""

    def __init__(self, file: Path, config: TrainConfig, ladder: Ladder) -> None:
        self._file, self._group, self._ladder = file, config.generations, ladder
        self.last: dict[str, Any] = {"step": 0}  # the last step's line
        self.flat: list[bool] = []  # for each group of the last step: does it have no gradient?

    def record(self, completions: Sequence[Any], totals: Sequence[float], columns: Mapping[str, Sequence[Any]]) -> None:
        """Write down a step: this rank's completions, and the weighted sums of all ranks' rewards."""
        from accelerate.utils import gather_object

        rows = [
            {"text": completion_text(completion), **logged(verdict, columns["size"][0])}
            for completion, verdict in zip(completions, judge(completions, **columns), strict=True)
        ]
        rows = [row | {"reward": round(total, 4)} for row, total in zip(gather_object(rows), totals, strict=True)]
        self.add(
            {
                "step": self.last["step"] + 1,
                "size": columns["size"][0],
                "target": columns["target"][0],
                "completions": rows,
            }
        )
        if RANK == 0:
            self.write(self.last)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a line."""
        with open(self._file, "a", encoding="utf-8", opener=no_link) as file:
            file.write(json.dumps(row) + "\n")

    def add(self, row: dict[str, Any]) -> None:
        """Take note of a step, which is new or was read back from rollouts.jsonl."""
        self.last, completions = row, row["completions"]
        self.flat = flat_groups([completion["reward"] for completion in completions], self._group)
        for i in range(0, len(completions), self._group):
            games = [game for completion in completions[i : i + self._group] for game in completion["results"]]
            won = statistics.fmean(game["outcome"] == "success" for game in games)
            self._ladder.record(row["step"] - 1, Stage(row["size"], row["target"]), won)


def without_flat_groups(batch: dict[str, Any], flat: Sequence[bool], by_token: bool) -> dict[str, Any]:
    """A batch whose loss is that of the groups with spread alone; unchanged where there are none, or only such groups.
    A flat group has no gradient but counts in the loss's mean, over completions or over tokens.  So the advantages of
    the other groups are scaled up.  `flat` are the groups of all ranks; a batch holds those of its own rank."""
    import torch
    from accelerate.utils import gather_object

    if all(flat) or not any(flat):
        return batch
    values = batch["advantages"]  # (B,)
    own = flat[RANK * len(flat) // RANKS : (RANK + 1) * len(flat) // RANKS]
    kept = ~torch.tensor(own, device=values.device).repeat_interleave(len(values) // len(own))  # (B,)
    weights = batch["completion_mask"].sum(1) if by_token else torch.ones_like(values)  # (B,)
    sums = gather_object([(weights.sum().item(), (weights * kept).sum().item())])
    every, some = map(sum, zip(*sums, strict=True))
    return batch | {"advantages": values * kept * every / some}


def skip_steps(trainer: Any, rollouts: Rollouts, config: TrainConfig) -> Any:
    """A callback that leaves out optimizer steps.  Without a gradient, momentum or an entropy bonus alone would move
    the weights at random.  A gradient that is not finite would ruin them for good."""
    from transformers import TrainerCallback

    class SkipSteps(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
            flat = config.skip_flat_groups and config.beta == 0 and all(rollouts.flat)
            if flat or not math.isfinite(trainer.gradient_norm):
                optimizer.zero_grad()

    return SkipSteps()


def trainer_class(rollouts: Rollouts, config: TrainConfig, run: Path) -> type[Any]:
    """TRL's GRPOTrainer without the flat groups.  It writes down every step; the toolkit adds checkpoints, curves."""
    from trl import GRPOTrainer

    class Trainer(AtomicCheckpoints, GRPOTrainer):  # type: ignore[misc]
        run_folder, keep_checkpoints = run, config.keep

        def __init__(self, observer: watch.Observer, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            if (
                "ref" in self.model.peft_config
            ):  # TRL's second adapter, for the KL divergence: disable_adapter is enough
                self.model.delete_adapter("ref")  # beside it, a resumed run would not load the trained one
            self.observer = observer
            self.add_callback(skip_steps(self, rollouts, config))
            self.gradient_norm = 0.0  # of the last step, before clipping
            self.seconds: dict[str, float] = {}  # of the last step, by its part

        def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids: Any) -> Any:
            began = time.perf_counter()
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids)  # (B of all ranks, R)
            totals = (rewards * self.reward_weights.to(rewards.device)).sum(1)  # (B of all ranks,)
            columns = {name: [row[name] for row in inputs] for name in inputs[0] if name != "prompt"}
            rollouts.record(completions, totals.tolist(), columns)
            self.seconds["score"] = time.perf_counter() - began
            return rewards

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            began, together = time.perf_counter(), config.batch_size * config.accumulation
            fewer = memory.fewer_completions(config.generations, config.batch_size, config.accumulation)
            with memory.naming_memory(f"{together} completions were generated", fewer):
                batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
            self.seconds["generate"] = time.perf_counter() - began - self.seconds["score"]
            with memory.naming_memory("the policy was measured", "fewer --max-new-tokens"):
                self.observer.measure(batch)
            if config.objective == "shared":
                batch = advantages.shared(batch, rollouts.last["completions"], config.generations)
            flat = rollouts.flat if config.skip_flat_groups else []
            return without_flat_groups(batch, flat, self.loss_type == "dapo")

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            doing = f"the model was updated with {config.batch_size} completions at a time"
            smaller = memory.smaller_passes(config.batch_size, config.accumulation)
            with memory.naming_memory(doing, smaller or "fewer --max-new-tokens", resume_with=smaller):
                return super().training_step(*args, **kwargs)

        def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
            norm = super()._get_grad_norm(*args, **kwargs)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # with FSDP each rank has its shard's
            self.gradient_norm = float(norm)
            return norm

        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            super().log(logs | (self.observer.curves() if "loss" in logs else {}), *args, **kwargs)

        def is_best(self) -> bool:
            return self.observer.is_best()

    return Trainer


def make_trainer(
    model: Any,
    tokenizer: Any,
    config: TrainConfig,
    run: Path,
    rollouts: Rollouts,
    rows: Any,
    observer: watch.Observer | None = None,
) -> Any:
    """The trainer, as the config says; `rows` is the dataset."""
    import torch
    from trl import GRPOConfig

    gpu, plain = torch.cuda.is_available(), config.loader == "transformers"
    decay = int(config.decay_steps if config.decay_steps >= 1 else config.decay_steps * config.steps)
    weights = {**dict.fromkeys(REWARDS, 1.0), ends_in_time: config.cut_off_price}
    same = ("temperature", "learning_rate", "warmup_steps", "weight_decay", "max_grad_norm", "loss_type",
            "scale_rewards", "entropy_coef", "beta", "save_steps")  # fmt: skip
    others: dict[str, Any] = {name: getattr(config, name) for name in same}  # TRL's names
    if config.lr_schedule == "constant":
        others["lr_scheduler_kwargs"] = {"num_decay_steps": decay}
    if plain:
        others["gradient_checkpointing"] = gpu  # Unsloth's loader has set it
    elif gpu:
        others["unsloth_grpo_mini_batch"] = 1  # unnamed, its forward passes a batch follow from the memory free then
    arguments = GRPOConfig(
        **others,
        output_dir=str(run),
        max_steps=config.steps,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.accumulation,
        num_generations=config.generations,
        max_completion_length=config.max_new_tokens,
        seed=config.seed,
        chat_template_kwargs=template_arguments(tokenizer, config.reasoning),
        reward_weights=[*weights.values()],
        lr_scheduler_type="linear" if config.lr_schedule == "linear" else "warmup_stable_decay",
        optim="adamw_torch_fused",  # in 8 bits each small tensor has its own kernels
        vllm_importance_sampling_correction=config.sampler == "vllm",  # Unsloth's default is off
        mask_truncated_completions=False,  # Unsloth would mask them with dapo, and clip otherwise
        router_aux_loss_coef=0.0,  # gpt-oss ships 0.9, which would be added to the loss
        shuffle_dataset=False,  # step n plays the same boards in every run of a seed
        save_strategy="steps",
        use_cpu=not gpu,
        bf16=computes_in_bfloat16(model),
        dataloader_pin_memory=gpu,
    )
    return trainer_class(rollouts, config, run)(
        observer=observer or watch.Observer(),
        model=model,
        processing_class=tokenizer,
        args=arguments,
        train_dataset=rows,
        reward_funcs=[*weights],
    )


def learn(
    model: Any, tokenizer: Any, config: TrainConfig, run: Path, console: Console, games: BackgroundGames, started: float
) -> watch.Progress:
    """Train, from the newest checkpoint on, and save the adapter.  `games` are the controls', which play meanwhile."""
    from toolkit.run import report

    bar = config.curriculum_bar if config.curriculum else 1.0
    ladder = Ladder(list(map(Stage.read, config.ladder)), bar, config.curriculum_groups)
    rollouts = Rollouts(run / "rollouts.jsonl", config, ladder)
    progress = watch.Progress(rollouts, games, run, console, started)
    trainer = make_trainer(model, tokenizer, config, run, rollouts, training_set(config, ladder), progress)
    checkpoint = progress.begin(trainer)
    check_one_adapter(checkpoint)
    if by_first_rank(lambda: checkpoint and not (run / "report.html").exists()):  # it was killed
        console.print(by_first_rank(partial(report.try_report, run)), soft_wrap=True)
    with progress.watching():
        trainer.train(resume_from_checkpoint=checkpoint)
    weights = ranks.whole_weights(trainer)
    if RANK == 0:
        (run / "adapter" / "README.md").unlink(missing_ok=True)  # results of earlier weights
        model.save_pretrained(run / "adapter", state_dict=weights)
        tokenizer.save_pretrained(run / "adapter")
    return progress


def start_players(config: GameOptions) -> Pool:
    """The shared pool, with or without the jail as the command line says."""
    if config.unsafe_no_jail and RANK == 0:
        print(
            "warning: --unsafe-no-jail: model-written code runs with all your rights, on your files and your network",
            file=sys.stderr,
        )
    return shared_pool(jailed=not config.unsafe_no_jail)


def train(config: TrainConfig, console: Console) -> dict[str, Any]:
    """The train command: train, evaluate with and without the adapter, save.  Returns what --json prints."""
    from toolkit.run import results, runs, trackers

    started, view = time.monotonic(), type(console)(quiet=True) if config.quiet else console
    models.check_model(config.model, config.reasoning, config.max_seq_length)
    if RANKS > 1:
        machine.prepare_environment(models.is_embedded(config.model))
        ranks.join(config.loader)
    start_players(config)
    run = by_first_rank(lambda: runs.open_run(config))
    trackers.keep_in(run, config.report_to)
    games = held_out_games(config)
    say = partial(view.print, soft_wrap=True)
    model, tokenizer = load_model(config.model, config, say, trains=True)
    model = add_adapters(model, config)
    if models.adapter_base(config.model):
        say(f"beginning from {config.model}")
        adapters.begin_from(model, run / START)
    with runs.blaming_the_folder(run), results.saying_how_to_go_on(run, config, say):
        by_first_rank(partial(runs.make_latest, run))
        progress = learn(model, tokenizer, config, run, view, games, started)
        return results.conclude(progress, model, tokenizer, started, console)


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def read_strategy(path: Path, pool: Pool) -> str:
    """The text of a strategy file that loads.  Raises UsageError."""
    try:
        source = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{path} cannot be read: {reason}") from None
    if (verdict := pool.judge([Job(source, (0,), size=2, target=8)])[0]).works != "load":  # in a game of a few moves
        raise UsageError(f"{path} does not load: {verdict.results[0].detail}")
    return source


def evaluate(config: EvalConfig, console: Console) -> dict[str, Any]:
    """The eval command.  Returns what --json prints."""
    from toolkit.games import evaluation, programs
    from toolkit.run import results

    started, pool = time.monotonic(), start_players(config)
    sources: dict[str, str] = {}
    if config.model.endswith(".py"):
        sources[evaluation.MODEL] = read_strategy(Path(config.model), pool)
    else:
        config.model = models.resolve_model(config.model)
        models.check_model(config.model, config.reasoning, config.max_seq_length)
    games = held_out_games(config, sources)
    say = partial(console.print, soft_wrap=True)
    scores = {} if sources else programs.evaluate_model(games.evaluators, *load_model(config.model, config, say))
    return results.conclude_evaluation(config.model, games, scores, pool.jailed, started, console)


def play(config: PlayConfig, console: Console) -> dict[str, Any]:
    """The play command.  Returns what --json prints."""
    from rich.table import Table

    from toolkit.serve import ask

    pool = start_players(config)
    if config.model:
        source, results = ask.best_program(config, sys.modules[__name__], console)
    else:
        source = read_strategy(Path(config.player), pool)
        (results,) = execute_strategies(
            [source], config.seeds, config.size, config.target, config.keys, config.timeout, record=True
        )
    if config.watch and results:
        game = GameBoard(config.size, results[0].seed, config.target)
        watch.replay(console, game, list(map(int, results[0].moves)), f"seed {results[0].seed}", config.delay)
    table = Table("seed", "outcome", "moves", "largest tile", "score", "CPU s", "detail")
    for r in results:
        table.add_row(*map(str, (r.seed, r.outcome, r.steps, r.max_tile, r.score)), f"{r.seconds:.3f}", r.detail)
    console.print(table if results else "no answer has a program that plays")
    return {
        "player": config.player,
        "source": source,
        "size": config.size,
        "target": config.target,
        "keys": config.keys,
        "games": {str(r.seed): dataclasses.asdict(r) for r in results},
        "jailed": pool.jailed,
    }


def commands() -> dict[str, tuple[type[Any], Callable[[Any, Console], Mapping[str, Any]]]]:
    """Every command with the class of its options and the function that runs it."""
    from toolkit.model import doctor
    from toolkit.run import report
    from toolkit.serve import export

    return {
        "train": (TrainConfig, train),
        "eval": (EvalConfig, evaluate),
        "play": (PlayConfig, play),
        "compare": (report.CompareConfig, report.compare),
        "doctor": (doctor.DoctorConfig, partial(doctor.doctor, program=sys.modules[__name__])),
        "export": (export.ExportConfig, partial(export.export, spec=game_spec)),
    }


def parse_arguments(argv: list[str]) -> Any:
    """A command line's config.  Raises UsageError; SystemExit(0) after --help."""
    from toolkit import cli

    return cli.parse_arguments(argv, commands(), train_defaults)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.  Returns the exit code: see toolkit/cli.py."""
    from toolkit import cli

    argv, known = list(sys.argv[1:] if argv is None else argv), commands()
    name, _ = cli.split(argv, known)
    return cli.main(partial(parse_arguments, argv), run=known[name][1])


if __name__ == "__main__":
    sys.exit(main())
