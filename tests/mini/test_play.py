"""Games: which move of an answer is played, how games end, and the command as its user runs it."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from pathlib import Path

import chess
import chess.pgn
import pytest

from mini.pretrain import NO_MOVE, Match, answered_move, opening, pgn, play_matches, scores
from tests.mini.helpers import fake_engine, run_mini, untrained

FOOLS_MATE = ("f2f3", "e7e5", "g2g4", "d8h4")


@pytest.mark.parametrize(("answer", "move"), [
    ("M: e2e4 d2d4 E: 0.10 0.20 B: d2d4", "d2d4"),  # the best one
    ("M: e2e5 d2d4 E: 0.10 0.20 B: e2e5", "d2d4"),  # it is illegal: the first of the list that is not
    ("M: e2e4 d2", "e2e4"),  # an answer that breaks off
    ("M: e2e5 e2e5 E: 0.10 0.20 B: e7e5", None), ("", None), ("M: e2e2 a2a4q", None),
])  # fmt: skip
def test_the_best_move_is_played_or_the_first_legal_one(answer: str, move: str | None) -> None:
    assert answered_move(chess.Board(), answer) == (chess.Move.from_uci(move) if move else None)


def first(boards: Sequence[chess.Board]) -> list[chess.Move | None]:
    return [min(board.legal_moves, key=str) for board in boards]


def none(boards: Sequence[chess.Board]) -> list[chess.Move | None]:
    return [None for _ in boards]


def test_each_opening_is_played_with_both_colours_and_to_an_end() -> None:
    matches = play_matches(first, first, 6, random.Random(1))
    assert [match.colour for match in matches] == [chess.WHITE, chess.BLACK] * 3
    for white, black in zip(matches[::2], matches[1::2], strict=True):
        assert white.board.move_stack == black.board.move_stack  # both sides play alike here
        assert white.why not in ("", NO_MOVE)
    assert scores(matches)["no move"] == 0


def test_who_names_no_legal_move_has_lost() -> None:
    matches = play_matches(none, first, 4, random.Random(1))
    assert {(match.result, match.why) for match in matches} == {("0-1", NO_MOVE), ("1-0", NO_MOVE)}
    assert scores(matches) == {"won": 0, "drawn": 0, "lost": 1, "no move": 1}
    assert scores(play_matches(first, none, 4, random.Random(1))) == {"won": 1, "drawn": 0, "lost": 0, "no move": 1}


def test_no_game_begins_with_a_mate() -> None:
    """Seed 1160's first four random moves are the fool's mate: there was no move to choose from."""
    rng = random.Random(1160)
    assert all(any(opening(rng).legal_moves) for _ in range(25))


def test_a_place_that_cannot_be_written_costs_no_games(tmp_path: Path) -> None:
    """All of them were played first, and lost."""
    done = run_mini("play", "--init", untrained(tmp_path), "--games", 2, "--out", tmp_path, "--max-new-tokens", 4)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {tmp_path}: Is a directory\n"


def test_a_game_in_pgn() -> None:
    board = chess.Board()
    *moves, last = map(chess.Move.from_uci, FOOLS_MATE)
    for move in moves:
        board.push(move)
    match = Match(board, chess.BLACK)
    match.push(last)
    game = chess.pgn.read_game(io.StringIO(pgn(match, "random moves")))
    assert game is not None
    assert game.end().board() == board
    assert [game.headers[name] for name in ("White", "Black", "Result", "Termination")] == [
        "random moves", "mini", "0-1", "checkmate"]  # fmt: skip
    assert scores([match]) == {"won": 1, "drawn": 0, "lost": 0, "no move": 0}


def test_play_writes_games_and_a_table(tmp_path: Path) -> None:
    """A model that knows nothing loses each game with its first move."""
    done = run_mini("play", "--init", untrained(tmp_path), "--games", 2, "--stockfish", fake_engine(tmp_path), "--out",
                    tmp_path / "games.pgn", "--max-new-tokens", 4, "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    for name in ("random moves", "stockfish, level 0"):
        assert told[name] == {"won": 0, "drawn": 0, "lost": 1, "no move": 1}
        assert name in done.stderr
    assert (tmp_path / "games.pgn").read_text().count("[Event ") == 4
