"""The command data: a.txt from self-play, and p.txt from stockfish, or from the shipped lines where it is missing."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import chess
import chess.engine

from mini.chess_lines import SHIPPED, policy_line, self_play
from mini.config import DataConfig
from mini.runs import write
from toolkit import UsageError

MATE_EVAL = 99.99  # pawns


def find_stockfish(path: Path | None) -> str | None:
    """The program, or None if none is installed.  Raises UsageError for a path that does not exist."""
    if path is not None and not path.is_file():
        raise UsageError(f"--stockfish {path} is no file")
    return str(path) if path else shutil.which("stockfish") or shutil.which("stockfish", path="/usr/games")


def analyse(engine: chess.engine.SimpleEngine, fen: str, depth: int, multipv: int, rng: random.Random) -> str:
    """The P line of a position."""
    board = chess.Board(fen)
    # A new game object clears the engine's hash, so a line does not depend on the lines before it.
    lines = engine.analyse(board, chess.engine.Limit(depth=depth), multipv=multipv, game=object())
    moves, evals = list[str](), list[float]()
    for line in lines:
        score = line["score"].pov(board.turn)
        pawns = (score.score() or 0) / 100
        if (mate := score.mate()) is not None:  # mate 0 cannot occur: a mated mover has no moves
            pawns = MATE_EVAL if mate > 0 else -MATE_EVAL
        moves.append(line["pv"][0].uci())
        evals.append(max(-MATE_EVAL, min(MATE_EVAL, pawns)))
    order = rng.sample(range(len(moves)), len(moves))
    # The engine's first line is the best move for the side to move, White or Black.
    return policy_line(fen, [moves[i] for i in order], [evals[i] for i in order], moves[0])


def positions(rng: random.Random) -> Iterator[str]:
    """FENs from self-play, few per game so that they differ."""
    for line in self_play(rng):
        if rng.random() < 0.1:
            yield line.removeprefix("A: ").partition("+")[0]


def analysed_lines(program: str, config: DataConfig) -> Iterator[str]:
    """P lines, one per position."""
    rng = random.Random(f"positions {config.seed}")
    try:
        with chess.engine.SimpleEngine.popen_uci(program) as engine:
            engine.configure({"Threads": 1, "Hash": 16})
            for fen in islice(positions(rng), config.p_lines):
                yield analyse(engine, fen, config.depth, config.multipv, rng)
    except (chess.engine.EngineError, OSError) as error:
        raise UsageError(f"{program} does not work as a chess engine: {error}") from None


def write_lines(path: Path, lines: Iterable[str]) -> int:
    """Write a text file atomically.  Returns the number of lines."""
    made = list(lines)
    write(path, "".join(f"{line}\n" for line in made))
    return len(made)


def write_data(config: DataConfig) -> dict[str, Any]:
    """The data command."""
    a_path, p_path = config.out / "a.txt", config.out / "p.txt"
    program = find_stockfish(config.stockfish)
    written = write_lines(a_path, islice(self_play(random.Random(f"games {config.seed}")), config.a_lines))
    print(f"{a_path}: {written} lines of self-play")
    if program:
        written = write_lines(p_path, analysed_lines(program, config))
        print(f"{p_path}: {written} positions, analysed by {program} to depth {config.depth}")
    else:
        written = write_lines(p_path, islice(SHIPPED.read_text().splitlines(), config.p_lines))
        print(f"{p_path}: no stockfish is installed, so these are {written} of the shipped lines")
    return {}
