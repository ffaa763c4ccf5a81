"""Programs that play: the source of the controls that a result has to beat, and what programs reach.

The script's Evaluator plays the games.  This file chooses programs and boards, and sums up the games.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from toolkit import runs

# ---------------------------------------------------------------------------------------------------------------------
# Sources

_SIMULATED_MOVES = """    def move(k):
        turn, order = k in "{vertical}", -1 if k in "{backwards}" else 1
        rows = []
        for row in zip(*board) if turn else board:
            slid, last = [], 0
            for x in row[::order]:
                if x and x == last:
                    slid[-1], last = x + x, 0
                elif x:
                    slid.append(x)
                    last = x
            rows.append((slid + [0] * (len(row) - len(slid)))[::order])
        return [list(r) for r in zip(*rows)] if turn else rows

    after = {{k: move(k) for k in "{keys}"}}
    moves = [k for k in after if after[k] != board]
"""


def moves_source(keys: str, order: str) -> str:
    """Source that computes the moves of a `board`: `moves` are the legal keys, `after` the boards they lead to.

    `keys` are those for up, down, left and right; `order` is the order in which they are tried.
    """
    return _SIMULATED_MOVES.format(vertical=keys[:2], backwards=keys[1] + keys[3], keys=order)


def controls(keys: str) -> dict[str, str]:
    """Random legal moves, and greedy on empty cells; `keys` as above."""
    moves = moves_source(keys, keys)
    return {
        "random": f"import random\ndef strategy(board):\n{moves}    return random.choice(moves)\n",
        "greedy": f"def strategy(board):\n{moves}"
        "    return max(moves, key=lambda k: sum(row.count(0) for row in after[k]))\n",
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
    def moves(self) -> str: ...


class Evaluator(Protocol):
    """Plays programs to their end on boards of this machine: the script's Evaluator."""

    config: Any
    size: int
    target: int
    keys: str  # for up, down, left and right
    held_out: tuple[int, ...]  # seeds of the held-out boards

    def boards(self, count: int, purpose: str) -> tuple[int, ...]: ...
    def new_game(self, seed: int) -> Game: ...
    def evaluate_model(self, model: Any, tokenizer: Any) -> runs.Score: ...
    def play(
        self, sources: Sequence[str], seeds: Sequence[int], record: bool = False
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
    games = evaluator.play([controls(evaluator.keys)["random"]], evaluator.boards(16, "random moves"))[0]
    return statistics.fmean(game.max_tile >= evaluator.target for game in games)


def evaluate_program(evaluator: Evaluator, source: str) -> runs.Score:
    """A program's score on the held-out boards."""
    (games,) = evaluator.play([source], evaluator.held_out)
    return runs.score([game.max_tile for game in games], evaluator.target)


def evaluate_controls(evaluator: Evaluator) -> dict[str, runs.Score]:
    """The controls' scores on the held-out boards."""
    return {name: evaluate_program(evaluator, source) for name, source in controls(evaluator.keys).items()}
