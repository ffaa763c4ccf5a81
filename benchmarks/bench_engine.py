#!/usr/bin/env python3
"""The engine of `gpt_2048_rl.py` against the usual list engine: the same games, microseconds per move, the ratio.

    python benchmarks/bench_engine.py

Both play the same random keys on the same seeds, several times in turns; their last boards must be equal.  It measures
CPU time, so other programs on the machine matter little.  Prints a table and one JSON line; exits with code 1 if the
target is missed.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro
from rich.console import Console
from rich.table import Table

from gpt_2048_rl import DIRECTIONS, LAYOUTS, GameBoard
from tests.list_engine import ListBoard

TARGET_RATIO = 2.5


@dataclass(frozen=True)
class Args:
    """What to play, and how often."""

    size: int = 6  # cells on a side
    target: int = 2048  # the tile that ends a game
    games: int = 20  # seeds 0, 1, ... in each repetition
    repetitions: int = 9  # of each side, in turns


def keys_of(seed: int) -> list[int]:
    """The directions that both sides play on a board; more than a random game needs."""
    return random.Random(f"keys {seed}").choices(range(4), k=10_000)


def play_ours(args: Args, seed: int, keys: list[int]) -> tuple[int, list[list[int]]]:
    """Number of moves and last board, played with do_action() and state() like a user of the class."""
    game, moves = GameBoard(args.size, seed, args.target), 0
    layout = LAYOUTS["bepo"]
    for key in keys:
        game.do_action(layout[key])
        moves += 1
        if game.state() != "ongoing":
            break
    return moves, game.board()


def play_lists(args: Args, seed: int, keys: list[int]) -> tuple[int, list[list[int]]]:
    """The same on the list engine."""
    game, moves = ListBoard(args.size, seed, args.target), 0
    for key in keys:
        game.move(DIRECTIONS[key])
        moves += 1
        if game.state != "ongoing":
            break
    return moves, game.grid


Play = Callable[[Args, int, list[int]], tuple[int, list[list[int]]]]


def measure(play: Play, args: Args, keys: list[list[int]]) -> tuple[float, list[list[list[int]]]]:
    """CPU microseconds per move over all games, and their last boards."""
    start = time.process_time()
    ends = [play(args, seed, keys[seed]) for seed in range(args.games)]
    seconds = time.process_time() - start
    return seconds / sum(moves for moves, _ in ends) * 1e6, [board for _, board in ends]


def main(args: Args) -> int:
    """Measure and print."""
    keys = [keys_of(seed) for seed in range(args.games)]
    ours, lists = [], []
    measure(play_ours, args, keys)  # fills the cache of lines, which happens once in a run of many games
    for _ in range(args.repetitions):
        micros, boards = measure(play_ours, args, keys)
        ours.append(micros)
        micros, expected = measure(play_lists, args, keys)
        lists.append(micros)
        if boards != expected:
            raise SystemExit("the two engines have played different games")
    ratios = [theirs / mine for theirs, mine in zip(lists, ours, strict=True)]
    table = Table(title=f"{args.games} games of random keys, {args.size}x{args.size} to {args.target}")
    for column in ("", "median", "lowest", "highest"):
        table.add_column(column, justify="right" if column else "left")
    for name, values in (("bytes engine, µs a move", ours), ("list engine, µs a move", lists), ("ratio", ratios)):
        table.add_row(name, *(f"{f(values):.2f}" for f in (statistics.median, min, max)))
    Console().print(table)
    ratio = statistics.median(ratios)
    print(
        json.dumps(
            {
                "args": asdict(args),
                "ours_us": ours,
                "lists_us": lists,
                "ratios": ratios,
                "ratio": ratio,
                "target": TARGET_RATIO,
            }
        )
    )
    return 0 if ratio >= TARGET_RATIO else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
