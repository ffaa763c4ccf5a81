#!/usr/bin/env python3
"""Does it learn the original game?  The stable recipe, the published one and variants: same start, machine, minutes.

    python benchmarks/bench_learning.py --output-dir outputs/learning
    python benchmarks/bench_learning.py --recipes --variants "shared=--objective shared"
    python benchmarks/bench_learning.py --recipes --measured benchmarks/learning    # those kept

Runs follow one another, each with the whole machine, through the program's own command line: first the stable recipe
with its own number of steps for each seed, then every other one with the same minutes of training.  A variant is the
stable recipe with further options.  Before and after, the model is evaluated on held-out boards with a held-out
wording; each sampled program plays one board.  After a run and outside of its time, the hundred best of the untrained
model's programs (best of N) play the same boards in turn.  Prints tables and one JSON line and writes a figure
(docs/learning.svg).  Exits with code 1 if a seed of the stable recipe misses one of the TARGETS.

What was measured of a run is one JSON file in `--measured`; such a run is not repeated.
"""

from __future__ import annotations

import json
import operator
import os
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tyro  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import gpt_2048_rl as program  # noqa: E402
from toolkit.base import files  # noqa: E402
from toolkit.games import evaluation, programs  # noqa: E402
from toolkit.model import machine, tiny  # noqa: E402
from toolkit.referee.extract import extract_function  # noqa: E402
from toolkit.run import reading, results, runs  # noqa: E402


@dataclass(frozen=True)
class Args:
    """What to run."""

    seeds: tuple[int, ...] = (61, 62, 63, 64, 65)
    model_seed: int = tiny.SEED  # of the embedded model's warm start
    recipes: tuple[Literal["published"], ...] = ("published",)  # besides the stable one
    variants: tuple[str, ...] = ()  # NAME=OPTIONS: the stable recipe with further options
    games: int = 256  # held-out boards
    output_dir: Path | None = None  # keeps the runs; a later start with the same folder continues
    measured: Path | None = None  # keeps what was measured of each run; by default the folder of the runs
    figure: Path = ROOT / "docs" / "learning.svg"


def model_words(seed: int) -> list[str]:
    """The options for the embedded model of a warm start's seed.  For all but the default these are its numbers too."""
    folder = tiny.warm_start(program.game_spec(), seed)
    if seed == tiny.SEED:
        return ["--model", "tiny"]
    words = ["--model", str(folder), "--loader", "unsloth"]
    for name, value in program.EMBEDDED.items():
        words += [f"--{name}", *(value if isinstance(value, tuple) else [str(value)])]
    return words


def options(args: Args) -> dict[str, list[str]]:
    """The options of each recipe and variant by its name.  The stable recipe is first, because it sets the minutes."""
    recipes = {name: ["--recipe", name] for name in ("stable", *args.recipes)}
    variants = (variant.partition("=") for variant in args.variants)
    return recipes | {name: shlex.split(words) for name, _, words in variants}


# ---------------------------------------------------------------------------------------------------------------------
# Runs


@dataclass(frozen=True)
class Run:
    """A finished run and what was measured of it afterwards."""

    files: reading.Run
    hundred: evaluation.Score  # of best of N's hundred best programs on the first stage's held-out boards
    new: tuple[float, float]  # share of programs that the warm start never showed: first and last ten steps

    def score(self, player: str, stage: str = "4x4") -> evaluation.Score:
        """A player's score on the held-out boards of a stage."""
        return self.files.held_out[stage].scores[player]

    def best_against(self, other: str, better: bool = True) -> float:
        """p of the paired test on 4x4 that the best program is better than another, or worse; 1 if it is not at all."""
        found = {(pair.stage, pair.first, pair.second): pair for pair in evaluation.pairs_within(self.files.held_out)}
        pair = found["4x4", evaluation.BEST, other]
        ahead = pair.won_first > pair.won_second if better else pair.won_first < pair.won_second
        return pair.won_p if ahead else 1.0


def train(folder: Path, seed: int, words: Sequence[str], minutes: float, games: int) -> None:
    """Train for `minutes` (0: all steps).  A finished run is not repeated."""
    if (folder / "result.json").is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    flags = {
        "seed": seed,
        "minutes": minutes,
        "games": games,
        "output-dir": folder.parent,
        "run-name": folder.name,
    }
    command = [sys.executable, str(ROOT / "gpt_2048_rl.py")]
    command += [*(text for name, value in flags.items() for text in (f"--{name}", str(value))), *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode not in (0, 3):  # 3: collapsed
        raise SystemExit(f"{folder.name}: {done.stdout[-2000:]}")


def play_hundred(folder: Path) -> evaluation.Score:
    """Best of N's hundred best programs on the first stage's held-out boards, in turn.  The score is kept in a file."""
    file = folder / "top_hundred.json"
    if not file.is_file():
        config = runs.stored_config(folder, program.TrainConfig)
        evaluator = program.Evaluator(config, *program.Stage.read(config.held_out[0]))
        best = json.loads((folder / f"{results.BEST_OF_N}.json").read_text())
        answers = [f"```python\n{best[i % len(best)]}\n```" for i in range(len(evaluator.held_out_seeds))]
        verdicts = evaluator.judge(answers, [[board] for board in evaluator.held_out_seeds])
        score = programs.score(evaluator, [verdict.results[0] for verdict in verdicts])
        files.write_whole(file, json.dumps(asdict(score)) + "\n")
    return evaluation.read_score(files.read_json(file))


def warm_start_programs(seed: int) -> set[str | None]:
    """The source of every program in an embedded model's warm start."""
    config, spec, rng = tiny.DEFAULT_CONFIG, program.game_spec(), random.Random(seed)
    tiny.draw_corpus(rng, spec, config)
    answers = {tiny.conversation(rng, spec)[1]["content"] for _ in range(config.steps * config.batch)}
    return {extract_function(answer) for answer in answers}


def read(folder: Path, shown: set[str | None]) -> Run:
    """A finished run, from its folder."""
    files = reading.read_run(folder)
    steps = [[done.source for done in files.steps[number].attempts if done.plays] for number in sorted(files.steps)]
    first, last = ([source for step in part for source in step] for part in (steps[:10], steps[-10:]))
    new = [sum(source not in shown for source in part) / max(1, len(part)) for part in (first, last)]
    return Run(files, play_hundred(folder), (new[0], new[1]))


def curve(run: Run, parts: int = 30) -> list[tuple[float, float]]:
    """Share of the steps, and mean log2 of the largest tile of a step's games: for each part of training on 4x4."""
    slots: dict[int, list[float]] = {}
    for number, step in run.files.steps.items():
        if step.stage.startswith("4x4 "):
            slot = (number - 1) * parts // max(run.files.steps)
            slots.setdefault(slot, []).append(run.files.curves["games/level"][number])
    return [((slot + 0.5) / parts, statistics.fmean(levels)) for slot, levels in sorted(slots.items())]


# ---------------------------------------------------------------------------------------------------------------------
# Tables and targets

Column = tuple[Callable[[Run], Any], str]  # a run's figure, and its format

TABLES: dict[str, dict[str, Column]] = {
    "4x4": {
        "before": (lambda run: run.score(evaluation.BEFORE).won, ".1%"),
        "after": (lambda run: run.score(evaluation.AFTER).won, ".1%"),
        "best": (lambda run: run.score(evaluation.BEST).won, ".1%"),
        "best, 4096": (lambda run: evaluation.score(run.score(evaluation.BEST).tiles, 4096).won, ".1%"),
        "best of N": (lambda run: run.score(evaluation.BEST_OF_N).won, ".1%"),
        "p, best against best of N": (lambda run: run.best_against(evaluation.BEST_OF_N), ".1g"),
        "top hundred": (lambda run: run.hundred.won, ".1%"),
        "after, log2": (lambda run: run.score(evaluation.AFTER).mean_log2_tile, ".2f"),
        "top hundred, log2": (lambda run: run.hundred.mean_log2_tile, ".2f"),
        "after above top hundred, log2": (
            lambda run: run.score(evaluation.AFTER).mean_log2_tile - run.hundred.mean_log2_tile, "+.2f"),
    },
    "4x4, controls": {
        "expert": (lambda run: run.score(evaluation.EXPERT).won, ".1%"),
        "expert, 4096": (lambda run: evaluation.score(run.score(evaluation.EXPERT).tiles, 4096).won, ".1%"),
        "best above expert": (lambda run: run.score(evaluation.BEST).won - run.score(evaluation.EXPERT).won, "+.1%"),
        "p, best below expert": (lambda run: run.best_against(evaluation.EXPERT, better=False), ".1g"),
        "greedy": (lambda run: run.score(evaluation.GREEDY).won, ".1%"),
        "rotation": (lambda run: run.score(evaluation.ROTATION).won, ".1%"),
        "random": (lambda run: run.score(evaluation.RANDOM).won, ".1%"),
    },
    "6x6": {
        "6x6 before": (lambda run: run.score(evaluation.BEFORE, "6x6").won, ".1%"),
        "6x6 after": (lambda run: run.score(evaluation.AFTER, "6x6").won, ".1%"),
        "6x6 best": (lambda run: run.score(evaluation.BEST, "6x6").won, ".1%"),
    },
    "training": {
        "steps": (lambda run: run.files.result["steps"], ".0f"),
        "last stage": (lambda run: run.files.result["stage"] + " (collapsed)" * run.files.result["collapsed"], ""),
        "minutes": (lambda run: run.files.result["minutes"], ".1f"),
        "seconds in all": (lambda run: run.files.result["seconds"], ".0f"),
        "distinct": (lambda run: run.files.result["distinct"], ".0%"),
        "no spread": (lambda run: run.files.result["zero_spread"], ".0%"),
        "new programs, first ten steps": (lambda run: run.new[0], ".0%"),
        "last ten": (lambda run: run.new[1], ".0%"),
    },
}  # fmt: skip
COLUMNS = {name: column for table in TABLES.values() for name, column in table.items()}


@dataclass(frozen=True)
class Measured:
    """What is kept of a run: the figures in COLUMNS, and its curve."""

    recipe: str
    seed: int
    figures: dict[str, Any]
    curve: list[tuple[float, float]]

    def shown(self, name: str) -> str:
        """A figure for people."""
        return format(self.figures[name], COLUMNS[name][1])


def measure(recipe: str, seed: int, run: Run) -> Measured:
    """All figures of a run."""
    return Measured(recipe, seed, {name: figure(run) for name, (figure, _) in COLUMNS.items()}, curve(run))


TARGETS = (("before", "<=", 0.03), ("after", ">=", 0.55), ("best", ">=", 0.85), ("best, 4096", ">=", 0.45),
           ("p, best against best of N", "<", 0.01), ("after above top hundred, log2", ">", 0),
           ("p, best below expert", ">=", 0.05), ("greedy", "<", 0.02), ("rotation", "<", 0.02), ("random", "<", 0.02),
           ("6x6 after", ">=", 0.95), ("minutes", "<=", 10), ("seconds in all", "<=", 780))  # fmt: skip
SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def summary(values: Sequence[Any], form: str) -> str:
    """Median (lowest to highest) of numbers; nothing for texts."""
    if isinstance(values[0], str):
        return ""
    median, low, high = (format(value, form) for value in (statistics.median(values), min(values), max(values)))
    return f"{median} ({low} to {high})"


def tables(group: Sequence[Measured]) -> list[Table]:
    """One recipe's runs: one row for each, and a last line with the median."""
    made = []
    for title, columns in TABLES.items():
        made.append(Table("seed", *columns, title=f"{group[0].recipe}: {title}"))
        for run in group:
            made[-1].add_row(str(run.seed), *map(run.shown, columns))
        made[-1].add_row(
            "median", *(summary([run.figures[name] for run in group], form) for name, (_, form) in columns.items())
        )
    return made


@dataclass(frozen=True)
class Target:
    """A target and what the seeds reached."""

    text: str
    figures: tuple[float, ...]
    shown: tuple[str, ...]  # the figures for people
    met: bool  # in every seed


def targets(stable: Sequence[Measured]) -> list[Target]:
    """Every target, checked in every seed of the stable recipe."""
    found = []
    for name, sign, bound in TARGETS:
        figures = tuple(run.figures[name] for run in stable)
        met = all(SIGNS[sign](value, bound) for value in figures)
        shown = tuple(run.shown(name) for run in stable)
        found.append(Target(f"{name} {sign} {format(bound, COLUMNS[name][1])}", figures, shown, met))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The figure: two panels, readable on white and on dark pages

GREY = "#808080"
COLOURS = ("#12906a", "#d0662a", "#4a86d8", "#a566c9", "#b58a00")  # of recipes and variants, in order
TOP, HEIGHT = 28, 225
LEFT, LEFT_WIDTH = 42, 238  # the curves
RIGHT, RIGHT_WIDTH = 440, 190  # the dots; their names stand to the left, the medians to the right


def text(x: float, y: float, words: str, anchor: str = "start", colour: str = GREY) -> str:
    """A line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


def curves_panel(measured: Sequence[Measured], colours: dict[str, str]) -> list[str]:
    """A line for each run that reached 4x4."""
    lines = [(run.recipe, run.curve) for run in measured if run.curve]
    levels = [5.0, 11.0, *(y for _, points in lines for _, y in points)]
    low, high = min(levels), max(levels)

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x * LEFT_WIDTH, TOP + (high - y) / (high - low) * HEIGHT

    parts = [text(0, 14, "largest tile in a step, 4x4 (mean log2)")]
    for level in (5, 7, 9, 11):
        y = place(0, level)[1]
        parts += [
            f'<path d="M{LEFT} {y:.1f}h{LEFT_WIDTH}" stroke="#8884"/>',
            text(LEFT - 6, y + 4, f"{1 << level}", "end"),
        ]
    for share, words in ((0, "0%"), (0.5, "50% of the steps"), (1, "100%")):
        parts.append(text(place(share, 0)[0], TOP + HEIGHT + 18, words, "middle"))
    for recipe, points in lines:
        shape = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        parts.append(f'<polyline points="{shape}" fill="none" stroke="{colours[recipe]}" stroke-width="1.8"/>')
    return parts


def dots_panel(measured: Sequence[Measured], colours: dict[str, str]) -> list[str]:
    """A row for each player, a dot for each seed, and the median as a bar and in words."""
    stable = [run for run in measured if run.recipe == "stable"]
    control = {
        "random moves": "random",
        "four keys in turn": "rotation",
        "greedy": "greedy",
        "before training": "before",
    }
    rows = [(name, GREY, stable, player) for name, player in control.items()]
    for recipe in list(colours)[1:]:
        group = [run for run in measured if run.recipe == recipe]
        rows.append((f"{recipe}, after", colours[recipe], group, "after"))
    rows += [
        ("best of N, untrained", GREY, stable, "best of N"),
        ("expert", GREY, stable, "expert"),
        ("after training", colours["stable"], stable, "after"),
        ("best program", colours["stable"], stable, "best"),
    ]
    parts = [text(RIGHT - 130, 14, "held-out 4x4 games that made 2048, a dot per seed")]
    for share in (0.0, 0.5, 1.0):
        x = RIGHT + share * RIGHT_WIDTH
        parts += [
            f'<path d="M{x:.1f} {TOP}v{HEIGHT}" stroke="#8884"/>',
            text(x, TOP + HEIGHT + 18, f"{share:.0%}", "middle"),
        ]
    for i, (name, colour, group, player) in enumerate(rows):
        y = TOP + (i + 0.5) * HEIGHT / len(rows)
        shares = [run.figures[player] for run in group]
        median = statistics.median(shares)
        parts += [
            f'<circle cx="{RIGHT + share * RIGHT_WIDTH:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}" opacity="0.6"/>'
            for share in shares
        ]
        parts += [
            f'<path d="M{RIGHT + median * RIGHT_WIDTH:.1f} {y - 7:.1f}v14" stroke="{colour}" stroke-width="2.5"/>',
            text(RIGHT - 10, y + 4, name, "end", colour),
            text(RIGHT + RIGHT_WIDTH + 52, y + 4, f"{median:.0%}", "end", colour),
        ]
    return parts


def picture(measured: Sequence[Measured]) -> str:
    """The SVG."""
    colours = dict(zip(dict.fromkeys(run.recipe for run in measured), cycle(COLOURS), strict=False))
    parts = curves_panel(measured, colours) + dots_panel(measured, colours)
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 {TOP + HEIGHT + 28}"'
    return f'{start} font-family="system-ui, sans-serif" font-size="13">\n' + "\n".join(parts) + "\n</svg>\n"


# ---------------------------------------------------------------------------------------------------------------------


def train_all(args: Args, out: Path) -> list[Measured]:
    """All runs, one after the other, except those that were measured before."""
    machine.prepare_environment(offline=True)
    if args.recipes and args.model_seed != tiny.SEED:
        raise SystemExit("--model-seed needs --recipes with no name: its options are those of the stable recipe")
    model = model_words(args.model_seed)
    shown, measured, minutes = warm_start_programs(args.model_seed), list[Measured](), dict.fromkeys(args.seeds, 0.0)
    kept = args.measured or out
    kept.mkdir(parents=True, exist_ok=True)
    for recipe, words in options(args).items():
        for seed in args.seeds:
            file = kept / f"{recipe}-{seed}.json"
            if not file.is_file():
                train(out / file.stem, seed, [*model, *words], minutes[seed], args.games)
                run = measure(recipe, seed, read(out / file.stem, shown))
                files.write_whole(file, json.dumps(asdict(run)) + "\n")
            measured.append(Measured(**files.read_json(file)))
            if recipe == "stable":
                minutes[seed] = measured[-1].figures["minutes"]
            print(
                recipe,
                seed,
                *(f"{name} {measured[-1].shown(name)}" for name in COLUMNS),
                sep="  ",
                file=sys.stderr,
                flush=True,
            )
    return measured


def conclude(args: Args, measured: Sequence[Measured]) -> int:
    """Print, draw, and return the exit code."""
    console = Console(width=160)
    for recipe in dict.fromkeys(run.recipe for run in measured):
        for table in tables([run for run in measured if run.recipe == recipe]):
            console.print(table)
    checked = targets([run for run in measured if run.recipe == "stable"])
    table = Table("target, in every seed", "seeds", "")
    for target in checked:
        table.add_row(target.text, ", ".join(target.shown), "met" if target.met else "missed")
    console.print(table)
    args.figure.write_text(picture(measured))
    met = all(target.met for target in checked)
    print(
        json.dumps(
            {
                "args": asdict(args),
                "cores": os.cpu_count(),
                "runs": list(map(asdict, measured)),
                "targets": [asdict(target) for target in checked],
                "met": met,
            },
            default=str,
        )
    )
    return 0 if met else 1


def main(args: Args) -> int:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as scratch:
        return conclude(args, train_all(args, args.output_dir or Path(scratch)))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
