"""Chess as text: the two kinds of lines, made by self-play and by stockfish, or read from a file.

    P: FEN M: up to five moves E: their evals B: the best      policy: what to play (evals in pawns, for the mover)
    A: FEN+move+history+new FEN+reward+terminated+truncated    environment: what a move does

Prompt and answer of an A line part after the history's `+`, those of a P line before `M:`.
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

from mini.config import DataConfig, UsageError
from mini.files import write_whole

Task = Literal["P", "A"]
SHIPPED = Path(__file__).with_name("positions.txt")  # P lines of stockfish 15.1, depth 8
HISTORY = 10  # moves in an A line at most, its own included
ONGOING, MATE, DRAW, ILLEGAL = "0.001", "1.0", "0.5", "-1.0"  # rewards of an A line
MATE_EVAL = 99.99  # pawns


@dataclass(frozen=True)
class Example:
    """A document: what is asked, and the right answer."""

    task: Task
    prompt: str
    answer: str


# ---------------------------------------------------------------------------------------------------------------------
# Lines


def parse_line(line: str) -> Example | None:
    """A line of a corpus; one without a prefix is an A line.  None where it is neither."""
    line = line.replace("<|endoftext|>", "").strip()
    if line.startswith("P:"):
        prompt, moves, answer = line.partition("M:")
        return Example("P", f"P: {prompt[2:].strip()}", moves + answer) if moves else None
    fields = line.removeprefix("A:").strip().split("+")
    if len(fields) != 7:
        return None
    return Example("A", f"A: {'+'.join(fields[:3])}+", "+".join(fields[3:]))


def environment_line(board: chess.Board, move: chess.Move, history: list[str]) -> str:
    """The A line of a move, which is played on the board if it is legal; `history` is of the moves before."""
    before = board.fen()
    reward, terminated, truncated = ONGOING, 0, 0
    if move not in board.legal_moves:
        reward, truncated = ILLEGAL, 1
    else:
        board.push(move)
        if outcome := board.outcome():  # mate, and the draws that no player has to claim
            reward, terminated = (DRAW if outcome.winner is None else MATE), 1
    moves = " ".join([*history, move.uci()][-HISTORY:])
    return f"A: {before}+{move.uci()}+{moves}+{board.fen()}+{reward}+{terminated}+{truncated}"


def policy_line(fen: str, moves: list[str], evals: list[float], best: str) -> str:
    """A P line, padded as the published corpus is."""
    numbers = " ".join(f"{value:.2f}" for value in evals)
    return f"P: {fen:90}M: {' '.join(moves):30}E: {numbers:40}B: {best}"


# ---------------------------------------------------------------------------------------------------------------------
# Self-play


def choose_move(board: chess.Board, rng: random.Random) -> chess.Move:
    """At random, with many checks and captures, and castling and en passant where they can be had: else all that is
    rare hardly occurs."""
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
    """A move of one of the mover's pieces that the rules forbid."""
    own = list(chess.SquareSet(board.occupied_co[board.turn]))
    while True:
        move = chess.Move(rng.choice(own), rng.randrange(64))
        if move.from_square != move.to_square and move not in board.legal_moves:
            return move


def self_play(rng: random.Random) -> Iterator[str]:
    """A lines, game after game, without end."""
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
    """The program, or None where none is installed.  Raises UsageError for a path that leads nowhere."""
    if path is not None and not path.is_file():
        raise UsageError(f"--stockfish {path} is no file")
    return str(path) if path else shutil.which("stockfish") or shutil.which("stockfish", path="/usr/games")


def analyse(engine: chess.engine.SimpleEngine, fen: str, depth: int, multipv: int, rng: random.Random) -> str:
    """The P line of a position."""
    board = chess.Board(fen)
    # A game of its own clears the hash, so that the line does not depend on the lines before.
    lines = engine.analyse(board, chess.engine.Limit(depth=depth), multipv=multipv, game=object())
    moves, evals = list[str](), list[float]()
    for line in lines:
        score = line["score"].pov(board.turn)
        pawns = (score.score() or 0) / 100
        if (mate := score.mate()) is not None:  # mate 0 would be a position whose mover is mated: it has no moves
            pawns = MATE_EVAL if mate > 0 else -MATE_EVAL
        moves.append(line["pv"][0].uci())
        evals.append(max(-MATE_EVAL, min(MATE_EVAL, pawns)))
    order = rng.sample(range(len(moves)), len(moves))
    # The engine's first line is the best move of the side to move, whichever it is.
    return policy_line(fen, [moves[i] for i in order], [evals[i] for i in order], moves[0])


def positions(rng: random.Random) -> Iterator[str]:
    """FENs out of self-play, few enough of a game to be unlike each other."""
    for line in self_play(rng):
        if rng.random() < 0.1:
            yield line.removeprefix("A: ").partition("+")[0]


def analysed_lines(program: str, config: DataConfig) -> Iterator[str]:
    """P lines, one position each."""
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
    """P lines that come with the package."""
    try:
        return SHIPPED.read_text().splitlines()
    except OSError as error:
        raise UsageError(f"{SHIPPED}: {error.strerror}") from None


def read_corpus(path: Path, limit: int) -> list[Example]:
    """The P and A lines among a file's first lines."""
    try:
        with path.open(encoding="utf-8") as file:
            examples = [parse_line(line) for line in islice(file, limit) if line.strip()]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text in UTF-8") from None
    return [example for example in examples if example]


def mirrored(example: Example) -> Example:
    """The same P line with the colours exchanged: its evals are the mover's, so they stay."""

    def flipped(moves: str) -> str:
        return re.sub(r"([a-h])([1-8])", lambda square: square[1] + str(9 - int(square[2])), moves)

    board = chess.Board(example.prompt.removeprefix("P: ")).mirror()
    return Example("P", f"P: {board.fen()}", flipped(example.answer))


def ordered(example: Example) -> Example:
    """The same P line with its moves in the order of their names.

    Their order means nothing to the judge.  Shuffled, five moves have 120 spellings, all of which a model has to learn.
    """
    moves, evals, best = (part.split() for part in re.split(r"[MEB]:", example.answer)[1:])
    pairs = sorted(zip(moves, evals, strict=True))
    return Example("P", example.prompt, f"M: {' '.join(move for move, _ in pairs)} "
                                        f"E: {' '.join(value for _, value in pairs)} B: {best[0]}")  # fmt: skip


def write_lines(path: Path, lines: Iterable[str]) -> int:
    """Write a text file, whole or not at all.  Returns the number of lines."""
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
