#!/usr/bin/env python3
"""Does it learn?  The stable recipe against the published one: same embedded start, same machine, same wall time.

    python benchmarks/bench_learning.py

Runs follow one another, each with the whole machine, through the program's own command line: first the stable recipe
with its own number of steps for each seed, then the published one with the same minutes of training.  Before and after,
the model is evaluated on held-out boards with a held-out wording; each sampled program plays one board to the end.
Prints tables and one JSON line and writes a figure (docs/learning.svg).  Exits with code 1 if a target is missed: in
every seed of the stable recipe, at most 35% of games won before and at least 90% after at most ten minutes of training.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tyro  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import gpt_2048_rl as program  # noqa: E402
from toolkit import machine, tiny  # noqa: E402

RECIPES = {"stable": "#0a7d5a", "published": "#c2571a"}  # and their colours
BEFORE, AFTER, MINUTES = 0.35, 0.90, 10.0


@dataclass(frozen=True)
class Args:
    """What to run."""

    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    games: int = 64  # held-out boards
    output_dir: Path | None = None  # keeps the runs; a later start with the same folder continues
    figure: Path = ROOT / "docs" / "learning.svg"


@dataclass(frozen=True)
class Run:
    """One run's figures."""

    recipe: str
    seed: int
    result: dict[str, Any]  # the run's result.json
    new: tuple[float, float]  # share of programs not in the warm start: first and last ten steps
    curve: list[tuple[float, float]]  # minutes of training; share of a step's games that made 2048

    @property
    def first(self) -> dict[str, Any]:
        """The scores at the first held-out stage."""
        return dict(next(iter(self.result["scores"].values())))


def train(recipe: str, seed: int, out: Path, args: Args, minutes: float) -> Path:
    """Train for `minutes` (0: all steps) and return the run's folder.  A finished run is not repeated."""
    folder = out / f"{recipe}-{seed}"
    if (folder / "result.json").is_file():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    flags = {"model": "tiny", "recipe": recipe, "seed": seed, "minutes": minutes, "games": args.games,
             "output-dir": out, "run-name": folder.name}  # fmt: skip
    command = [sys.executable, str(ROOT / "gpt_2048_rl.py")]
    command += [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode not in (0, 3):  # 3: collapsed
        raise SystemExit(f"{recipe}, seed {seed}: {done.stdout[-2000:]}")
    return folder


def warm_start_programs() -> set[str | None]:
    """The source of every program in the embedded model's warm start."""
    config, task, rng = tiny.DEFAULT_CONFIG, program.tiny_task(), random.Random(3407)
    count = config.corpus + config.steps * config.batch
    answers = {tiny.conversation(rng, task)[1]["content"] for _ in range(count)}
    return {program.extract_function(answer) for answer in answers}


def read(recipe: str, seed: int, folder: Path, shown: set[str | None]) -> Run:
    """A finished run's figures, from its folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps = [json.loads(line)["completions"] for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    first, last = (
        [row["source"] for step in part for row in step if row["works"] == "load"] for part in (steps[:10], steps[-10:])
    )
    new = tuple(sum(source not in shown for source in part) / max(1, len(part)) for part in (first, last))
    events = EventAccumulator(str(folder))
    events.Reload()
    reached = events.Scalars("train/reached/2048")
    curve = [((event.wall_time - reached[0].wall_time) / 60, event.value) for event in reached]
    return Run(recipe, seed, json.loads((folder / "result.json").read_text()), (new[0], new[1]), curve)


def smooth(curve: list[tuple[float, float]], minutes: float = 0.5) -> list[tuple[float, float]]:
    """The mean of each half minute."""
    slots: dict[int, list[float]] = {}
    for at, value in curve:
        slots.setdefault(int(at / minutes), []).append(value)
    return [((slot + 0.5) * minutes, statistics.fmean(values)) for slot, values in sorted(slots.items())]


def figure(runs: list[Run]) -> str:
    """An SVG with a line for each run."""
    width, height, left, top = 640, 240, 60, 30
    minutes = max(run.curve[-1][0] for run in runs)

    def line(run: Run) -> str:
        points = " ".join(f"{left + x / minutes * width:.1f},{top + (1 - y) * height:.1f}"
                          for x, y in smooth(run.curve))  # fmt: skip
        return f'<polyline points="{points}" fill="none" stroke="{RECIPES[run.recipe]}" stroke-width="2"/>'

    def text(x: float, y: float, words: str, colour: str = "#666", anchor: str = "end") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}" text-anchor="{anchor}">{words}</text>'

    shares = [(share, top + (1 - share) * height) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    parts = [f'<path d="M{left} {y:.0f}h{width}" stroke="#8885"/>' + text(left - 8, y + 4, f"{share:.0%}")
             for share, y in shares]  # fmt: skip
    parts += [text(left + i / minutes * width, top + height + 18, f"{i} min", anchor="middle")
              for i in range(int(minutes) + 1)]  # fmt: skip
    parts += [text(left + width, top + height - 12 - 18 * i, f"{name} recipe", colour)
              for i, (name, colour) in enumerate(RECIPES.items())]  # fmt: skip
    parts += [
        text(left, 18, "games of a training step in which the 2048 tile was made; a line per seed", anchor="start")
    ]
    parts += map(line, runs)
    size = f'viewBox="0 0 {left + width + 20} {top + height + 30}"'
    style = 'font-family="system-ui, sans-serif" font-size="13"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(parts) + "\n</svg>\n"


COLUMNS: dict[str, Callable[[Run], str]] = {
    "won before": lambda run: f"{run.first['before']['won']:.0%}",
    "won after": lambda run: f"{run.first['after']['won']:.0%}",
    "95% interval": lambda run: f"{run.first['after']['won_low']:.0%} to {run.first['after']['won_high']:.0%}",
    "median tile": lambda run: f"{run.first['after']['largest_tile_median']:.0f}",
    "last stage": lambda run: str(run.result["stage"]),
    "distinct": lambda run: f"{run.result['distinct']:.0%}",
    "no spread": lambda run: f"{run.result['zero_spread']:.0%}",
    "new programs": lambda run: f"{run.new[0]:.0%}, {run.new[1]:.0%}",
    "steps": lambda run: f"{run.result['steps']}{' (collapsed)' if run.result['collapsed'] else ''}",
    "minutes": lambda run: f"{run.result['minutes']:.1f}",
    "seconds in all": lambda run: f"{run.result['seconds']:.0f}",
}  # fmt: skip


def tables(runs: list[Run]) -> list[Table]:
    """One row per run; the controls at the end."""
    made = []
    for recipe in RECIPES:
        group = [run for run in runs if run.recipe == recipe]
        won = sorted(run.first["after"]["won"] for run in group)
        title = f"{recipe}: won after, median {statistics.median(won):.0%} ({won[0]:.0%} to {won[-1]:.0%})"
        made.append(Table("seed", *COLUMNS, title=title))
        for run in group:
            made[-1].add_row(str(run.seed), *(column(run) for column in COLUMNS.values()))
    made.append(Table("control", "won", "median tile"))
    for name, score in runs[0].first["controls"].items():
        made[-1].add_row(name, f"{score['won']:.0%}", f"{score['largest_tile_median']:.0f}")
    return made


def train_all(args: Args, out: Path) -> list[Run]:
    """All runs, one after the other."""
    machine.prepare_environment(offline=True)
    tiny.warm_start(program.tiny_task())
    shown, runs, minutes = warm_start_programs(), [], dict.fromkeys(args.seeds, 0.0)
    for recipe in RECIPES:
        for seed in args.seeds:
            run = read(recipe, seed, train(recipe, seed, out, args, minutes[seed]), shown)
            minutes[seed] = run.result["minutes"]
            runs.append(run)
            print(recipe, seed, *(f"{name} {column(run)}" for name, column in COLUMNS.items()), sep="  ",
                  file=sys.stderr, flush=True)  # fmt: skip
    return runs


def main(args: Args) -> int:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as scratch:
        runs = train_all(args, args.output_dir or Path(scratch))
    for table in tables(runs):
        Console().print(table)
    args.figure.write_text(figure(runs))
    stable = [run for run in runs if run.recipe == "stable"]
    met = all(run.first["before"]["won"] <= BEFORE and run.first["after"]["won"] >= AFTER
              and run.result["minutes"] <= MINUTES for run in stable)  # fmt: skip
    details = [{name: value for name, value in asdict(run).items() if name != "curve"} for run in runs]
    print(json.dumps({"args": asdict(args), "cores": os.cpu_count(), "runs": details,
                      "met": met}, default=str))  # fmt: skip
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
