"""Pages about runs, made from their folders alone: report.html of one run, compare.html of several.

A page is one file and needs no network.  Much of its text was written by a model or by someone else, so this file makes
plain data, and only report_template.html makes HTML: jinja2 escapes every value.  The page's content security policy
allows only the template's style and script, by their hashes.

    python -m toolkit.run.report outputs/RUN ...    write outputs/RUN/report.html again, also of a run that was killed
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import math
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from toolkit import UsageError, visible
from toolkit.base.files import naming, write_whole
from toolkit.games.evaluation import (
    AFTER,
    BEST,
    BEST_OF_N,
    CONTROLS,
    RANDOM,
    Pair,
    Score,
    median_interval,
    pairs_between,
    pairs_within,
    without_skill,
)
from toolkit.run.reading import Run, read_run, read_runs
from toolkit.run.steps import OUTCOMES, Attempt

if TYPE_CHECKING:
    from rich.console import Console

# ---------------------------------------------------------------------------------------------------------------------
# Parts of a page, drawn by the template's macros of the same names

LONGEST = 8000  # characters of a program that a page shows
FEWEST_BOARDS = 6  # of a paired test: on fewer not even winning all of them has p < 0.05
Cell = str | tuple[str, str, Sequence[float]]  # a figure, the text below it, and low, value and high in [0, 1]


class Part:
    """Something that a page shows."""

    @property
    def kind(self) -> str:
        """The name of its macro."""
        return type(self).__name__


@dataclass(frozen=True)
class Paragraph(Part):
    """Text."""

    text: str


@dataclass(frozen=True)
class Table(Part):
    """A table whose first column names its rows."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""  # below it


@dataclass(frozen=True)
class Listing(Part):
    """A program below a line that opens and closes it."""

    title: str
    source: str | None
    opened: bool = False

    @property
    def shown(self) -> str:
        """As much of the program as a page shows."""
        source = self.source or "# no program that could be read"
        rest = f"\n# and {len(source) - LONGEST} more characters" if len(source) > LONGEST else ""
        return source[:LONGEST] + rest


@dataclass(frozen=True)
class Card(Part):
    """A step, and some of its programs."""

    title: str
    text: str
    programs: Sequence[Listing]


@dataclass(frozen=True)
class Chart(Part):
    """Curves over the steps, as lines or as stacked areas.

    The drawing is stretched to any width, so labels are HTML beside it and a slider reads the values out.
    """

    title: str
    form: str
    steps: Sequence[int]
    values: Sequence[tuple[str, Sequence[float | None]]]  # a curve's name, and its value at each step
    lines: Sequence[str]  # the corners of each curve
    ticks: Sequence[str]
    stacked: bool


@dataclass(frozen=True)
class Grid(Part):
    """Charts and cards side by side."""

    parts: Sequence[Part]


@dataclass(frozen=True)
class Folded(Part):
    """A table below a line that opens and closes it."""

    title: str
    table: Table


Section = tuple[str, Sequence[Part]]  # left out where it has no parts


def score_table(stage: str, scores: Mapping[str, Score], target: int) -> Table:
    """What each player reached on a stage's boards, with 95% intervals as figures and as lines."""
    largest = max((max(score.tiles, default=score.largest_tile_median) for score in scores.values()), default=2.0)
    rows: list[list[Cell]] = []
    for player, score in scores.items():
        median, interval = score.largest_tile_median, median_interval(score.tiles)
        low, high = interval or (median, median)
        marks = [math.log2(max(2, tile)) / math.log2(max(2, largest)) for tile in (low, median, high)]
        rows.append(
            [
                player,
                (
                    f"{score.won:.0%}",
                    f"{100 * score.won_low:.0f}–{score.won_high:.0%}",
                    (score.won_low, score.won, score.won_high),
                ),
                (f"{median:.0f}", f"{low:.0f}–{high:.0f}" if interval else "", marks),
                f"{score.mean_log2_tile:.2f}",
                str(score.games),
            ]
        )
    head = f"{stage}, held out", f"made {target}", "median largest tile", "mean log2", "games"
    note = (
        "Below each figure: its 95% interval, Wilson's for shares, order statistics for medians. The lines run "
        f"from 0% to 100%, and from tile 1 to {largest:.0f} on a logarithmic scale."
    )
    return Table(head, rows, note)


def pair_tables(stage: str, pairs: Sequence[Pair], target: int) -> list[Part]:
    """On how many common boards of a stage each of two players did better; empty if there are no pairs."""
    pairs = [pair for pair in pairs if (pair.stage, pair.target) == (stage, target)]
    if not pairs:
        return []

    def split(first: int, second: int, p: float) -> Cell:
        return f"{first} : {second}", "p < 0.001" if p < 0.001 else f"p = {p:.3f}", ()

    rows: list[list[Cell]] = [
        [
            f"{p.first} against {p.second}",
            split(p.won_first, p.won_second, p.won_p),
            split(p.higher_first, p.higher_second, p.higher_p),
            str(p.boards),
        ]
        for p in pairs
    ]
    head = f"{stage}, board by board", f"only one made {target}", "higher largest tile", "boards"
    note = (
        "The number of boards on which the first and the second did better; on the others they are equal. Exact "
        "McNemar test for the target, sign test for the largest tile. Both are two-sided and not corrected for "
        f"multiple testing ({2 * len(pairs)} tests)."
    )
    return [Table(head, rows, note)]


# ---------------------------------------------------------------------------------------------------------------------
# Charts

Form = Literal["percent", "number", "tile"]


def axis(values: Sequence[float], form: Form) -> tuple[float, float]:
    """The ends of an axis that holds all values.  Tiles come as exponents, and their ends are an even number apart."""
    if form == "percent":
        return 0.0, 1.0
    spread = max(values) - min(values)
    unit = 2.0 if form == "tile" else 10.0 ** math.floor(math.log10(spread or 1.0))
    low = unit * math.floor(min(values) / unit)
    return low, max(low + unit, unit * math.ceil(max(values) / unit))


def corners(curves: Mapping[str, Mapping[int, float]], low: float, high: float, stacked: bool) -> list[str]:
    """Of each curve the points of an SVG line, or of an area stacked on the others, on a canvas of 1000 by 400."""
    steps = sorted({step for curve in curves.values() for step in curve})

    def corner(step: int, value: float) -> str:
        x = (step - steps[0]) / max(1, steps[-1] - steps[0])
        return f"{1000 * x:.1f},{400 * (high - value) / (high - low):.1f}"

    drawn, floor = [], dict.fromkeys(steps, 0.0)
    for curve in curves.values():
        outline = sorted(curve.items())
        if stacked:
            top = {step: floor[step] + curve.get(step, 0.0) for step in steps}
            outline = [*top.items(), *reversed(floor.items())]
            floor = top
        drawn.append(" ".join(corner(*point) for point in outline))
    return drawn


def charts(title: str, curves: Mapping[str, Mapping[int, float]], form: Form, stacked: bool = False) -> list[Part]:
    """A chart of the curves that have values; empty if none has."""
    curves = {name: curve for name, curve in curves.items() if curve}
    steps = sorted({step for curve in curves.values() for step in curve})
    if not steps:
        return []
    scale: Callable[[float], float] = math.log2 if form == "tile" else float
    scaled = {name: {step: scale(value) for step, value in curve.items()} for name, curve in curves.items()}
    low, high = axis([value for curve in scaled.values() for value in curve.values()], form)
    labels = {"percent": "{:.0%}", "number": "{:g}", "tile": "{:.0f}"}
    ticks = [labels[form].format(2**at if form == "tile" else at) for at in (high, (low + high) / 2, low)]
    values = [(name, [curve.get(step) for step in steps]) for name, curve in curves.items()]
    return [Chart(title, form, steps, values, corners(scaled, low, high, stacked), ticks, stacked)]


# ---------------------------------------------------------------------------------------------------------------------
# Pages

HIDDEN = {"output_dir", "run_name", "run", "json"}  # this machine's paths, and what the title says already
TEMPLATE = Path(__file__).with_name("report_template.html")


def headline(run: Run) -> str:
    """The result in a few sentences."""
    if not run.held_out:
        return (
            f"This run has no result: it was stopped, or is still training. It has done "
            f"{max(run.steps, default=0)} of {run.config['steps']} steps."
        )
    stage, played = next(iter(run.held_out.items()))
    score = played.scores[AFTER]
    sampled = run.result.get("races", {}).get("best_of_n", {}).get("sampled", "N")
    named = {
        BEST: "the run's best program",
        BEST_OF_N: f"the best of {sampled} programs of the untrained model",
        RANDOM: RANDOM,
    }
    others = [f"{name} in {played.scores[player].won:.0%}" for player, name in named.items() if player in played.scores]
    said = (
        f"In {score.games} games on held-out {stage} boards, programs sampled from the trained model made "
        f"{played.target} in {score.won:.0%}, {', '.join(others)}."
    )
    if run.result.get("ended"):
        said += f" Training was stopped: {run.result['ended']}."
    if run.result.get("jailed") is False:
        said += " These programs ran WITHOUT the jail (--unsafe-no-jail): nothing kept them from cheating."
    return said


def curve_charts(run: Run) -> Grid:
    """A run's curves."""

    def named(**names: str) -> dict[str, dict[int, float]]:
        return {name.replace("_", " "): run.curves.get(curve, {}) for name, curve in names.items()}

    outcomes = {
        name.replace("_", " ").replace("success", "won"): curve
        for name in OUTCOMES
        if any((curve := run.curves.get(f"outcomes/{name}", {})).values())
    }
    return Grid(
        [
            *charts("Reward of an answer", named(mean="reward"), "number"),
            *charts("How games ended", outcomes, "percent", stacked=True),
            *charts(
                "Largest tile (a game ends at its target)",
                named(target="games/target", median_of_games="games/largest_tile"),
                "tile",
            ),
            *charts(
                "Games that made the target", named(won="games/won", random_legal_moves="games/random_won"), "percent"
            ),
        ]
    )


def stage_table(run: Run) -> Table:
    """The stages of training with their steps."""
    parts = ((stage, list(steps)) for stage, steps in groupby(sorted(run.steps), lambda step: run.steps[step].stage))
    rows = [[stage, str(steps[0]), str(steps[-1])] for stage, steps in parts]
    return Table(("stage: board and target", "first step", "last step"), rows)


def changes(run: Run) -> Grid:
    """How programs changed: the best and the middle one of five steps, from the first to the last."""
    numbers = sorted(run.steps)
    cards = []
    for number in sorted({numbers[round(i * (len(numbers) - 1) / 4)] for i in range(5)} if numbers else ()):
        step = run.steps[number]
        ranked = sorted(step.attempts, key=lambda attempt: (attempt.reward, sum(attempt.tiles)))
        middle, best = ranked[len(ranked) // 2], ranked[-1]
        different = len({attempt.source for attempt in ranked})
        said = (
            f"{step.stage}, rewards from {ranked[0].reward:.1f} to {best.reward:.1f}, "
            f"{different} different programs in {len(ranked)} answers."
        )
        programs = Listing(f"Best: {best}", best.source), Listing(f"Middle: {middle}", middle.source)
        cards.append(Card(f"Step {number}", said, programs))
    shares = {"load": "games/works", "differ from the others of their group": "games/distinct"}
    drawn = charts("Answers whose program", {name: run.curves.get(c, {}) for name, c in shares.items()}, "percent")
    return Grid([*drawn, *cards])


def chosen_programs(run: Run) -> list[Part]:
    """The best program of the run and that of the untrained model, and how they were found."""
    races = run.result.get("races", {})

    def chosen(key: str) -> str:
        said = ": best of {candidates}, chosen on {boards} boards of its own"
        return said.format(**races[key]) if key in races else ""

    named = (("Best of the run", "best", run.best), ("The untrained model", "best_of_n", run.best_of_n))
    return [Listing(name + chosen(key), source, opened=key == "best") for name, key, source in named if source]


def best_programs(run: Run, count: int = 5) -> list[Part]:
    """The programs that reached the largest tiles at the last stage of training."""
    tries: dict[str, list[tuple[int, Attempt]]] = {}
    last = run.steps[max(run.steps)].stage if run.steps else ""
    for number, step in run.steps.items():
        for attempt in step.attempts:
            if attempt.source and attempt.plays and step.stage == last:
                tries.setdefault(attempt.source, []).append((number, attempt))
    tiles = {source: [tile for _, attempt in made for tile in attempt.tiles] for source, made in tries.items()}
    ranked = sorted(tiles, key=lambda source: (statistics.fmean(tiles[source]), len(tiles[source])), reverse=True)
    return [
        Listing(
            f"{place}. {last}: largest tile {statistics.fmean(tiles[source]):.0f} (mean of {len(tiles[source])} "
            f"{'games' if len(tiles[source]) > 1 else 'game'}), "
            f"reward {statistics.fmean(attempt.reward for _, attempt in tries[source]):.1f}, "
            f"written at step {tries[source][0][0]}",
            source,
        )
        for place, source in enumerate(ranked[:count], 1)
    ]


def write_page(file: Path, title: str, lead: str, sections: Sequence[Section], games: Mapping[str, Any]) -> Path:
    """Fill in the template and write the page atomically.

    The replay comes after the first section; `games` are those to replay, by name.  Raises UsageError.
    """
    from jinja2 import Environment, StrictUndefined

    template = TEMPLATE.read_text(encoding="utf-8")
    hashes = {
        tag: base64.b64encode(
            hashlib.sha256(re.findall(f"<{tag}>(.*?)</{tag}>", template, re.DOTALL)[0].encode()).digest()
        ).decode()
        for tag in ("style", "script")
    }
    policy = "; ".join(
        (
            "default-src 'none'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            *(f"{tag}-src 'sha256-{digest}'" for tag, digest in hashes.items()),
        )
    )
    # Every value becomes visible text; what has __html__ is HTML already: the result of a macro or of tojson.
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if hasattr(value, "__html__") else visible(value),
    )
    page = environment.from_string(template).render(
        policy=policy,
        title=title,
        lead=lead,
        sections=[section for section in sections if section[1]],
        games=[{**game, "name": name} for name, game in games.items() if game],
    )
    try:
        write_whole(file, page)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from None
    return file


def report_of(run: Run) -> tuple[str, str, list[Section], dict[str, Any]]:
    """A run's page: title, lead, sections, games."""
    pairs = [pair for pair in pairs_within(run.held_out) if pair.boards >= FEWEST_BOARDS]
    tables: list[Part] = []
    for i, (stage, played) in enumerate(run.held_out.items()):
        tables.append(score_table(stage, played.scores, played.target))
        tables += [Paragraph(without_skill(stage, played))] if i else []
        tables += pair_tables(stage, pairs, played.target)
    facts = {**run.config, **{f"at the end: {name}": value for name, value in run.result.items() if name not in HIDDEN}}
    known = [
        [name, " ".join(map(str, value)) if isinstance(value, list) else str(value)]
        for name, value in facts.items()
        if name not in HIDDEN and isinstance(value, str | int | float | list)
    ]
    sections: list[Section] = [
        ("Result", tables),
        ("Training", [stage_table(run), curve_charts(run)] if run.steps else []),
        ("How programs changed", [changes(run)] if run.steps else []),
        ("The best programs", [*chosen_programs(run), *best_programs(run)]),
        ("Settings", [Folded("All of them", Table(("name", "value"), known))]),
    ]
    return f"{run.name}: a model learns to play 2048", headline(run), sections, {run.name: run.game}


def write_report(folder: Path) -> Path:
    """Write a run's report.html.  Raises UsageError."""
    with naming(folder):  # what reading did not find
        return write_page(folder / "report.html", *report_of(read_run(folder)))


def try_report(folder: Path) -> str:
    """Write a run's page.  An error costs the run nothing.  Returns what to say."""
    try:
        return f"the report is {write_report(folder)}"
    except Exception as error:  # the weights are worth more than any page about them
        return f"no report could be written: {error}"


def at_stage(runs: Mapping[str, Run], stage: str, target: int) -> dict[str, dict[str, Score]]:
    """The scores at a stage by run and player."""
    return {
        name: run.held_out[stage].scores
        for name, run in runs.items()
        if stage in run.held_out and run.held_out[stage].target == target
    }


def write_comparison(runs: Mapping[str, Run], pairs: Sequence[Pair], file: Path) -> Path:
    """Write the page that compares several runs.  Raises UsageError."""
    tables: list[Part] = []
    stages = dict.fromkeys((stage, held.target) for run in runs.values() for stage, held in run.held_out.items())
    for stage, target in stages:
        played = at_stage(runs, stage, target)
        common = next(iter(played.values()))
        same = {  # of every run: another number of games or another expert gives a control other scores
            player
            for player in {*CONTROLS.values()} - {BEST_OF_N}
            if all(players.get(player) == common.get(player) for players in played.values())
        }
        scores = {
            f"{name}, {player}": score
            for name, players in played.items()
            for player, score in players.items()
            if player not in same
        }
        scores |= {player: score for player, score in common.items() if player in same}
        tables += [score_table(stage, scores, target), *pair_tables(stage, pairs, target)]
    curves: dict[str, tuple[str, Form]] = {
        "Reward of an answer": ("reward", "number"),
        "Median largest tile": ("games/largest_tile", "tile"),
        "Board size": ("games/size", "number"),
        "Target": ("games/target", "tile"),
        "Games that made the target": ("games/won", "percent"),
        "Answers whose program loads": ("games/works", "percent"),
        "Answers whose program differs from the others of its group": ("games/distinct", "percent"),
    }
    drawn: list[Part] = []
    for title, (curve, form) in curves.items():
        drawn += charts(title, {name: run.curves.get(curve, {}) for name, run in runs.items()}, form)
    settings = {name for run in runs.values() for name in run.config if name not in HIDDEN}
    differ = [
        [name, *(str(run.config.get(name, "")) for run in runs.values())]
        for name in sorted(settings)
        if len({str(run.config.get(name)) for run in runs.values()}) > 1
    ]
    sections: list[Section] = [
        ("Result", tables),
        ("Training", [Grid(drawn)] if drawn else []),
        ("The best programs", [Listing(name, run.best) for name, run in runs.items() if run.best]),
        ("Settings that differ", [Table(("name", *runs), differ)] if differ else []),
    ]
    lead = f"{len(runs)} training runs. Every two are compared on the boards that both played."
    return write_page(file, "Runs compared", lead, sections, {name: run.game for name, run in runs.items()})


# ---------------------------------------------------------------------------------------------------------------------
# Commands


@dataclass
class CompareConfig:
    """Compare several runs, with paired tests on the held-out boards that both of two runs played."""

    runs: tuple[Path, ...]  # their folders
    output: Path | None = None  # the page to write; default: compare.html beside the first run's folder
    json: bool = False  # print one JSON object as the last line of stdout, and everything else to stderr


def show_stage(console: Console, stage: str, scores: Mapping[str, Score], pairs: Sequence[Pair], target: int) -> None:
    """The trained models' scores of a stage by run, and the tests of its pairs."""
    from rich.table import Table

    table = Table(f"{stage}, {AFTER}", f"made {target}", "95% interval", "median tile", "games")
    for name, score in scores.items():
        table.add_row(
            name,
            f"{score.won:.0%}",
            f"{score.won_low:.0%} to {score.won_high:.0%}",
            f"{score.largest_tile_median:.0f}",
            str(score.games),
        )
    tests = Table(
        f"{stage}, board by board", f"only one\nmade {target}", "p\n(McNemar)", "higher\ntile", "p\n(sign)", "boards"
    )
    for pair in pairs:
        (first, player), (second, _) = (name.rsplit(", ", 1) for name in (pair.first, pair.second))
        tests.add_row(
            f"{player}:\n{first} : {second}",
            f"{pair.won_first} : {pair.won_second}",
            f"{pair.won_p:.2g}",
            f"{pair.higher_first} : {pair.higher_second}",
            f"{pair.higher_p:.2g}",
            str(pair.boards),
        )
    console.print(table, tests, sep="\n")


def compare(config: CompareConfig, console: Console) -> dict[str, Any]:
    """The compare command, which returns what --json prints.  `console` must not read markup.  Raises UsageError."""
    if config.output and config.output.suffix != ".html":  # it could be a file of a run
        raise UsageError(f"--output is a page: name a file that ends in .html, not {config.output}")
    with naming(Path(" or ".join(map(str, config.runs)))):  # what reading did not find
        runs = read_runs(config.runs)
        pairs = pairs_between({name: run.held_out for name, run in runs.items()})
        page = write_comparison(runs, pairs, config.output or config.runs[0].resolve().parent / "compare.html")
        for stage, target in dict.fromkeys((pair.stage, pair.target) for pair in pairs):
            scores = {name: scores[AFTER] for name, scores in at_stage(runs, stage, target).items()}
            show_stage(console, stage, scores, [p for p in pairs if (p.stage, p.target) == (stage, target)], target)
    console.print("Both tests are exact, two-sided and not corrected for multiple testing.")
    console.print(f"The page is {page}", soft_wrap=True)
    printed = {
        name: {
            stage: {
                "target": played.target,
                **dataclasses.asdict(played.scores[AFTER]),
                "by_board": played.by_board(AFTER),
            }
            for stage, played in run.held_out.items()
        }
        for name, run in runs.items()
    }
    return {"page": str(page), "runs": printed, "pairs": [dataclasses.asdict(pair) for pair in pairs]}


def main(argv: Sequence[str]) -> int:
    """Write the report of each folder again.  Returns the exit code."""
    if {"-h", "--help"} & {*argv}:
        print(__doc__)
        return 0
    if not argv:
        print("error: name the folder of at least one run: python -m toolkit.run.report outputs/RUN", file=sys.stderr)
        return 2
    try:
        for folder in argv:
            print(write_report(Path(folder)))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
