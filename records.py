"""What runs have written down, read back from their folders alone, and the statistics that compare them."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

# ---------------------------------------------------------------------------------------------------------------------
# A run's folder

BEFORE, AFTER, BEST = "before training", "after training", "best program"
RANDOM, GREEDY = "random legal moves", "greedy on empty cells"


class ReportError(Exception):
    """What was wrong and what to do, in one line."""


@dataclass(frozen=True)
class Score:
    """Games on the held-out boards, one a board."""

    games: int
    won: float  # share of games in which the target was made
    low: float  # its 95% interval
    high: float
    median: float  # of the largest tiles
    by_board: dict[str, int]  # largest tile by the board's name; empty in runs of older versions


@dataclass(frozen=True)
class Attempt:
    """One completion of a step, and what it came to."""

    source: str | None
    reward: float
    tiles: tuple[int, ...]  # the largest of each game
    plays: bool  # it loads and does not cheat
    cheating: str

    def __str__(self) -> str:
        tile = f"largest tile {statistics.fmean(self.tiles):.0f}"
        return f"reward {self.reward:.1f}, " + (f"does not play: it {self.cheating}" if self.cheating else tile)


@dataclass(frozen=True)
class Step:
    """One step of training."""

    target: int
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True)
class Run:
    """All that a page says of a run."""

    name: str
    config: dict[str, Any]
    result: dict[str, Any]  # empty where the run has come to none
    scores: dict[str, Score]  # by who played
    curves: dict[str, dict[int, float]]  # TensorBoard's: value by step
    steps: dict[int, Step]
    best: str  # source of the best program, or ""
    game: dict[str, Any]  # its best game, or empty

    def by_board(self, player: str) -> dict[str, int]:
        """The largest tile of a player on each board; empty where that is not known."""
        return self.scores[player].by_board if player in self.scores else {}


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Turn whatever a damaged file leads to into a ReportError that names it."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        raise ReportError(f"{file} is damaged: restore it, or leave its run out") from None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no file."""
    with naming(file):
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def read_scores(result: Mapping[str, Any]) -> dict[str, Score]:
    """Every score of a result.json."""
    rows = {BEFORE: result.get("before"), AFTER: result.get("after"), BEST: result.get("best")}
    rows |= {{"random": RANDOM, "greedy": GREEDY}[name]: row for name, row in (result.get("controls") or {}).items()}
    scores = {}
    for player, row in rows.items():
        if row:
            won, low, high = (float(row[name]) for name in ("won", "won_low", "won_high"))
            tiles = dict(zip(result["boards"], row["tiles"], strict=True)) if "boards" in result else {}
            scores[player] = Score(int(row["games"]), won, low, high, float(row["largest_tile_median"]), tiles)
    return scores


def read_rollouts(file: Path) -> dict[int, Step]:
    """The steps by number; of one that was done again after an interruption, the last.

    A last line that was cut off by a kill does not count.
    """
    steps: dict[int, Step] = {}
    if not file.is_file():
        return steps
    with naming(file), file.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                row = json.loads(line)
                attempts = (
                    Attempt(done["source"], float(done["reward"]), tuple(game["max_tile"] for game in done["results"]),
                            done["works"] == "load" and not done["cheating"], done["cheating"])
                    for done in row["completions"])  # fmt: skip
                steps[int(row["step"])] = Step(int(row["target"]), tuple(attempts))
    return steps


def read_curves(folder: Path) -> dict[str, dict[int, float]]:
    """TensorBoard's curves by name; of a step that was done again, the last value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # 0: keep all
    events.Reload()
    return {tag.removeprefix("train/"): {e.step: e.value for e in events.Scalars(tag) if math.isfinite(e.value)}
            for tag in events.Tags()["scalars"]}  # fmt: skip


def read_game(file: Path) -> dict[str, Any]:
    """A recorded game, looked through so that the page's script can rely on it."""
    game = read_json(file)
    with naming(file):
        if game:
            cells, tiles = range(game["size"] ** 2), (0, 2, 4)
            moves = all(way in range(4) and cell in cells and tile in tiles[1:] for way, cell, tile in game["moves"])
            if len(game["start"]) != len(cells) or not set(game["start"]) <= set(tiles) or not moves:
                raise ValueError
    return game


def read_run(folder: Path) -> Run:
    """A run, finished or not.  Raises ReportError for a folder that is none, and for damaged files."""
    config, result = (read_json(folder / f"{name}.json") for name in ("config", "result"))
    if not {"recipe", "target", "steps"} <= config.keys():
        raise ReportError(f"{folder} is no run: it holds no config.json of one")
    with naming(folder / "result.json"):
        scores = read_scores(result)
    best = folder / "best_strategy.py"
    with naming(best):
        source = best.read_text(encoding="utf-8") if best.is_file() else ""
    return Run(folder.resolve().name, config, result, scores, read_curves(folder),
               read_rollouts(folder / "rollouts.jsonl"), source, read_game(folder / "best_game.json"))  # fmt: skip


def read_runs(folders: Sequence[Path]) -> dict[str, Run]:
    """Several runs by their names, or by their paths where two have the same name.  Raises ReportError."""
    if len({folder.resolve() for folder in folders}) < max(2, len(folders)):
        raise ReportError("name the folders of at least two different runs")
    runs = [read_run(folder) for folder in folders]
    alone = len({run.name for run in runs}) == len(runs)
    return {run.name if alone else str(folder): run for folder, run in zip(folders, runs, strict=True)}


# ---------------------------------------------------------------------------------------------------------------------
# Statistics


def sign_test(above: int, below: int) -> float:
    """Two-sided p of a split at least so uneven, were both sides equally likely: binomial, exact.

    Over the boards that only one of two has won, this is McNemar's test (1947) in its exact form.
    """
    count = above + below
    tail = sum(math.comb(count, i) for i in range(min(above, below) + 1))
    return min(1.0, 2 * tail / (1 << count))


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95% confidence interval of a median, whatever the distribution: the k-th value from either end.

    None for fewer than six values, which have none.
    """
    ordered, count = sorted(values), len(values)
    k = tail = 0  # tail of 2**count: the chance that fewer than k values lie below the median
    while k < count and 40 * (tail + math.comb(count, k)) <= 2**count:  # 2.5% at each end
        tail += math.comb(count, k)
        k += 1
    return (ordered[k - 1], ordered[count - k]) if k else None


@dataclass(frozen=True)
class Pair:
    """Two players, held against one another board by board."""

    first: str
    second: str
    boards: int  # that both have played
    won_first: int  # boards on which only the first made the target
    won_second: int
    won_p: float  # exact McNemar test
    higher_first: int  # boards on which the first's largest tile is the higher one
    higher_second: int
    higher_p: float  # sign test


def compare_players(first: str, a: Mapping[str, int], second: str, b: Mapping[str, int], target: int) -> Pair:
    """Two players by name, each with its largest tile by board, on the boards they have in common."""
    both = [(a[board], b[board]) for board in a if board in b]
    won = sum(x >= target > y for x, y in both), sum(y >= target > x for x, y in both)
    higher = sum(x > y for x, y in both), sum(y > x for x, y in both)
    return Pair(first, second, len(both), *won, sign_test(*won), *higher, sign_test(*higher))


def pairs_within(run: Run) -> list[Pair]:
    """What a run has learned: against itself before, and against the controls."""
    rows = ((AFTER, BEFORE), (AFTER, RANDOM), (AFTER, GREEDY), (BEST, GREEDY))
    pairs = [compare_players(a, run.by_board(a), b, run.by_board(b), run.config["target"]) for a, b in rows]
    return [pair for pair in pairs if pair.boards]


def pairs_between(runs: Mapping[str, Run]) -> list[Pair]:
    """Each two runs' trained models, and their best programs.  Raises ReportError where no test is possible."""
    pairs = []
    for name, run in runs.items():
        if not run.by_board(AFTER):
            raise ReportError(f"{name} has no result for each board: it has not ended, or is of an older version")
    for (first, a), (second, b) in combinations(runs.items(), 2):
        if a.config["target"] != b.config["target"]:
            raise ReportError(f"{first} has the target {a.config['target']} and {second} {b.config['target']}: "
                              "name runs of one target")  # fmt: skip
        if not a.by_board(AFTER).keys() & b.by_board(AFTER).keys():
            raise ReportError(f"{first} and {second} have no board in common: name runs of one size and one machine")
        for player in (AFTER, BEST):
            if a.by_board(player) and b.by_board(player):
                names = f"{first}, {player}", f"{second}, {player}"
                pairs.append(compare_players(names[0], a.by_board(player), names[1], b.by_board(player),
                                             a.config["target"]))  # fmt: skip
    return pairs
