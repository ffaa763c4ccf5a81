"""Lines of chess data against the rules, and against a small engine that says what it is told to."""

from __future__ import annotations

import random
import re
import stat
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import chess
import pytest

from mini.chess_data import (
    Example,
    analysed_lines,
    environment_line,
    find_stockfish,
    illegal_move,
    mirrored,
    ordered,
    parse_line,
    policy_line,
    read_corpus,
    self_play,
    shipped_lines,
    write_data,
)
from mini.chess_reward import judge, parse_policy
from mini.config import DataConfig
from toolkit import UsageError

START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
P_LINE = f"P: {START}{' ' * 34}M: e2e4 c2c4 d2d4 a2a3 g1f3      E: 0.42 0.21 0.18 0.09 0.24                B: e2e4"


@pytest.fixture(scope="module")
def played() -> list[str]:
    """Lines of self-play."""
    return [*islice(self_play(random.Random(0)), 3000)]


def moved(fen: str, uci: str, history: str = "") -> str:
    """The answer of the A line of a move."""
    example = parse_line(environment_line(chess.Board(fen), chess.Move.from_uci(uci), history.split()))
    assert example is not None
    return example.answer


def test_environment_line_in_full() -> None:
    fen = "8/2k2b2/R1p4r/3p1p2/P7/2P2B1P/5PPK/4R3 w - - 1 31"
    history = "a1a2 f7e7 h5f3 e6f7 b1b6 h8h6 a1e1 e7d8 b6a6 d8c7"  # the oldest falls out
    line = environment_line(chess.Board(fen), chess.Move.from_uci("a6a5"), history.split())
    assert line == (f"A: {fen}+a6a5+f7e7 h5f3 e6f7 b1b6 h8h6 a1e1 e7d8 b6a6 d8c7 a6a5+"
                    "8/2k2b2/2p4r/R2p1p2/P7/2P2B1P/5PPK/4R3 b - - 2 31+0.001+0+0")  # fmt: skip


@pytest.mark.parametrize(("fen", "uci", "expected"), [
    ("7k/5Q2/6K1/8/8/8/8/8 w - - 0 1", "f7g7", "7k/6Q1/6K1/8/8/8/8/8 b - - 1 1+1.0+1+0"),  # mate
    ("7k/8/5QK1/8/8/8/8/8 w - - 0 1", "f6f7", "7k/5Q2/6K1/8/8/8/8/8 b - - 1 1+0.5+1+0"),  # stalemate
    ("7k/8/8/8/8/8/6p1/K5R1 w - - 0 1", "g1g2", "7k/8/8/8/8/8/6R1/K7 b - - 0 1+0.001+0+0"),
    ("7k/8/8/8/8/8/6n1/K5B1 b - - 0 1", "g2e1", "7k/8/8/8/8/8/8/K3n1B1 w - - 1 2+0.001+0+0"),
    ("8/8/8/8/8/k7/7r/K7 b - - 149 90", "h2h1", "8/8/8/8/8/k7/8/K6r w - - 150 91+1.0+1+0"),  # mate goes first
    ("8/8/8/8/8/k7/7r/K7 b - - 149 90", "h2g2", "8/8/8/8/8/k7/6r1/K7 w - - 150 91+0.5+1+0"),  # 75 moves each
    (START, "e2e5", f"{START}+-1.0+0+1"),
    ("4k3/8/8/8/8/8/4p3/4K2r w - - 0 1", "e1f1", "4k3/8/8/8/8/8/4p3/4K2r w - - 0 1+-1.0+0+1"),  # still in check
    (START, "e2e4", "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1+0.001+0+0"),  # nobody can capture
    ("4k3/8/8/8/3p4/8/4P3/4K3 w - - 0 1", "e2e4", "4k3/8/8/8/3pP3/8/8/4K3 b - e3 0 1+0.001+0+0"),
    ("8/P6k/8/8/8/8/8/K7 w - - 0 1", "a7a8q", "Q7/7k/8/8/8/8/8/K7 b - - 0 1+0.001+0+0"),
    ("r3k2r/8/8/8/8/8/8/4K3 b kq - 0 1", "e8c8", "2kr3r/8/8/8/8/8/8/4K3 w - - 1 2+0.001+0+0"),
])  # fmt: skip
def test_what_a_move_does(fen: str, uci: str, expected: str) -> None:
    assert moved(fen, uci) == expected


def test_repetition_ends_a_game() -> None:
    """Five times the same position, by knights that go out and home."""
    board, history = chess.Board(), list[str]()
    for uci in ["g1f3", "g8f6", "f3g1", "f6g8"] * 4:
        line = environment_line(board, chess.Move.from_uci(uci), history)
        history.append(uci)
    assert line.endswith("+0.5+1+0")


def test_self_play_shows_all_that_there_is_to_learn(played: list[str]) -> None:
    """Every line is true by the rules, and rare events are frequent enough."""
    seen = Counter[str]()
    for line in played:
        example = parse_line(line)
        assert example is not None
        fen, uci, history, _ = example.prompt[3:].split("+")
        board, move = chess.Board(fen), chess.Move.from_uci(uci)
        assert history.split()[-1] == uci
        assert len(history.split()) <= 10
        legal = move in board.legal_moves
        seen["illegal"] += not legal
        if legal:
            seen["castling"] += board.is_castling(move)
            seen["en passant"] += board.is_en_passant(move)
            seen["promotion"] += move.promotion is not None
            board.push(move)
        new_fen, reward, terminated, truncated = example.answer.split("+")
        assert new_fen == board.fen()
        assert truncated == str(int(not legal))
        assert (reward == "-1.0") == (not legal)
        assert (terminated == "1") == (reward in ("1.0", "0.5"))
        seen[reward] += 1
        assert (reward == "1.0") <= board.is_checkmate()
    assert 0.02 < seen["illegal"] / len(played) < 0.04
    assert min(seen[name] for name in ("castling", "en passant", "promotion", "1.0", "0.5")) >= 3


def test_the_same_seed_plays_the_same_games(played: list[str]) -> None:
    again, other = ([*islice(self_play(random.Random(seed)), 200)] for seed in (0, 1))
    assert again == played[:200] != other


def test_illegal_moves_are_of_the_movers_own_pieces() -> None:
    board, rng = chess.Board(), random.Random(0)
    for _ in range(200):
        move = illegal_move(board, rng)
        assert board.color_at(move.from_square) == chess.WHITE
        assert move not in board.legal_moves


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def test_policy_line_in_full() -> None:
    moves, evals = ["e2e4", "c2c4", "d2d4", "a2a3", "g1f3"], [0.42, 0.21, 0.18, 0.09, 0.24]
    assert policy_line(START, moves, evals, "e2e4") == P_LINE
    answer = P_LINE[93:]
    assert parse_line(P_LINE) == Example("P", f"P: {START}", answer)
    assert answer.startswith("M: e2e4")


def test_lines_with_and_without_their_prefix(played: list[str]) -> None:
    line = played[7]
    assert parse_line(f"<|endoftext|>{line}\n") == parse_line(line.removeprefix("A: ")) == parse_line(line)
    assert [parse_line(text) for text in ("", "P: 8/8 w", "a+b", line + "+0")] == [None] * 4


def test_reading_a_corpus(played: list[str], tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join([played[0], "", "nonsense", P_LINE, played[1]]))
    assert [example.task for example in read_corpus(path, 100)] == ["A", "P", "A"]
    assert len(read_corpus(path, 3)) == 1
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is no text in UTF-8"):
        read_corpus(path, 100)
    with pytest.raises(UsageError, match="No such file"):
        read_corpus(tmp_path / "none", 100)


def test_shipped_lines_are_sound() -> None:
    """Every move is legal, and the best move's eval is the highest."""
    lines = shipped_lines()
    assert 500 <= len(lines) <= 2000
    assert len(set(lines)) == len(lines)
    for line in lines:
        example = parse_line(line)
        assert example is not None
        board = chess.Board(example.prompt[3:])
        parsed = parse_policy(example.answer)
        assert parsed is not None
        evals, best = parsed
        assert all(chess.Move.from_uci(move) in board.legal_moves for move in evals)
        assert len(evals) == min(5, board.legal_moves.count())
        assert evals[best] == max(evals.values())


def test_mirrored_lines_hold_for_the_other_colour() -> None:
    for line in shipped_lines()[:50]:
        example = parse_line(line)
        assert example is not None
        other = mirrored(example)
        board, before = chess.Board(other.prompt[3:]), chess.Board(example.prompt[3:])
        assert board.turn != before.turn
        assert board == before.mirror()
        parsed, was = parse_policy(other.answer), parse_policy(example.answer)
        assert parsed is not None
        assert was is not None
        assert list(parsed[0].values()) == list(was[0].values())
        assert all(chess.Move.from_uci(move) in board.legal_moves for move in parsed[0])
        assert mirrored(other).answer == example.answer


def test_ordered_lines_say_the_same() -> None:
    for line in shipped_lines()[:50]:
        example = parse_line(line)
        assert example is not None
        moves = ordered(example).answer.split()[1:6]
        assert moves == sorted(moves)
        assert judge("P", ordered(example).answer, example.answer).exact


# ---------------------------------------------------------------------------------------------------------------------
# Engines

ENGINE = '''#!{python}
"""Speaks just enough UCI.  The moves are the first legal ones; their evals begin at 0.50 and fall, then it is mated."""
import sys
import chess

count = 1
for line in sys.stdin:
    words = line.split()
    if words[0] == "uci":
        names = ("MultiPV", "Threads", "Hash")
        print(*(f"option name {{name}} type spin default 1 min 1 max 500" for name in names), "uciok", sep="\\n")
    elif words[0] == "isready":
        print("readyok")
    elif words[:3] == ["setoption", "name", "MultiPV"]:
        count = int(words[-1])
    elif words[0] == "position":
        board = chess.Board() if words[1] == "startpos" else chess.Board(" ".join(words[2:8]))
    elif words[0] == "go":
        moves = sorted(map(str, board.legal_moves))[:count]
        for n, move in enumerate(moves):
            score = "mate -3" if n == 3 else f"cp {{50 - 35 * n}}"
            print(f"info depth {{words[2]}} multipv {{n + 1}} score {{score}} pv {{move}}")
        print(f"bestmove {{moves[0]}}")
    elif words[0] == "quit":
        break
    sys.stdout.flush()
'''


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "engine"
    path.write_text(ENGINE.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_best_move_is_the_engines_first_for_black_too(engine: Path) -> None:
    """The original took the highest score for White and so Black's worst move."""
    lines = [*analysed_lines(str(engine), DataConfig(p_lines=30, multipv=4))]
    turns = Counter[str]()
    for line in lines:
        example = parse_line(line)
        assert example is not None
        board = chess.Board(example.prompt[3:])
        turns["wb"[not board.turn]] += 1
        parsed = parse_policy(example.answer)
        assert parsed is not None
        expected = sorted(map(str, board.legal_moves))[:4]
        assert parsed == (dict(zip(expected, [0.5, 0.15, -0.2, -99.99][: len(expected)], strict=True)), expected[0])
        assert re.fullmatch(r"P: .{90}M: .{30}E: .{40}B: \S+", line)
    assert min(turns["w"], turns["b"]) > 5


def test_data_command_writes_the_same_for_the_same_seed(engine: Path, tmp_path: Path) -> None:
    contents = []
    for seed, name in ((3, "a"), (3, "b"), (4, "c")):
        write_data(DataConfig(out=tmp_path / name, a_lines=100, p_lines=10, stockfish=engine, seed=seed))
        contents.append([(tmp_path / name / file).read_text() for file in ("a.txt", "p.txt")])
    assert contents[0] == contents[1] != contents[2]
    assert [text.count("\n") for text in contents[0]] == [100, 10]


def test_data_command_without_stockfish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mini.chess_data.find_stockfish", lambda path: None)
    write_data(DataConfig(out=tmp_path, a_lines=10, p_lines=7))
    assert (tmp_path / "p.txt").read_text().splitlines() == shipped_lines()[:7]
    assert "no stockfish is installed" in capsys.readouterr().out


def test_programs_that_are_no_engine(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no file"):
        find_stockfish(tmp_path / "none")
    with pytest.raises(UsageError, match="does not work as a chess engine"):
        next(analysed_lines("/bin/true", DataConfig()))


@pytest.mark.skipif(find_stockfish(None) is None, reason="no stockfish is installed")
def test_stockfish_says_the_same_again() -> None:
    """With a fresh hash for each position, on one thread."""
    program = find_stockfish(None)
    assert program is not None
    config = DataConfig(p_lines=5)
    assert [*analysed_lines(program, config)] == [*analysed_lines(program, config)]
