#!/usr/bin/env python3
"""What does a race of few games lose?  The best program of a finished run, by races of more and more games.

    python benchmarks/bench_race.py outputs/latest --games 64 256 1024

The candidates are those of the run's own race, in its order: the trained model's surest answers, then all programs of
training.  The last race has games for all of them.  Each winner then plays fresh boards, the same for all and of no
race, to their end.  Prints a table and one JSON line.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tyro  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import gpt_2048_rl as program  # noqa: E402
from toolkit.games import duration, evaluation, programs  # noqa: E402
from toolkit.run import results, runs, steps  # noqa: E402


@dataclass(frozen=True)
class Args:
    """What to measure."""

    run: tyro.conf.Positional[Path]  # a finished run's folder
    games: tuple[int, ...] = (64, 256, 1024)  # of each race but the last
    boards: int = 512  # fresh ones for the winners


def candidates(evaluator: program.Evaluator, run: Path) -> list[str]:
    """The programs of the run's race, in its order."""
    config = evaluator.config
    model, tokenizer = program.load_model(str(run / "adapter"), config, lambda _: None)
    cool = min(results.COOL, config.temperature)
    sure = programs.sampled_programs(evaluator, model, tokenizer, duration.SURE, temperature=cool)
    return list(dict.fromkeys([*sure, *steps.programs_to_race(run / "rollouts.jsonl")]))


def main(args: Args) -> int:
    """Measure and print."""
    config = runs.stored_config(args.run, program.TrainConfig)
    evaluator = program.Evaluator(config, *program.Stage.read(config.held_out[0]))
    sources = candidates(evaluator, args.run)
    fresh, rows = evaluator.boards(args.boards, "fresh"), []
    table = Table("games", "programs", "boards", "made 2048", "95% interval", "made 4096", "log2 of scores")
    for games in (*args.games, len(sources) + programs.halving(programs.FINALISTS[0])):
        race = programs.race(evaluator, sources, games)
        played = evaluator.play(race.ranking[:1], fresh)[0]
        score = programs.score(evaluator, played)
        further = evaluation.score(score.tiles, 2 * evaluator.target).won
        level = statistics.fmean(math.log2(max(1, game.score)) for game in played)
        rows.append({"games": games, **race.summary(), "won": score.won, "further": further, "level": level})
        interval = f"{score.won_low:.1%} to {score.won_high:.1%}"
        cells = f"{score.won:.1%}", interval, f"{further:.1%}", f"{level:.2f}"
        table.add_row(f"{games:,}", f"{race.played:,}", str(race.boards), *cells)
    Console(width=120).print(table)
    print(json.dumps({"run": args.run.name, "boards": args.boards, "races": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
