"""Programs that play: the source of the controls that a result has to beat, what programs reach, and the best of many.

The script's Evaluator plays the games.  This file chooses programs and boards, and sums up the games.
"""

from __future__ import annotations

import math
import os
import statistics
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

from toolkit import UsageError, stage_name
from toolkit.base.bars import in_parts
from toolkit.games import evaluation

# ---------------------------------------------------------------------------------------------------------------------
# Sources

_MOVES = """\
from functools import cache

def slide(row):
    tiles, last = [], 0
    for x in row:
        if x and x == last:
            tiles[-1], last = x + x, 0
        elif x:
            tiles.append(x)
            last = x
    return tuple(tiles + [0] * (len(row) - len(tiles)))

@cache
def both(row):
    return slide(row), slide(row[::-1])[::-1]

def moves(board):
    left, right = zip(*map(both, board))
    up, down = zip(*map(both, zip(*board)))
    after = {{
{lines}
    }}
    return {{key: b for key, b in after.items() if b != board}}
"""
_AFTER = ("tuple(zip(*up))", "tuple(zip(*down))", "left", "right")
AFTER = "    after = moves(tuple(map(tuple, board)))\n"  # the first line of a strategy that uses them


def moves_source(keys: Iterable[str], order: Iterable[int] = range(4)) -> str:
    """Source of `moves(board)`: the legal keys of a board, a tuple of rows, and the boards they lead to.

    `keys` are those for up, down, left and right; `order` is the order in which they are tried.
    """
    spelled = list(zip(keys, _AFTER, strict=True))
    lines = (f'        "{key}": {after},' for key, after in (spelled[direction] for direction in order))
    return _MOVES.format(lines="\n".join(lines))


EXPERT = Path(__file__).with_name("expert.py")


def controls(keys: str) -> dict[str, str]:
    """Random legal moves; four keys in turn, without a look at the board; greedy on empty cells; and an expectimax.

    `keys` as above.
    """
    seeing = f"{moves_source(keys)}\ndef strategy(board):\n{AFTER}"
    turn = "".join(keys[direction] for direction in (2, 0, 3, 1))  # left, up, right, down
    return {
        "random": f"import random\n{seeing}    return random.choice([*after])\n",
        "rotation": f'def strategy(board, k=[*"{turn}"] * 9**5): return k.pop()\n',
        "greedy": f"{seeing}    return max(after, key=lambda key: sum(row.count(0) for row in after[key]))\n",
        "expert": EXPERT.read_text(encoding="utf-8").replace('"éuai"', f'"{keys}"'),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Games


class Game(Protocol):
    """A game as it is replayed: the script's GameBoard."""

    size: int
    spawned: int

    def move(self, direction: int) -> bool: ...
    def board(self) -> list[list[int]]: ...
    def score(self) -> int: ...
    def max_tile(self) -> int: ...


class GameResult(Protocol):
    """A finished game: the script's GameResult.  `moves` are indices of directions, one digit each, if recorded."""

    @property
    def seed(self) -> int: ...
    @property
    def max_tile(self) -> int: ...
    @property
    def score(self) -> int: ...
    @property
    def seconds(self) -> float: ...  # CPU time
    @property
    def moves(self) -> str: ...


class Verdict(Protocol):
    """What is known of an answer: the script's Verdict."""

    @property
    def source(self) -> str | None: ...
    @property
    def works(self) -> str: ...
    @property
    def cheating(self) -> str: ...
    @property
    def results(self) -> Sequence[GameResult]: ...


class Evaluator(Protocol):
    """Plays programs on boards of this machine: the script's Evaluator."""

    config: Any
    size: int
    target: int
    letters: str  # keys for up, down, left and right
    held_out_seeds: tuple[int, ...]  # of boards

    @property
    def at(self) -> Callable[[int, int], Evaluator]: ...  # the same for another size and target
    def boards(self, count: int, purpose: str) -> tuple[int, ...]: ...
    def new_game(self, seed: int) -> Game: ...
    def answers(self, model: Any, tokenizer: Any, count: int, wordings: Sequence[int], **other: Any) -> list[str]: ...
    def judge(self, answers: Sequence[str], boards: Sequence[Sequence[int]]) -> Sequence[Verdict]: ...
    def spare_pool(self) -> AbstractContextManager[Any]: ...
    def play(
        self, sources: Sequence[str], seeds: Sequence[int], record: bool = False, pool: Any = None
    ) -> Sequence[Sequence[GameResult]]: ...


def recorded_game(game: Game, moves: Iterable[int]) -> dict[str, Any]:
    """A game from its first board on, in a form that a page can show without the engine and without the seed.

    The tiles at the start and the end, row by row; and for each move that changed the board its direction, the cell of
    the new tile, and that tile.
    """

    def tiles() -> list[int]:
        return [tile for row in game.board() for tile in row]

    start, made = tiles(), []
    for direction in moves:
        if game.move(direction):
            made.append((direction, game.spawned, tiles()[game.spawned]))  # noqa: PERF401 - the game goes on
    reached = {"score": game.score(), "max_tile": game.max_tile()}
    return {"size": game.size, "start": start, "moves": made, "end": tiles(), **reached}


def best_game(evaluator: Evaluator, games: Sequence[GameResult]) -> dict[str, Any]:
    """The recorded_game of the game that got furthest."""
    best = max(games, key=lambda game: (game.max_tile, game.score))
    return recorded_game(evaluator.new_game(best.seed), map(int, best.moves))


def finished_game(evaluator: Evaluator, source: str) -> dict[str, Any]:
    """The recorded_game of a program on a board of its own."""
    return best_game(evaluator, evaluator.play([source], evaluator.boards(1, "picture"), record=True)[0])


def random_moves_win(evaluator: Evaluator) -> float:
    """Share of 16 boards of their own on which random legal moves make the target."""
    games = evaluator.play([controls(evaluator.letters)["random"]], evaluator.boards(16, "random moves"))[0]
    return statistics.fmean(game.max_tile >= evaluator.target for game in games)


def score(evaluator: Evaluator, games: Sequence[GameResult]) -> evaluation.Score:
    """The score of games on the held-out boards."""
    return evaluation.score([game.max_tile for game in games], evaluator.target)


PART = 16 * len(os.sched_getaffinity(0))  # games between two looks at the bar


class BackgroundGames:
    """Programs' games on the held-out boards: beside other work, as far as the cores have time.

    `evaluators` has an Evaluator for each stage by its name in results: the board alone where no other stage has it.
    `first` is that of the first stage; `boards` counts the held-out boards of all stages.
    Games of the first stage are played to their end, those of the others to their target, because on 6x6 even random
    moves make 2048.
    """

    def __init__(self, stages: Iterable[tuple[int, int]], evaluator_of: Callable[..., Evaluator]) -> None:
        distinct = list(dict.fromkeys(stages))
        sizes = [size for size, _ in distinct]
        names = [stage_name(*stage) if sizes.count(stage[0]) > 1 else f"{stage[0]}x{stage[0]}" for stage in distinct]
        later = (evaluator_of(size, target, target, every=4) for size, target in distinct[1:])
        made = [evaluator_of(*distinct[0]), *later]
        self.evaluators, self.first, self._ended = dict(zip(names, made, strict=True)), made[0], False
        self.boards = sum(len(evaluator.held_out_seeds) for evaluator in made)
        self._sources: dict[str, str] = {}
        self._left = deque[tuple[tuple[str, str], int]]()  # stage and name of the program, and a board
        self._thread: threading.Thread | None = None
        self.games: dict[tuple[str, str], list[GameResult]] = defaultdict(list)  # played, by stage and program

    def add(self, sources: Mapping[str, str]) -> None:
        """Begin to play some named programs.  What a spare worker does not play or fails at, scores() plays."""
        self._sources |= sources
        self._left += [
            ((stage, name), board)
            for stage, evaluator in self.evaluators.items()
            for name in reversed([*sources])  # the expert first, whose games take longest
            for board in evaluator.held_out_seeds
        ]
        if not (self._thread and self._thread.is_alive()):
            self._thread = threading.Thread(target=self._play_beside, daemon=True)
            self._thread.start()

    def to_come(self, name: str) -> float:
        """CPU seconds that a program's games will take which are not played yet: as long as the others, 0 for none."""
        played = [game.seconds for (_, whose), games in list(self.games.items()) for game in games if whose == name]
        return sum(whose[1] == name for whose, _ in list(self._left)) * statistics.fmean(played or [0.0])

    def _play(self, whose: tuple[str, str], boards: Sequence[int], pool: Any = None) -> None:
        stage, name = whose
        record = name == evaluation.BEST
        self.games[whose] += self.evaluators[stage].play([self._sources[name]], boards, record, pool)[0]
        for _ in boards:
            self._left.popleft()

    def _play_beside(self) -> None:
        with suppress(UsageError, RuntimeError, OSError), self.first.spare_pool() as pool:
            while self._left and not self._ended:
                whose, board = self._left[0]
                self._play(whose, [board], pool)

    def scores(self) -> dict[str, dict[str, evaluation.Score]]:
        """The scores by stage and program.  What is left to play, all cores play now."""
        self._ended = True
        if self._thread:
            self._thread.join()
        for whose, left in groupby(list(self._left), key=itemgetter(0)):
            for boards in in_parts([board for _, board in left], f"playing: {whose[1]}", PART):
                self._play(whose, boards)
        return {
            stage: {name: score(evaluator, self.games[stage, name]) for name in self._sources}
            for stage, evaluator in self.evaluators.items()
        }


def evaluate_model(evaluators: Mapping[str, Evaluator], model: Any, tokenizer: Any) -> dict[str, evaluation.Score]:
    """A model's score on the held-out boards of each stage.

    It writes a program for each board, in a wording that training never uses.  The games are independent, so Wilson's
    interval holds.
    """
    scores = {}
    for stage, evaluator in evaluators.items():
        answers = evaluator.answers(model, tokenizer, len(evaluator.held_out_seeds), (-1,))
        games = list(zip(answers, ([board] for board in evaluator.held_out_seeds), strict=True))
        verdicts = [evaluator.judge(*zip(*part, strict=True)) for part in in_parts(games, "playing", PART)]
        scores[stage] = score(evaluator, [verdict.results[0] for verdict in chain(*verdicts)])
    return scores


def sampled_programs(evaluator: Evaluator, model: Any, tokenizer: Any, count: int, **other: Any) -> list[str]:
    """The programs in some answers of a model to prompts of training, the most promising first.

    Each is judged on one board, as in training.  Programs that do not load or that cheat are left out.  `other` options
    replace the config's.
    """
    answers = evaluator.answers(model, tokenizer, count, range(evaluator.config.wordings), **other)
    board = evaluator.boards(1, "sampled")
    verdicts = [evaluator.judge(part, [board] * len(part)) for part in in_parts(answers, "playing", 4 * PART)]
    scores = {
        verdict.source: verdict.results[0].score
        for verdict in chain(*verdicts)
        if verdict.source and verdict.works == "load" and not verdict.cheating
    }
    return sorted(scores, key=scores.__getitem__, reverse=True)


# ---------------------------------------------------------------------------------------------------------------------
# The best of many programs

FINALISTS = (32, 16, 8, 4, 2, 1)  # how many programs may stay after the first round of a race


@dataclass(frozen=True)
class Race:
    """How the best of many programs was found, on boards that are not held out."""

    candidates: int  # distinct programs
    played: int  # of them, at least one board
    boards: int  # that the winner played
    won: float  # share of them on which it made the target
    ranking: tuple[str, ...]  # source of all that played, the winner first

    def summary(self) -> dict[str, Any]:
        """What result.json says of it."""
        return {"candidates": self.candidates, "played": self.played, "boards": self.boards, "won": self.won}


def halving(count: int) -> int:
    """Games of all rounds after the first, for so many programs: each plays 2, half of them 4, a quarter 8, ..."""
    return 2 * count * (count.bit_length() - 1)


def race(evaluator: Evaluator, sources: Sequence[str], games: int) -> Race:
    """Find the best program by sequential halving (Karnin, Koren and Somekh 2013), in at most so many games.

    In the first round each program plays one board, in the given order, as many as a quarter or more of the games
    allow.  The best of them, FINALISTS, go on.  Each later round plays twice as many new boards as the one before, and
    drops the worse half, by the mean log2 of the scores so far.  All programs of a round play the same boards.  The
    result follows from the programs, the boards and the number of games, on every machine.
    """
    left, lost, number = list(dict.fromkeys(sources)), list[str](), 0
    candidates, kept = len(left), next(count for count in FINALISTS if halving(count) <= 0.75 * games)
    played: dict[str, list[GameResult]] = {source: [] for source in left}
    boards = evaluator.boards(2 * FINALISTS[0], "race")

    def level(source: str) -> float:
        return statistics.fmean(math.log2(max(1, game.score)) for game in played[source])

    left = left[: games - halving(kept)]
    while left and (len(left) > 1 or not number):
        new = boards[(1 << number) - 1 : (2 << number) - 1]
        for part in in_parts(left, f"choosing among {len(left)} programs", max(1, PART // len(new))):
            for source, results in zip(part, evaluator.play(part, new), strict=True):
                played[source] += results
        left.sort(key=level, reverse=True)
        half = (len(left) + 1) // 2 if number else kept
        left, lost, number = left[:half], left[half:] + lost, number + 1
    ranking = (*left, *lost)
    best = played[ranking[0]] if ranking else []
    won = statistics.fmean(game.max_tile >= evaluator.target for game in best) if best else 0.0
    return Race(candidates, len(ranking), len(best), round(won, 4), ranking)
