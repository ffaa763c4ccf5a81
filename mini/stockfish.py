"""Stockfish beside the model: chess data (the command data), and games against it (the command play).

python -m mini data                     a.txt from self-play, p.txt from stockfish or from the shipped lines
python -m mini data --game-lines 9999   also games.txt: stockfish against itself, natural openings and middlegames
python -m mini play                     games against random moves and stockfish's lowest level, as PGN and a table
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import chess
import chess.pgn
import torch

from mini.chess_lines import (
    MOVE,
    SHIPPED,
    Example,
    environment_line,
    illegal_move,
    policy_line,
    prepare,
    self_play,
)
from mini.config import DataConfig, PlayConfig
from mini.model import generate
from mini.runs import say, table, write
from toolkit import UsageError

MATE_EVAL = 99.99  # pawns
Choose = Callable[[Sequence[chess.Board]], list[chess.Move | None]]  # a move in each position, or none

# ---------------------------------------------------------------------------------------------------------------------
# The engine


def find_stockfish(path: Path | None) -> str | None:
    """The program, or None if none is installed.  Raises UsageError for a path that does not exist."""
    if path is not None and not path.is_file():
        raise UsageError(f"--stockfish {path} is no file")
    return str(path) if path else shutil.which("stockfish") or shutil.which("stockfish", path="/usr/games")


class Engine:
    """A program that speaks UCI.  On one thread, with a fresh hash for each position, it says the same again.

    python-chess checks each move of each variation: at small depths that takes longer than stockfish itself.
    """

    def __init__(self, program: str, **options: int) -> None:
        self.program = program
        try:
            self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise UsageError(f"{program} does not work as a chess engine: {error.strerror}") from None
        self.ask("uci", "uciok")
        for name, value in {"Threads": 1, **options}.items():
            self.ask(f"setoption name {name.replace('_', ' ')} value {value}\nisready", "readyok")

    def ask(self, command: str, last: str) -> list[str]:
        """The lines of an answer, to the one that begins with `last`.  Raises UsageError if the program ends."""
        assert self.process.stdin
        assert self.process.stdout
        lines = [""]
        try:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
            while not lines[-1].startswith(last):
                lines.append(self.process.stdout.readline())
                if not lines[-1]:
                    raise BrokenPipeError
        except BrokenPipeError:
            self.close()
            raise UsageError(f"{self.program} does not work as a chess engine: it ended at {command!r}") from None
        return lines

    def analyse(self, fen: str, depth: int) -> list[tuple[str, float]]:
        """Moves and their evals in pawns for the side to move, the best first."""
        found: dict[int, tuple[str, float]] = {}
        for line in self.ask(f"ucinewgame\nposition fen {fen}\ngo depth {depth}", "bestmove"):
            if parts := re.search(r" multipv (\d+) .*?score (cp|mate) (-?\d+) .*?pv (\S+)", line):
                pawns = int(parts[3]) / 100 if parts[2] == "cp" else math.copysign(MATE_EVAL, int(parts[3]))
                found[int(parts[1])] = parts[4], max(-MATE_EVAL, min(MATE_EVAL, pawns))  # deeper lines come later
        return [found[i] for i in sorted(found)]

    def choose(self, boards: Sequence[chess.Board]) -> list[chess.Move | None]:
        """Its move in each position, at depth 1."""
        said = [self.ask(f"position fen {board.fen()}\ngo depth 1", "bestmove")[-1] for board in boards]
        return [chess.Move.from_uci(line.split()[1]) for line in said]

    def close(self) -> None:
        """End the program."""
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()


# ---------------------------------------------------------------------------------------------------------------------
# Data

BLUNDERS, ILLEGAL_SHARE = 0.1, 0.03  # shares of random moves in games, and of illegal proposals
SHARPNESS = 2.0  # a move that is a pawn worse is chosen e^2 times less often
LONGEST = 80  # moves of a game


def analysed(engine: Engine, fen: str, depth: int, rng: random.Random) -> tuple[str, list[tuple[str, float]]]:
    """The P line of a position, in shuffled order, and the engine's moves and evals in its own.

    The engine's first move is the best one for the side to move, White or Black.
    """
    lines = engine.analyse(fen, depth)
    shuffled = rng.sample(lines, len(lines))
    return policy_line(fen, [move for move, _ in shuffled], [value for _, value in shuffled], lines[0][0]), lines


def positions(rng: random.Random) -> Iterator[str]:
    """FENs from self-play, few per game so that they differ."""
    for line in self_play(rng):
        if rng.random() < 0.1:
            yield line.removeprefix("A: ").partition("+")[0]


def analysed_lines(program: str, config: DataConfig) -> Iterator[str]:
    """P lines of self-play, one per position."""
    rng = random.Random(f"positions {config.seed}")
    with contextlib.closing(Engine(program, Hash=1, MultiPV=config.multipv)) as engine:
        for fen in islice(positions(rng), config.p_lines):
            yield analysed(engine, fen, config.depth, rng)[0]


def game_lines(program: str, config: DataConfig) -> Iterator[str]:
    """P and A lines of games in which both sides play one of the engine's moves, the better the oftener."""
    rng = random.Random(f"engine games {config.seed}")
    with contextlib.closing(Engine(program, Hash=1, MultiPV=config.multipv)) as engine:
        while True:
            board, history = chess.Board(), list[str]()
            while not board.is_game_over() and board.fullmove_number < LONGEST:
                line, lines = analysed(engine, board.fen(), config.depth, rng)
                yield line
                if rng.random() < ILLEGAL_SHARE:
                    yield environment_line(board, illegal_move(board, rng), history)
                weights = [math.exp(SHARPNESS * (value - lines[0][1])) for _, value in lines]
                move = chess.Move.from_uci(rng.choices([move for move, _ in lines], weights)[0])
                if rng.random() < BLUNDERS:
                    move = rng.choice([*board.legal_moves])
                yield environment_line(board, move, history)
                history.append(move.uci())


def write_lines(path: Path, lines: Iterable[str]) -> int:
    """Write a text file atomically.  Returns the number of lines."""
    made = list(lines)
    write(path, "".join(f"{line}\n" for line in made))
    return len(made)


def write_data(config: DataConfig) -> dict[str, Any]:
    """The data command."""
    program, began = find_stockfish(config.stockfish), time.perf_counter()
    if config.game_lines and not program:
        raise UsageError("--game-lines needs stockfish: install it, or name it with --stockfish")
    kinds: dict[str, tuple[Iterable[str], int, str]] = {
        "a.txt": (self_play(random.Random(f"games {config.seed}")), config.a_lines, "self-play"),
        "p.txt": (SHIPPED.read_text().splitlines(), config.p_lines, "the shipped lines: no stockfish is installed"),
    }
    if program:
        by = f"{program}, depth {config.depth}"
        kinds["p.txt"] = analysed_lines(program, config), config.p_lines, f"positions of self-play, analysed by {by}"
        kinds["games.txt"] = game_lines(program, config), config.game_lines, f"games of {by}"
    for name, (lines, count, source) in kinds.items():
        if count:
            written = write_lines(config.out / name, islice(lines, count))
            print(f"{config.out / name}: {written} lines, {source}; {time.perf_counter() - began:.0f} s")
    return {}


# ---------------------------------------------------------------------------------------------------------------------
# Games

PLIES = 300  # a longer game is a draw
NO_MOVE = "no legal move named"
OPENING_PLIES = 4  # random moves before a game, the same for both colours, so that games differ


def answered_move(board: chess.Board, answer: str) -> chess.Move | None:
    """The best move of a P answer, or the first of its list that is legal; None if none is."""
    listed, _, best = answer.partition(" B:")
    legal = {move.uci(): move for move in board.legal_moves}
    return next((legal[move] for move in re.findall(MOVE, best) + re.findall(MOVE, listed) if move in legal), None)


def opening(rng: random.Random) -> chess.Board:
    """A position after some random moves."""
    board = chess.Board()
    for _ in range(OPENING_PLIES):
        board.push(rng.choice([*board.legal_moves]))
    return board


@dataclass
class Match:
    """A game of the model against an opponent."""

    board: chess.Board
    colour: chess.Color  # the model's

    def end(self) -> tuple[str, str] | None:
        """The result and its reason; None if the game goes on."""
        if outcome := self.board.outcome(claim_draw=True):
            return outcome.result(), outcome.termination.name.lower().replace("_", " ")
        return ("1/2-1/2", "too long") if self.board.ply() >= PLIES else None

    def result(self) -> tuple[str, str]:
        """The same of a game that has ended: who had a move to play and named none has lost."""
        return self.end() or ("0-1" if self.board.turn == chess.WHITE else "1-0", NO_MOVE)


def play_matches(model: Choose, opponent: Choose, count: int, rng: random.Random) -> list[Match]:
    """Finished games, played side by side: each opening with both colours."""
    openings = [opening(rng) for _ in range((count + 1) // 2)]
    matches = [Match(board.copy(), colour) for board in openings for colour in chess.COLORS][:count]
    going = matches
    while going:
        sides = [(choose, [match for match in going if (match.board.turn == match.colour) == ours])
                 for choose, ours in ((model, True), (opponent, False))]  # fmt: skip
        going = []
        for choose, turn in sides:
            moves = choose([match.board for match in turn]) if turn else []
            for match, move in zip(turn, moves, strict=True):
                if move is not None:
                    match.board.push(move)
                    going += [] if match.end() else [match]
    return matches


def pgn(match: Match, opponent: str) -> str:
    """A game in PGN."""
    game, names = chess.pgn.Game.from_board(match.board), ("mini", opponent)
    result, why = match.result()
    white, black = names if match.colour == chess.WHITE else names[::-1]
    game.headers.update({"Event": "python -m mini play", "White": white, "Black": black, "Result": result,
                         "Termination": why})  # fmt: skip
    return f"{game}\n\n"


def scores(matches: Sequence[Match]) -> dict[str, float]:
    """Shares of games that the model won, drew and lost, and of those lost because it named no legal move."""
    ends = [(match.result(), "1-0" if match.colour == chess.WHITE else "0-1") for match in matches]
    counts = Counter(
        "drawn" if result == "1/2-1/2" else "won" if result == win else "lost" for (result, _), win in ends
    )
    unnamed = sum(why == NO_MOVE for (_, why), _ in ends)
    shares = {"won": counts["won"], "drawn": counts["drawn"], "lost": counts["lost"], "no move": unnamed}
    return {name: number / len(matches) for name, number in shares.items()}


def play_command(config: PlayConfig) -> dict[str, Any]:
    """Play, write the games, print a table."""
    began, program = time.perf_counter(), find_stockfish(config.stockfish)
    model, task, sampling = prepare(config)
    rng, generator = random.Random(config.seed), torch.Generator(model.device).manual_seed(config.seed)

    def answer(boards: Sequence[chess.Board]) -> list[chess.Move | None]:
        prompts = [task.prompt_ids(Example("P", f"P: {board.fen()}", "")) for board in boards]
        rows, _ = generate(model, prompts, 1, sampling, task.end, generator)
        return [answered_move(board, task.tokens.decode(row))
                for board, (row,) in zip(boards, rows.answers(task.end), strict=True)]  # fmt: skip

    with contextlib.ExitStack() as stack:
        opponents: dict[str, Choose] = {"random moves": lambda boards: [rng.choice([*b.legal_moves]) for b in boards]}
        if program:
            engine = stack.enter_context(contextlib.closing(Engine(program, Hash=1, Skill_Level=0)))
            opponents["stockfish, level 0"] = engine.choose
        played = {name: play_matches(answer, opponent, config.games, rng) for name, opponent in opponents.items()}
    reports = {name: scores(matches) for name, matches in played.items()}
    write(config.out, "".join(pgn(match, name) for name, matches in played.items() for match in matches))
    say(table(f"{config.games} games each", ("won", "drawn", "lost", "no move"), reports))
    say(f"{config.out}: the games" + ("" if program else "; no stockfish is installed"))
    return {**reports, "seconds": time.perf_counter() - began}
