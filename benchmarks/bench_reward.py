#!/usr/bin/env python3
"""Do rewards rank programs by skill?  78 programs of `tests/programs.py`, with their games in `tests/games.json`.

    python benchmarks/bench_reward.py             # pairs of programs that are rewarded in the wrong order; seconds
    python benchmarks/bench_reward.py --record    # first plays the games missing in the record; about an hour for all

Exits with code 1 if more than 3% of the pairs are wrong.

A milestone records when a new largest tile appeared.  The milestones and the end of a game determine its reward at any
target up to 65536 and any time limit.  The programs are our own, so they run in this process, without a jail.

One line of the record is one program on one size: `{"program", "size", "source", "games"}`.  `source` is a hash of the
source, and a game is `[board, [[exponent, move, CPU seconds], ...], [outcome, moves, CPU seconds]]`.  Boards from 1000
on are for skill, from 2000 on for rewards.  The number of moves counts all calls but timeouts.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro
from rich.console import Console
from rich.table import Table

from gpt_2048_rl import GameBoard, direction_of, key_table
from tests.programs import PROGRAMS, RECORD, REWARD_BOARDS, SKILL_BOARDS, Game, wrongly_paid

LAST_TILE = 65536
IDLE_MOVES = 64  # successive moves without a change that end a game as stuck
CALL_SECONDS = 1.0  # CPU time limit of a call
SIZES = (4, 6)
TARGETS = (256, 1024, 4096, 16384, 65536)
MOST_WRONG = 0.03  # allowed share of wrong pairs


@dataclass(frozen=True)
class Args:
    """What to measure and to record."""

    record: bool = False  # play the games that are missing in the record
    path: Path = RECORD  # the record
    small_boards: int = 24  # boards of each kind per program on 4x4
    boards: int = 4  # boards of each kind per program on 6x6
    slow_boards: int = 2  # the same, for slow programs
    slow_ms: float = 0.5  # a program that needs more CPU time than this for a move on 6x6 is slow
    slowest_boards: int = 1  # the same, for the slowest programs
    slowest_ms: float = 2.0  # from here on it is one of the slowest
    measured_moves: int = 200  # moves used to measure the CPU time
    only: tuple[str, ...] = ()  # names of programs; default: all


class CallTimeoutError(BaseException):
    """A call took more than CALL_SECONDS.  Not an Exception, so that no program catches it."""


class Player:
    """A program in its own namespace, and the CPU time of its calls.

    It uses the thread's clock, because Linux advances the process's clock in ticks of 4 ms while ITIMER_VIRTUAL runs.
    """

    def __init__(self, source: str) -> None:
        namespace: dict[str, Any] = {"__name__": "strategy"}
        exec(compile(source, "<strategy>", "exec", dont_inherit=True), namespace)
        self.strategy: Callable[[list[list[int]]], object] = namespace["strategy"]
        self.seconds = 0.0
        self.start = math.inf  # when the current call began

    def __call__(self, board: list[list[int]]) -> object:
        """The program's answer.  Raises CallTimeoutError or whatever the program raises."""
        self.start = time.thread_time()
        try:
            key = self.strategy(board)
        finally:
            spent = time.thread_time() - self.start
            self.start = math.inf
            self.seconds += spent
        if spent > CALL_SECONDS:
            raise CallTimeoutError
        return key

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Ends calls that do not return.  One timer serves the whole game, so calls cost nothing extra."""

        def look(number: int, frame: FrameType | None) -> None:
            if time.thread_time() - self.start > CALL_SECONDS:
                raise CallTimeoutError

        before = signal.signal(signal.SIGVTALRM, look)
        signal.setitimer(signal.ITIMER_VIRTUAL, CALL_SECONDS / 4, CALL_SECONDS / 4)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)


def rounded(seconds: float) -> float:
    """Round to four significant digits."""
    return float(f"{seconds:.4g}")


def play(source: str, size: int, board: int, most_moves: float = math.inf) -> Game:
    """Play one game; after `most_moves` its outcome is "cut"."""
    random.seed(board)
    game, table, player = GameBoard(size, board, 2 * LAST_TILE), key_table(), Player(source)
    last, exponent = LAST_TILE.bit_length() - 1, max(game.flat())
    milestones, moves, idle, outcome = [(exponent, 0, 0.0)], 0, 0, ""
    with player.limited():
        while not outcome:
            try:
                direction = direction_of(player(game.board()), table)
            except CallTimeoutError:
                outcome = "timeout"
                break
            except Exception:
                direction, outcome = None, "error"
            moves += 1
            if direction is None:
                outcome = outcome or "invalid_move"
            elif not game.move(direction):
                idle += 1
                outcome = "stuck" * (idle >= IDLE_MOVES)
            else:
                idle = 0
                if (largest := max(game.flat())) > exponent:
                    exponent = largest
                    milestones.append((exponent, moves, rounded(player.seconds)))
                outcome = "success" if exponent >= last else "lost" if game.state() == "failed" else ""
            if moves >= most_moves:
                outcome = outcome or "cut"
    return board, milestones, (outcome, moves, rounded(player.seconds))


def cost(source: str, moves: int) -> float:
    """CPU milliseconds per call on 6x6, over the first moves of one game or of several short ones."""
    calls, seconds = 0, 0.0
    for board in REWARD_BOARDS[:6]:
        if calls < moves:
            _, _, end = play(source, 6, board, moves - calls)
            calls, seconds = calls + end[1], seconds + end[2]
    return 1000 * seconds / max(1, calls)


def digest(source: str) -> str:
    """A short hash of a source."""
    return hashlib.sha256(source.encode()).hexdigest()[:8]


def read(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The record's lines by program and size; empty if there is no record."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return {(row["program"], row["size"]): row for row in rows}


def write(path: Path, rows: Mapping[tuple[str, int], dict[str, Any]]) -> None:
    """Write one line per program and size, in the order of PROGRAMS.  The write is atomic."""
    order = [(name, size) for name in PROGRAMS for size in SIZES if (name, size) in rows]
    lines = (json.dumps(rows[pair], ensure_ascii=False, separators=(",", ":")) for pair in order)
    new = path.with_suffix(".new")
    new.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    new.replace(path)


def boards_of(args: Args, size: int, milliseconds: float) -> int:
    """How many boards of each kind a program plays, by its CPU time per move."""
    if size == SIZES[0]:
        return args.small_boards
    if milliseconds > args.slowest_ms:
        return args.slowest_boards
    return args.slow_boards if milliseconds > args.slow_ms else args.boards


def record(args: Args, costs: Mapping[str, float]) -> None:
    """Play the missing games: 4x4 before 6x6, in rounds of one board of each kind, the slowest programs last.

    After each round all programs have played the same boards, so an incomplete record is still useful.
    """
    rows = read(args.path)
    rounds = range(max(args.small_boards, args.boards, args.slow_boards, args.slowest_boards))
    start = time.monotonic()
    for size, number, name in itertools.product(SIZES, rounds, sorted(costs, key=lambda name: costs[name])):
        source, row = PROGRAMS[name], rows.get((name, size))
        if row is None or row["source"] != digest(source):
            row = {"program": name, "size": size, "source": digest(source), "games": []}
        played = {game[0] for game in row["games"]}
        boards = {SKILL_BOARDS[number], REWARD_BOARDS[number]} - played
        if number >= boards_of(args, size, costs[name]) or not boards:
            continue
        games = [play(source, size, board) for board in sorted(boards)]
        rows[name, size] = row | {"games": sorted([*row["games"], *games], key=lambda game: game[0])}
        write(args.path, rows)
        ends = ", ".join(f"{end[0]} {1 << best[-1][0]} {end[2]:.4g} s" for _, best, end in games)
        print(f"{time.monotonic() - start:6.0f} s  {size}x{size}  {name}: {ends}", flush=True)


def measure(args: Args) -> dict[str, float]:
    """Print and return the CPU milliseconds per call of every program."""
    names = args.only or tuple(PROGRAMS)
    costs = {name: cost(PROGRAMS[name], args.measured_moves) for name in names}
    table = Table(title=f"CPU time on 6x6 over {args.measured_moves} moves")
    table.add_column("program")
    table.add_column("ms a move", justify="right")
    for name in sorted(costs, key=lambda name: costs[name]):
        table.add_row(name, f"{costs[name]:.4f}")
    Console().print(table)
    return costs


def main(args: Args) -> int:
    """Record games if asked to; then check the order of the rewards against the record."""
    if args.record:
        record(args, measure(args))
    table = Table(title=f"{len(PROGRAMS)} programs: pairs in which the worse one is paid as much")
    outcome: dict[str, tuple[int, int]] = {}
    for column in ("board", "target", "pairs", "wrong"):
        table.add_column(column, justify="right")
    for size, target in itertools.product(SIZES, TARGETS):
        wrong, pairs = wrongly_paid(size, target)
        outcome[f"{size}x{size} {target}"] = len(wrong), pairs
        table.add_row(f"{size}x{size}", str(target), str(pairs), f"{len(wrong)} ({len(wrong) / pairs:.1%})")
    Console().print(table)
    print(json.dumps(outcome))
    return int(any(wrong > MOST_WRONG * pairs for wrong, pairs in outcome.values()))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
