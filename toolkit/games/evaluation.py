"""Who is compared, what each reached on held-out boards, and the statistics that tell players apart."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import secrets
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import Any, get_type_hints

from toolkit import UsageError, cache_folder, checked

BEFORE, AFTER, BEST = "before training", "after training", "best program"
BEST_OF_N = "best of N, untrained"
RANDOM, ROTATION, GREEDY = "random legal moves", "four keys in turn", "greedy on empty cells"
EXPERT = "expert (expectimax)"
MODEL = "model"  # what `eval` evaluates
PLAYERS = {"before": BEFORE, "after": AFTER, "best": BEST, "model": MODEL}  # names in result.json and for people
CONTROLS = {"best_of_n": BEST_OF_N, "random": RANDOM, "rotation": ROTATION, "greedy": GREEDY, "expert": EXPERT}

# ---------------------------------------------------------------------------------------------------------------------
# Held-out boards and scores


@cache
def board_key() -> str:
    """This machine's secret, from which board seeds are drawn.  Raises UsageError if it cannot be stored.

    A strategy that knew the seed of a board could predict every tile.  Players cannot read files, and no process but
    this one holds the key.
    """
    file = cache_folder() / "board_key"
    try:
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            new = file.with_name(f".board_key-{os.getpid()}")
            new.touch(mode=0o600)
            new.write_text(secrets.token_hex(16))
            with contextlib.suppress(FileExistsError):  # another process was faster: its key counts
                os.link(new, file)
            new.unlink()
        if file.stat().st_mode & 0o077:  # whoever has it knows every board
            raise UsageError(f"others may read or change {file}: chmod 600 it, or remove it, and boards are drawn anew")
        key = file.read_text().strip()
    except OSError as error:
        raise UsageError(f"{file} cannot be stored ({error.strerror}): set XDG_CACHE_HOME to another folder") from None
    except ValueError:
        key = ""
    if not re.fullmatch("[0-9a-f]{32}", key):
        raise UsageError(f"{file} holds no key: remove it, and boards are drawn anew")
    return key


def board_name(size: int, seed: int) -> str:
    """A name for a board, by which runs are compared.  It tells nothing about the seed."""
    return hashlib.sha256(f"{size} {seed}".encode()).hexdigest()[:12]


def wilson_interval(won: int, games: int) -> tuple[float, float]:
    """95% confidence interval of a share (Wilson 1927); (0, 1) for no games."""
    if not games:
        return 0.0, 1.0
    z, p = 1.959964, won / games
    centre, spread = p + z * z / (2 * games), z * math.sqrt(p * (1 - p) / games + z * z / (4 * games * games))
    low, high = ((centre + sign * spread) / (1 + z * z / games) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)


@dataclass(frozen=True)
class Score:
    """A player's result on the held-out boards, one game per board.  The fields are those of result.json."""

    games: int
    won: float  # share of games that made the target
    won_low: float  # 95% interval (Wilson)
    won_high: float
    largest_tile_median: float  # the lower of two, which is a tile
    mean_log2_tile: float  # of the largest tiles
    tiles: tuple[int, ...]  # the largest tile of each game, in the order of the boards


def score(largest_tiles: Sequence[int], target: int) -> Score:
    """Sum up one game per board by its largest tile.  A game that made the target is won, however it ended."""
    games, won = len(largest_tiles), sum(tile >= target for tile in largest_tiles)
    low, high = wilson_interval(won, games)
    median = statistics.median_low(largest_tiles) if largest_tiles else 0.0
    level = statistics.fmean(map(math.log2, largest_tiles)) if largest_tiles else 0.0
    return Score(
        games,
        round(won / max(1, games), 4),
        round(low, 4),
        round(high, 4),
        median,
        round(level, 4),
        tuple(largest_tiles),
    )


def read_score(row: Mapping[str, Any]) -> Score:
    """A score from a file.  Any error means that the file is damaged."""
    known = {name: checked(row[name], hint) for name, hint in get_type_hints(Score).items()}
    return Score(**known | {"tiles": tuple(row["tiles"])})


@dataclass(frozen=True)
class HeldOut:
    """What each player reached on the held-out boards of one stage: an entry of `scores` in result.json."""

    target: int
    boards: tuple[str, ...]  # their names
    scores: dict[str, Score]  # by the player's name

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> HeldOut:
        """One entry.  Any error means that the file is damaged."""
        boards, controls = tuple(map(str, entry["boards"])), entry["controls"]
        rows = {name: entry.get(key) for key, name in PLAYERS.items()}
        rows |= {name: controls.get(key) for key, name in CONTROLS.items()}
        scores = {player: read_score(row) for player, row in rows.items() if row}
        if any(len(score.tiles) != len(boards) for score in scores.values()):
            raise ValueError("a game for each board is not there")
        return cls(checked(entry["target"], int), boards, scores)

    def by_board(self, player: str) -> dict[str, int]:
        """A player's largest tile on each board; empty if it did not play."""
        return dict(zip(self.boards, self.scores[player].tiles, strict=True)) if player in self.scores else {}


def without_skill(stage: str, played: HeldOut) -> str:
    """What a reader has to know of a stage that random and blind programs may solve."""
    random, blind = (f"{played.scores[player].won:.0%}" for player in (RANDOM, ROTATION))
    return (
        f"On {stage}, games end at {played.target}. Random legal moves make it in {random} of them, four keys in "
        f"turn, without a look at the board, in {blind}."
    )


def read_scores(result: Mapping[str, Any]) -> dict[str, HeldOut]:
    """The scores in a result.json by stage, the result first.  Any error means that the file is damaged."""
    return {stage: HeldOut.of(entry) for stage, entry in result.get("scores", {}).items()}


# ---------------------------------------------------------------------------------------------------------------------
# Comparing players


def sign_test(above: int, below: int) -> float:
    """Two-sided p-value of a split this uneven if both sides were equally likely (exact binomial).

    On the boards that only one of two players won, this is the exact form of McNemar's test (1947).
    """
    count = above + below
    tail = sum(math.comb(count, i) for i in range(min(above, below) + 1))
    return min(1.0, 2 * tail / (1 << count))


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95% confidence interval of a median for any distribution: the k-th value from each end.

    None for fewer than six values: no interval of theirs is that certain.
    """
    ordered, count = sorted(values), len(values)
    k = tail = 0  # tail / 2**count: probability that fewer than k values lie below the median
    while k < count and 40 * (tail + math.comb(count, k)) <= 2**count:  # 2.5% at each end
        tail += math.comb(count, k)
        k += 1
    return (ordered[k - 1], ordered[count - k]) if k else None


@dataclass(frozen=True)
class Pair:
    """Two players compared board by board."""

    stage: str  # whose held-out boards they are, as in result.json
    target: int
    first: str
    second: str
    boards: int  # played by both
    won_first: int  # boards on which only the first made the target
    won_second: int
    won_p: float  # exact McNemar test
    higher_first: int  # boards on which the first has the larger tile
    higher_second: int
    higher_p: float  # sign test


def compare_players(
    stage: str, target: int, first: str, a: Mapping[str, int], second: str, b: Mapping[str, int]
) -> Pair:
    """Compare two players on the boards that both played; `a` and `b` hold their largest tiles by board."""
    both = [(a[board], b[board]) for board in a if board in b]
    won = sum(x >= target > y for x, y in both), sum(y >= target > x for x, y in both)
    higher = sum(x > y for x, y in both), sum(y > x for x, y in both)
    return Pair(stage, target, first, second, len(both), *won, sign_test(*won), *higher, sign_test(*higher))


def pairs_within(held_out: Mapping[str, HeldOut]) -> list[Pair]:
    """What a run has learned, by stage: the trained model and its best program against the controls."""
    rows = ((AFTER, BEFORE), (AFTER, RANDOM), (AFTER, ROTATION), (AFTER, GREEDY), (BEST, BEST_OF_N), (BEST, GREEDY),
            (BEST, EXPERT))  # fmt: skip
    return [
        compare_players(stage, played.target, a, played.by_board(a), b, played.by_board(b))
        for stage, played in held_out.items()
        for a, b in rows
        if {a, b} <= played.scores.keys()
    ]


def pairs_between(results: Mapping[str, Mapping[str, HeldOut]]) -> list[Pair]:
    """Every two runs' trained models, and their best programs.  Raises UsageError if they have nothing in common.

    A run plays its first stage to the end, and others to their target.  Where one run did the first and another the
    second with the same boards, tiles above the target do not count.
    """
    pairs = []
    for name, held_out in results.items():
        if not held_out:
            raise UsageError(f"{name} has no result: it has not ended")
    for (first, a), (second, b) in combinations(results.items(), 2):
        common = [
            stage
            for stage, played in a.items()
            if stage in b and played.target == b[stage].target and set(played.boards) & set(b[stage].boards)
        ]
        if not common:
            raise UsageError(f"{first} and {second} have no board in common: name runs of one --held-out and machine")
        for stage, player in product(common, (AFTER, BEST)):
            target = a[stage].target
            capped = (stage == next(iter(a))) != (stage == next(iter(b)))
            x, y = (
                {board: min(tile, target) if capped else tile for board, tile in run[stage].by_board(player).items()}
                for run in (a, b)
            )
            if x and y:
                pairs.append(compare_players(stage, target, f"{first}, {player}", x, f"{second}, {player}", y))
    return pairs
