#!/usr/bin/env python3
"""Scoring strategies: the jailed players of `gpt_2048_rl.py` against the usual way in the trainer's process.

    python benchmarks/bench_scoring.py

The usual way: exec the source, play on lists of lists, an alarm as time limit; one process, no protection.  Both sides
score the same strategies on the same boards, several times in turns.  The ratio compares wall times, so it needs an
idle machine.  The CPU times (referee and player against the one process) depend less on other programs.  Prints a table
and one JSON line; exits with code 1 if a target is missed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tyro  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from gpt_2048_rl import DIRECTIONS, LAYOUTS, LIMITS, GameBoard, Job, Pool, execute_strategies  # noqa: E402
from tests.battery import AHEAD, ASLEEP, LUCK, MEMORY, PROTOCOL, RESOURCES  # noqa: E402
from tests.list_engine import ListBoard  # noqa: E402

RANDOM = """import random
def strategy(board):
    return random.choice("éuai")
"""
COUNTING = """import random
def strategy(board):
    same = 0
    for _ in range({rounds}):
        for row in board:
            for a, b in zip(row, row[1:]):
                same += a == b
    return random.choice("éuai") if same >= 0 else "a"
"""
STRATEGIES = {"random moves": (RANDOM, 2.4), "a strategy that counts": (COUNTING, 1.8)}  # source, target for the ratio

Strategy = Callable[[list[list[int]]], str]


@dataclass(frozen=True)
class Args:
    """What to score, and how often."""

    size: int = 6  # cells on a side
    target: int = 2048  # the tile that ends a game
    boards: int = 4  # per strategy
    strategies: int = 12  # per repetition and side
    repetitions: int = 7  # per side, in turns
    rounds: int = 9  # of the counting loop in the slower strategy, which set its cost per call
    workers: int | None = None  # of our pool; default: one per core
    hostile: bool = True  # also time the hostile programs, some minutes


def load(source: str) -> Strategy:
    """Load a strategy in this process."""
    namespace: dict[str, Strategy] = {}
    exec(source, namespace)
    return namespace["strategy"]


def out_of_time(*_: object) -> None:
    """The alarm's handler."""
    raise TimeoutError


def score_in_process(source: str, seeds: range, args: Args) -> int:
    """Play the usual way.  Returns the number of moves."""
    directions = dict(zip(LAYOUTS["bepo"], DIRECTIONS, strict=True))
    signal.signal(signal.SIGALRM, out_of_time)
    strategy, steps = load(source), 0
    for seed in seeds:
        game = ListBoard(args.size, seed, args.target)
        signal.alarm(5)
        try:
            while game.state == "ongoing":
                game.move(directions[strategy([row[:] for row in game.grid])])
                steps += 1
        finally:
            signal.alarm(0)
    return steps


def microseconds_a_call(source: str, args: Args) -> float:
    """CPU time of the strategy alone, called on the boards of one game."""
    strategy, game, boards = load(source), GameBoard(args.size, 0, args.target), []
    while game.state() == "ongoing":
        boards.append(game.board())
        game.move(random.randrange(4))
    costs = []
    for _ in range(9):
        start = time.process_time()
        for board in boards:
            strategy(board)
        costs.append((time.process_time() - start) / len(boards) * 1e6)
    return min(costs)


def hostile_times(args: Args) -> list[tuple[float, float, str]]:
    """For every hostile program: wall seconds of scoring it, seconds without CPU use per board, its name."""
    times = []
    with Pool(1) as pool:
        for group in (RESOURCES, PROTOCOL, AHEAD, MEMORY, ASLEEP, LUCK):
            for name, (source, _) in group.items():
                start, referee = time.perf_counter(), workers_cpu(pool)
                (games,) = execute_strategies([source], range(args.boards), args.size, args.target, pool=pool)
                wall = time.perf_counter() - start
                idle = wall - (workers_cpu(pool) - referee) - sum(game.seconds for game in games)
                times.append((wall, idle / args.boards, name))
    return sorted(times, reverse=True)


START = """
import statistics, sys, time
sys.path.insert(0, sys.argv[1])
import gpt_2048_rl as program
start = time.perf_counter()
referee = program.Referee()
started = time.perf_counter()
job, times = program.Job("", ()), []
for _ in range(100):
    begin = time.perf_counter()
    referee.play("def strategy(board):\\n    return 'a'\\n", job)
    times.append(time.perf_counter() - begin)
print((started - start) * 1e3, statistics.median(times) * 1e3)
"""


def start_times() -> tuple[float, float, float]:
    """Milliseconds to start a zygote; a player's whole life (fork, jail, load, reply, end); a pool of one worker."""
    command = [sys.executable, "-P", "-s", "-S", "-c", START, str(ROOT)]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(5)]
    workers = []
    for _ in range(5):
        start = time.perf_counter()
        with Pool(1):
            workers.append((time.perf_counter() - start) * 1e3)
    zygote, player = (statistics.median(float(run[i]) for run in runs) for i in (0, 1))
    return zygote, player, statistics.median(workers)


def workers_cpu(pool: Pool) -> float:
    """CPU seconds of the pool's referees so far."""
    return sum(time.clock_gettime((~worker._process.pid << 3) | 2) for worker in pool._workers)


def compare(source: str, args: Args, pool: Pool) -> dict[str, Any]:
    """Both sides in turns: strategies per second, CPU time, and the share of the calls alone in our wall time."""
    seeds, rates, shares = range(args.boards), dict[str, list[float]](ours=[], usual=[]), []
    cpu: list[list[float]] = [[], []]  # milliseconds per strategy: ours, the usual way
    cost = microseconds_a_call(source, args)
    for repetition in range(args.repetitions):
        sources = [f"{source}# {repetition} {i}\n" for i in range(args.strategies)]  # equal ones would be scored once
        start, referees = time.perf_counter(), workers_cpu(pool)
        results = execute_strategies(sources, seeds, args.size, args.target, pool=pool)
        ours = time.perf_counter() - start
        players = sum(game.seconds for games in results for game in games)
        cpu[0].append((workers_cpu(pool) - referees + players) / args.strategies * 1e3)
        start, process = time.perf_counter(), time.process_time()
        for text in sources:
            score_in_process(text, seeds, args)
        usual = time.perf_counter() - start
        cpu[1].append((time.process_time() - process) / args.strategies * 1e3)
        calls = sum(game.steps for games in results for game in games)
        shares.append(calls * cost / 1e6 / len(pool._workers) / ours)
        rates["ours"].append(args.strategies / ours)
        rates["usual"].append(args.strategies / usual)
    ratios = [a / b for a, b in zip(rates["ours"], rates["usual"], strict=True)]
    return {
        "us_a_call": cost,
        **rates,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "calls_alone": shares,
        "cpu_ms_ours": cpu[0],
        "cpu_ms_usual": cpu[1],
    }


ROWS = {
    "ours": "ours, strategies/s",
    "usual": "usual way, strategies/s",
    "ratios": "ratio",
    "calls_alone": "calls alone / our wall time",
    "cpu_ms_ours": "ours, CPU ms a strategy",
    "cpu_ms_usual": "usual way, CPU ms a strategy",
}


def main(args: Args) -> int:
    """Measure and print."""
    outcome: dict[str, Any] = {"args": asdict(args), "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()}
    tables, missed = [], False
    with Pool(args.workers) as pool:
        execute_strategies([RANDOM], range(args.boards), args.size, args.target, pool=pool)  # fills the caches
        for name, (source, target) in STRATEGIES.items():
            figures = compare(source.replace("{rounds}", str(args.rounds)), args, pool)
            outcome[name] = {**figures, "target": target}
            missed |= figures["ratio"] < target
            table = Table(title=f"{name} (here {figures['us_a_call']:.1f} µs), {args.boards} boards")
            for column in ("", "median", "lowest", "highest"):
                table.add_column(column, justify="right" if column else "left")
            for key, title in ROWS.items():
                table.add_row(title, *(f"{f(figures[key]):.2f}" for f in (statistics.median, min, max)))
            table.add_row("target for the ratio", f"{target:.2f}", "", "")
            tables.append(table)
    if args.hostile:
        outcome["hostile"] = times = hostile_times(args)
        bound = args.boards * Job("", (), args.size, args.target).cpu_seconds(LIMITS.paid_moves) + 5
        idle = max(times, key=itemgetter(1))
        table = Table(title=f"{len(times)} hostile programs, {args.boards} boards: wall seconds (bound {bound:.0f})")
        table.add_column("program")
        table.add_column("s", justify="right")
        for wall, _, name in times[:5]:
            table.add_row(name, f"{wall:.1f}")
        table.add_row(f"longest without CPU, a board (bound 2): {idle[2]}", f"{idle[1]:.1f}")
        tables.append(table)
        missed |= times[0][0] > bound or idle[1] > 2
    zygote, player, worker = start_times()
    console = Console()
    console.print(*tables, sep="\n")
    console.print(f"zygote {zygote:.0f} ms; player (fork, jail, load, reply, end) {player:.1f} ms")
    console.print(f"pool of one worker, canary included: {worker:.0f} ms")
    print(json.dumps({**outcome, "zygote_ms": zygote, "player_ms": player, "worker_ms": worker}))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
