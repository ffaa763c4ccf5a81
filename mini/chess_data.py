"""Chess as text: two kinds of lines, from self-play, from stockfish or from a file.

    P: FEN M: up to five moves E: their evals B: the best      policy: what to play (evals in pawns, for the mover)
    A: FEN+move+history+new FEN+reward+terminated+truncated    environment: what a move does

The answer of an A line starts after the history's `+`, that of a P line at `M:`.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import methodcaller
from pathlib import Path
from typing import Literal

import chess
import chess.engine

from mini.config import DataConfig
from mini.files import write_whole
from toolkit import UsageError

Task = Literal["P", "A"]
SHIPPED = Path(__file__).with_name("positions.txt")  # P lines from stockfish 15.1, depth 8
HISTORY = 10  # at most this many moves in an A line, including its own
ONGOING, MATE, DRAW, ILLEGAL = "0.001", "1.0", "0.5", "-1.0"  # rewards of an A line
MATE_EVAL = 99.99  # pawns


@dataclass(frozen=True)
class Example:
    """A document: a prompt and the right answer."""

    task: Task
    prompt: str
    answer: str


# ---------------------------------------------------------------------------------------------------------------------
# Lines


def parse_line(line: str) -> Example | None:
    """Parse a corpus line; without a prefix it is an A line.  None if it is neither kind."""
    line = line.replace("<|endoftext|>", "").strip()
    if line.startswith("P:"):
        prompt, moves, answer = line.partition("M:")
        return Example("P", f"P: {prompt[2:].strip()}", moves + answer) if moves else None
    fields = line.removeprefix("A:").strip().split("+")
    if len(fields) != 7:
        return None
    return Example("A", f"A: {'+'.join(fields[:3])}+", "+".join(fields[3:]))


def environment_line(board: chess.Board, move: chess.Move, history: list[str]) -> str:
    """The A line of a move.  A legal move is also played on the board; `history` holds the moves before it."""
    before = board.fen()
    reward, terminated, truncated = ONGOING, 0, 0
    if move not in board.legal_moves:
        reward, truncated = ILLEGAL, 1
    else:
        board.push(move)
        if outcome := board.outcome():  # mate, and draws that no player has to claim
            reward, terminated = (DRAW if outcome.winner is None else MATE), 1
    moves = " ".join([*history, move.uci()][-HISTORY:])
    return f"A: {before}+{move.uci()}+{moves}+{board.fen()}+{reward}+{terminated}+{truncated}"


def policy_line(fen: str, moves: list[str], evals: list[float], best: str) -> str:
    """A P line, padded as in the published corpus."""
    numbers = " ".join(f"{value:.2f}" for value in evals)
    return f"P: {fen:90}M: {' '.join(moves):30}E: {numbers:40}B: {best}"


# ---------------------------------------------------------------------------------------------------------------------
# Self-play


def choose_move(board: chess.Board, rng: random.Random) -> chess.Move:
    """A random move that favours checks, captures, castling and en passant, because these hardly occur otherwise."""
    moves = list(board.legal_moves)
    rare = [move for move in moves if board.is_castling(move) or board.is_en_passant(move)]
    if rare and rng.random() < 0.5:
        return rng.choice(rare)
    if rng.random() < 0.5 and (checks := [move for move in moves if board.gives_check(move)]):
        return rng.choice(checks)
    if rng.random() < 0.25 and (captures := [move for move in moves if board.is_capture(move)]):
        return rng.choice(captures)
    return rng.choice(moves)


def illegal_move(board: chess.Board, rng: random.Random) -> chess.Move:
    """A forbidden move of one of the mover's pieces."""
    own = list(chess.SquareSet(board.occupied_co[board.turn]))
    while True:
        move = chess.Move(rng.choice(own), rng.randrange(64))
        if move.from_square != move.to_square and move not in board.legal_moves:
            return move


def self_play(rng: random.Random) -> Iterator[str]:
    """An endless stream of A lines, game after game."""
    while True:
        board, history = chess.Board(), list[str]()
        while not board.is_game_over() and board.fullmove_number < 150:
            if rng.random() < 0.03:
                yield environment_line(board, illegal_move(board, rng), history)
                continue
            move = choose_move(board, rng)
            yield environment_line(board, move, history)
            history.append(move.uci())


# ---------------------------------------------------------------------------------------------------------------------
# Stockfish


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


# ---------------------------------------------------------------------------------------------------------------------
# Files


def shipped_lines() -> list[str]:
    """The P lines shipped with the package."""
    try:
        return SHIPPED.read_text().splitlines()
    except OSError as error:
        raise UsageError(f"{SHIPPED}: {error.strerror}") from None


def read_corpus(path: Path, limit: int) -> list[Example]:
    """The P and A lines among the first `limit` lines of a file."""
    try:
        with path.open(encoding="utf-8") as file:
            examples = [parse_line(line) for line in islice(file, limit) if line.strip()]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text in UTF-8") from None
    return [example for example in examples if example]


def mirrored(example: Example) -> Example:
    """The same P line with colours exchanged.  Evals are from the mover's side, so they stay."""

    def flipped(moves: str) -> str:
        return re.sub(r"([a-h])([1-8])", lambda square: square[1] + str(9 - int(square[2])), moves)

    board = chess.Board(example.prompt.removeprefix("P: ")).mirror()
    return Example("P", f"P: {board.fen()}", flipped(example.answer))


def ordered(example: Example) -> Example:
    """The same P line with its moves sorted by name.

    The judge ignores their order.  Shuffled, five moves have 120 spellings, and a model has to learn all of them.
    """
    moves, evals, best = (part.split() for part in re.split(r"[MEB]:", example.answer)[1:])
    pairs = sorted(zip(moves, evals, strict=True))
    return Example("P", example.prompt, f"M: {' '.join(move for move, _ in pairs)} "
                                        f"E: {' '.join(value for _, value in pairs)} B: {best[0]}")  # fmt: skip


def write_lines(path: Path, lines: Iterable[str]) -> int:
    """Write a text file atomically.  Returns the number of lines."""
    made = list(lines)
    write_whole(path, methodcaller("write", "".join(f"{line}\n" for line in made).encode()))
    return len(made)


def write_data(config: DataConfig) -> None:
    """The data command."""
    a_path, p_path = config.out / "a.txt", config.out / "p.txt"
    program = find_stockfish(config.stockfish)
    written = write_lines(a_path, islice(self_play(random.Random(f"games {config.seed}")), config.a_lines))
    print(f"{a_path}: {written} lines of self-play")
    if program:
        written = write_lines(p_path, analysed_lines(program, config))
        print(f"{p_path}: {written} positions, analysed by {program} to depth {config.depth}")
    else:
        written = write_lines(p_path, islice(shipped_lines(), config.p_lines))
        print(f"{p_path}: no stockfish is installed, so these are {written} of the shipped lines")
