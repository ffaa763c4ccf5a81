#!/usr/bin/env python3
"""What does the warm start's generator (toolkit/model/compose.py) reach without any learning?

    python benchmarks/bench_generator.py --count 10000

Counts the programs that it can compose.  Composes distinct ones, and each plays a 4x4 board of its own until it makes
2048.  Then the race that chooses a run's best program chooses the best of them, in as many games, and this program
plays the held-out boards to their end.  Prints a table and one JSON line.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tyro  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import gpt_2048_rl as program  # noqa: E402
from toolkit.games import programs  # noqa: E402
from toolkit.model import compose  # noqa: E402


@dataclass(frozen=True)
class Args:
    """How much to measure."""

    count: int = 10_000  # composed programs
    games: int = 256  # held-out boards
    race_games: int = program.TrainConfig.race_games  # a run's default
    seed: int = 1


# ---------------------------------------------------------------------------------------------------------------------
# Counting


def expressions(kind: str) -> int:
    """How many expressions `compose.key_expression` has for a kind of choice, with four keys."""
    orders = {count: math.perm(4, count) for count in (2, 3, 4)}  # of so many different keys
    if kind.startswith("draw"):
        return orders[int(kind[-1])]
    turns = sum(orders[count] for count in compose.KEY_COUNTS)
    cycles = turns * len(compose.FACTORS) * len(compose.STATES)
    return {"constant": 4, "first": 2, "turns": turns, "cycle": cycles}.get(kind, 1)


def helpers(kinds: set[str]) -> int:
    """How many texts `compose.helpers` has above strategies with these kinds of choices."""
    searches, count = kinds & set(compose.SEARCHES), 1
    weights = len(compose.WEIGHTS) * len(compose.SIGNS)
    if "first" in kinds:
        count *= math.factorial(4)  # orders in which moves are tried
    if searches:
        count *= sum(math.comb(len(compose.TERMS), terms) * weights**terms for terms in compose.TERM_COUNTS)
        count *= len(compose.LINE_VALUES) * sum(weights if place else 1 for place in compose.PLACES)
    if searches - {"value"}:
        count *= len(compose.DEAD)
    if searches & {"expected", "further"}:
        count *= len(compose.CELLS) * len(compose.POOLED)
    return count


def texts() -> Iterator[tuple[str, int]]:
    """How many different texts `compose.strategy` has, by the kinds of their choices."""
    kinds = [kind for kind in compose.KINDS if kind != "search"]
    kinds += compose.SEARCHES if "search" in compose.KINDS else []
    for rules in compose.RULES:
        tests = len(compose.STATES) * len(compose.LIMITS) if rules == 2 else 1  # which of two rules applies
        for chosen in product(kinds, repeat=rules):
            count = tests * helpers(set(chosen)) * math.prod(map(expressions, chosen))
            yield " or ".join(chosen), count


# ---------------------------------------------------------------------------------------------------------------------
# Playing


def compose_distinct(count: int, seed: int, keys: str) -> list[str]:
    """So many different programs."""
    rng, found = random.Random(seed), dict[str, None]()
    while len(found) < count:
        found[compose.strategy(rng, keys)] = None
    return list(found)


def main(args: Args) -> int:
    """Measure and print."""
    config = replace(program.train_defaults("tiny"), games=args.games, seed=args.seed)
    game, until = program.Evaluator(config, 4, 2048), program.Evaluator(config, 4, 2048, 2048)
    sources = compose_distinct(args.count, args.seed, game.letters)
    boards = game.boards(len(sources), "generator")
    verdicts = until.judge([f"```python\n{source}```" for source in sources], [[board] for board in boards])
    played = {source: verdict.results[0] for source, verdict in zip(sources, verdicts, strict=True)}
    one = programs.score(until, list(played.values()))
    promising = sorted(sources, key=lambda source: played[source].score, reverse=True)  # the first ones race
    race = programs.race(game, promising, args.race_games)
    best = programs.score(game, game.play(race.ranking[:1], game.held_out_seeds)[0])
    counts = dict(texts())
    table = Table("", "programs", "made 2048", "95% interval", "mean log2 tile")
    table.add_row("can be composed", f"{sum(counts.values()):.2e}")
    for name, number, score in (
        (f"composed, a board each (seed {args.seed})", len(sources), one),
        (f"best of {race.played:,} raced, {best.games} held-out boards", 1, best),
    ):
        table.add_row(
            name,
            f"{number:,}",
            f"{score.won:.1%}",
            f"{score.won_low:.1%} to {score.won_high:.1%}",
            f"{score.mean_log2_tile:.2f}",
        )
    Console(width=120).print(table)
    print(
        json.dumps(
            {
                "args": asdict(args),
                "cores": os.cpu_count(),
                "texts": counts,
                "composed": asdict(one),
                "race": race.summary(),
                "best": asdict(best),
                "source": race.ranking[0],
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
