"""Chess as text: lines against the rules and a small engine that says what it is told to; the judge; the corpus.

Rewards are worked out by hand, and some of the answers once were worth more than they should be.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import chess
import pytest

from mini.chess_lines import (
    SHIPPED,
    Example,
    Kind,
    best_first,
    environment_line,
    illegal_move,
    judge,
    levenshtein,
    mirrored,
    parse_line,
    parse_policy,
    policy_line,
    read_corpus,
    read_example,
    self_play,
    shaped,
    shipped_examples,
    similarity,
)
from mini.config import DataConfig, Shaping
from mini.pretrain import analysed_lines, data_command, find_stockfish, game_lines
from mini.runs import LineTokens
from tests.mini.helpers import fake_engine
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
    path, tokens = tmp_path / "corpus.txt", LineTokens()
    path.write_text("\n".join([played[0], "", "nonsense", P_LINE, played[1]]))
    assert [example.kind for example in read_corpus(path, tokens)] == ["A", "P", "A"]
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is no text in UTF-8"):
        read_corpus(path, tokens)
    with pytest.raises(UsageError, match="No such file"):
        read_corpus(tmp_path / "none", tokens)


@pytest.mark.parametrize(("line", "reason"), [
    (P_LINE.replace("a2a3", "a2a5"), "an illegal move"),
    (P_LINE.replace("KQkq", "K").replace("RNBQKBNR", "RNBQ1BNR").replace("e2e4", "e2e3"), "not one king each"),
    (P_LINE.replace("8/8", "9/8"), "..."),
    ("garbage", "neither a P nor an A line"), (P_LINE.replace("B: e2e4", "B: h2h4"), "no answer of a P line: ..."),
    (f"A: {START}+e2e5+e2e5+{START}+0.001+0+0", "an illegal move"),
    (f"A: {START}+e2e4+e2e4+x+0.001+0", "neither a P nor an A line"),
    pytest.param(f"A: {START}+e2e4+e2e4+8/8/8/8/8/8/8/8 b - - 0 1+0.001+0+0", "not one king each"),
])  # fmt: skip
def test_every_line_that_is_left_out_is_named_with_its_reason(
    line: str, reason: str, played: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join([played[0], line, P_LINE, line]))
    assert len(read_corpus(path, LineTokens())) == 2
    said = capsys.readouterr().out
    assert said.startswith(f"{path}: 2 left out, ")
    assert reason in said
    assert said.endswith(": line 2, 4\n")


def test_a_line_longer_than_the_model_is_left_out(played: list[str]) -> None:
    """It ended training, hours later: an IndexError, or a prompt that left no room for its answer."""
    history = " ".join(["e2e4"] * 100)
    line = f"A: {START}+e2e4+{history}+{parse_line(played[0]).answer}"  # type: ignore[union-attr]
    assert read_example(line, LineTokens()).kind == "A"
    with pytest.raises(ValueError, match="too long for the model"):
        read_example(line, LineTokens(), 256)
    for each in (P_LINE, *played[:300]):
        read_example(each, LineTokens(), 256)


def test_a_line_may_show_that_a_move_is_illegal(played: list[str], tmp_path: Path) -> None:
    flagged = [line for line in played if line.endswith("+-1.0+0+1")]
    (tmp_path / "corpus.txt").write_text("\n".join(flagged))
    assert len(read_corpus(tmp_path / "corpus.txt", LineTokens())) == len(flagged) > 50


def test_shipped_lines_are_sound() -> None:
    """Every move is legal, and the best move's eval is the highest."""
    examples = shipped_examples()
    assert 500 <= len(examples) <= 2000
    assert len(set(SHIPPED.read_text().splitlines())) == len(examples)
    for example in examples:
        board = chess.Board(example.fen)
        parsed = parse_policy(example.answer)
        assert parsed is not None
        evals, best = parsed
        assert all(chess.Move.from_uci(move) in board.legal_moves for move in evals)
        assert len(evals) == min(5, board.legal_moves.count())
        assert evals[best] == max(evals.values())


def test_mirrored_lines_hold_for_the_other_colour() -> None:
    for example in shipped_examples()[:50]:
        other = mirrored(example)
        board, before = chess.Board(other.fen), chess.Board(example.fen)
        assert board.turn != before.turn
        assert board == before.mirror()
        parsed, was = parse_policy(other.answer), parse_policy(example.answer)
        assert parsed is not None
        assert was is not None
        assert list(parsed[0].values()) == list(was[0].values())
        assert all(chess.Move.from_uci(move) in board.legal_moves for move in parsed[0])
        assert mirrored(other).answer == example.answer


def test_the_best_move_first_is_the_same_choice() -> None:
    """In another order, with evals that may be rounded to the pawn."""
    for example in shipped_examples()[:50]:
        (evals, best), (was, right) = (parse_policy(part.answer) or ({}, "") for part in (best_first(example), example))
        assert best == right == next(iter(evals))
        assert list(evals.values()) == sorted(evals.values(), reverse=True)
        assert evals == pytest.approx(was, abs=1)


# ---------------------------------------------------------------------------------------------------------------------
# Engines


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return fake_engine(tmp_path)


def test_the_best_move_is_the_engines_first_for_black_too(engine: Path) -> None:
    """The original took the highest score for White and so Black's worst move."""
    lines = [*islice(analysed_lines(str(engine), DataConfig(multipv=4, p_moves=150)), 30)]
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


def test_positions_are_of_the_first_moves(engine: Path) -> None:
    """Later ones of self-play have few pieces, and most of their moves are the king's."""
    lines = [*islice(analysed_lines(str(engine), DataConfig(p_moves=9)), 9)]
    made, shipped = [parse_line(line) for line in lines], shipped_examples()
    numbers, usual = ([chess.Board(example.fen).fullmove_number for example in examples if example]
                      for examples in (made, shipped))  # fmt: skip
    assert 1 < max(numbers) <= 9
    assert max(usual) == DataConfig().p_moves


def test_data_command_writes_the_same_for_the_same_seed(engine: Path, tmp_path: Path) -> None:
    contents = []
    for seed, name in ((3, "a"), (3, "b"), (4, "c")):
        data_command(DataConfig(out=tmp_path / name, a_lines=100, p_lines=5, stockfish=engine, seed=seed))
        contents.append([(tmp_path / name / file).read_text() for file in ("a.txt", "p.txt")])
    assert contents[0] == contents[1] != contents[2]
    assert [text.count("\n") for text in contents[0]] == [100, 5]


def test_games_of_an_engine_are_lines_of_both_tasks(engine: Path) -> None:
    """Each position is analysed before its move is played; histories are those of the game."""
    lines = [*islice(game_lines(str(engine), DataConfig(multipv=4)), 300)]
    assert lines == [*islice(game_lines(str(engine), DataConfig(multipv=4)), 300)]
    examples = [example for line in lines if (example := parse_line(line))]
    assert Counter(example.kind for example in examples)["P"] > 100
    for before, after in pairwise(examples):
        if before.kind == "P":
            assert after.fen == before.fen
    assert any(example.answer.endswith("+1") for example in examples)  # an illegal proposal


def test_data_command_without_stockfish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mini.pretrain.find_stockfish", lambda path: None)
    data_command(DataConfig(out=tmp_path, a_lines=10, p_lines=7))
    assert (tmp_path / "p.txt").read_text().splitlines() == SHIPPED.read_text().splitlines()[:7]
    assert "no stockfish is installed" in capsys.readouterr().out
    with pytest.raises(UsageError, match="--game-lines needs stockfish"):
        data_command(DataConfig(out=tmp_path, game_lines=1))


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
    first, again = ([*islice(analysed_lines(program, DataConfig(p_moves=150)), 5)] for _ in range(2))
    assert first == again


# ---------------------------------------------------------------------------------------------------------------------
# The judge

P = "M: e2e4 c2c4 d2d4 a2a3 g1f3 E: 0.42 0.21 0.18 0.09 0.24 B: e2e4"
A = "8/2k2b2/2p4r/R2p1p2/P7/2P2B1P/5PPK/4R3 b - - 2 31+0.001+0+0"
FEN = A.split("+")[0]
BEFORE = "8/2k2b2/R1p4r/3p1p2/P7/2P2B1P/5PPK/4R3 w - - 1 31"  # the position of A's prompt


def test_right_answers() -> None:
    right: tuple[tuple[Kind, str, str], ...] = (("P", P, START), ("A", A, BEFORE))
    for kind, truth, fen in right:
        assert judge(kind, truth, truth, fen).exact
        verdict = judge(kind, truth, truth)
        assert verdict.exact
        assert verdict.raw == 1
        assert [shaped(verdict, shaping) for shaping in ("capped", "graduated", "linear", "binary")] == [1] * 4


@pytest.mark.parametrize(("answer", "raw", "reward"), [
    # weights 2 format, 4 best, 1.5 candidates, 1 evals, of 8.5
    ("M: c2c4 e2e4 E: 0.21 0.42 B: c2c4", (2 + 1.5 * 2 / 5 + 2 / 5) / 8.5, 0.2),  # 0.353
    ("M: c2c4 e2e4 E: 0.21 0.42 B: e2e4", (2 + 4 + 1.5 * 2 / 5 + 2 / 5) / 8.5, 0.8),  # 0.824
    ("M: e2e4 E: 0.42 B: e2e4", (2 + 4 + 1.5 / 5 + 1 / 5) / 8.5, 0.6),  # 0.765
    ("M: e2e4 E: 1.13 B: e2e4", (2 + 4 + 1.5 / 5 + (1 - 0.71 / 1.42) / 5) / 8.5, 0.6),  # eval off by half
    ("M: h2h3 E: 0.00 B: h2h3", 2 / 8.5, 0.2),
    ("M: e2e4 c2c4 d2d4 a2a3 g1f3 E: 9 9 9 9 9 B: a2a3", (2 + 1.5) / 8.5, 0.4),  # 0.412
    ("M: e2e4 c2c4 d2d4 a2a3 g1f3 E: 9 9 9 9 9 B: e2e4", (2 + 4 + 1.5) / 8.5, 0.8),  # 0.882
    ("M: e2e4 c2c4 d2d4 a2a3 h2h4 E: 0.42 0.21 0.18 0.09 0.24 B: e2e4", (2 + 4 + 1.5 * 4 / 5 + 4 / 5) / 8.5, 0.8),
])  # fmt: skip
def test_policy_ladder(answer: str, raw: float, reward: float) -> None:
    verdict = judge("P", answer, P)
    assert verdict.raw == pytest.approx(raw)
    assert shaped(verdict) == reward
    assert shaped(verdict, "linear") == pytest.approx(-0.3 + 1.3 * raw)
    assert shaped(verdict, "binary") == 0


def test_evals_may_be_a_little_off() -> None:
    """All candidates and the best move right, evals 0.96: exact; 0.90: not."""
    close = P.replace("0.42", "0.60")  # 1 - 0.18 / 1.42 = 0.873, and four 1s: 0.975
    assert shaped(judge("P", close, P)) == 1
    far = P.replace("0.42", "1.42")  # 1 - 1 / 1.42 = 0.296: 0.859 in all, raw 0.983
    assert judge("P", far, P).raw > 0.95
    assert shaped(judge("P", far, P)) == 0.8


@pytest.mark.parametrize(("answer", "raw", "reward"), [
    # weights 4 format, 3 FEN, 2 flags, 1 reward, of 10
    (f"{FEN}+0.5+0+0", 0.9, 0.8),
    (f"{FEN}+0.005+0+0", 1.0, 1.0),  # within 0.01
    (f"{FEN}+0.001+1+0", 0.8, 0.8),
    (f"{FEN}+-1.0+0+1", 0.7, 0.6),
    (f"x{FEN[1:]}+0.001+0+0", (4 + 3 * (1 - 1 / len(FEN)) + 3) / 10, 0.8),  # one square wrong: never 1.0
    ("?+1.0+1+1", 0.4, 0.4),
])  # fmt: skip
def test_environment_ladder(answer: str, raw: float, reward: float) -> None:
    verdict = judge("A", answer, A)
    assert verdict.raw == pytest.approx(raw)
    assert shaped(verdict) == reward


@pytest.mark.parametrize("answer", [
    "", "M: E: B:", "M: e2e4 e2e4 e2e4 e2e4 e2e4 E: 0.42 0.42 0.42 0.42 0.42 B: e2e4",  # once the best of all
    f"{P} ", f" {P}", P.replace(" E:", "  E:"),  # blanks are no matter: see the next test
    f"{P} x", f"x {P}", P.replace("B: e2e4", "B: h2h4"), P.replace(" 0.24", ""), P.replace("E: ", "E: 0.1 "),
    P.replace("e2e4 c2c4", "e2e4 e2e4"), P.replace("0.42", "+0.42"), P.replace("0.42", "nan"), P.replace("e2", "E2"),
    "E: 0.42 M: e2e4 B: e2e4", "M: e2e4 E: 0.42", "M: e2e4\nE: 0.42 B: e2e4", "M: e2e2 E: 0.42 B: e2e2",
    "M: e2e4 c2c4 d2d4 a2a3 g1f3 b2b3 E: 1 1 1 1 1 1 B: e2e4",
])  # fmt: skip
def test_policy_grammar(answer: str) -> None:
    blanks_only = " ".join(answer.split()) == P
    assert judge("P", answer, P).valid == blanks_only
    assert shaped(judge("P", answer, P)) == (1 if blanks_only else -0.3)
    assert shaped(judge("P", answer, P), "linear") == pytest.approx(1 if blanks_only else -0.3)


@pytest.mark.parametrize("answer", [
    "", FEN, f"{FEN}+0.001+0", f"{A}+0", f"{A}+", f"+{A}", f"{FEN}+x+0+0", f"{FEN}+0.001+2+0", f"{FEN}+0.001+0+00",
    f"{FEN}+0.001+0+", f"{FEN}+ 0.001+0+0", f"{FEN}+1e3+0+0", f"{FEN}+inf+0+0", "+0.001+0+0", f"{A}\n{A}",
])  # fmt: skip
def test_environment_grammar(answer: str) -> None:
    assert not judge("A", answer, A).valid
    assert shaped(judge("A", answer, A)) == -0.3


@pytest.mark.parametrize("shaping", ["capped", "graduated", "linear", "binary"])
def test_only_exact_answers_get_everything(shaping: Shaping) -> None:
    for answer in (A.replace("31", "32"), A.replace("+0+0", "+0+1"), A.replace("0.001", "0.5")):
        assert shaped(judge("A", answer, A), shaping) < 1


def test_truth_that_breaks_the_grammar_is_an_error() -> None:
    with pytest.raises(ValueError, match="no answer of an A line"):
        judge("A", A, A + "+0")
    with pytest.raises(ValueError, match="no answer of a P line"):
        judge("P", P, P + " x")


@pytest.mark.parametrize(("a", "b", "distance"), [
    ("", "", 0), ("", "abc", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("abc", "abc", 0), ("ab", "ba", 2),
])  # fmt: skip
def test_levenshtein(a: str, b: str, distance: int) -> None:
    assert levenshtein(a, b) == levenshtein(b, a) == distance
    assert similarity(a, b) == (1 - distance / max(len(a), len(b)) if a != b else 1)


def test_levenshtein_equals_its_recursive_definition() -> None:
    def plain(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(plain(a[1:], b) + 1, plain(a, b[1:]) + 1, plain(a[1:], b[1:]) + (a[0] != b[0]))

    rng = random.Random(0)
    for _ in range(100):
        a, b = ("".join(rng.choices("kq1", k=rng.randrange(6))) for _ in range(2))
        assert levenshtein(a, b) == plain(a, b)


@pytest.mark.parametrize(("answer", "published"), [
    ("x+0.001+0+0", None), ("8/8/8/8/8/8/8/8 b - - 0 1+0.001+0+0", None),
    ("4K3/8/8/8/8/8/8/4K3 b - - 0 1+0.001+0+0", None), ("4k3/8/8/8/8/8/8/8 b - - 0 1+0.001+0+0", None),
    (f"{BEFORE}+0.001+0+0", 0.8), (f"{FEN.replace(' b ', ' w ')}+0.001+0+0", 0.8), (f"{FEN} b+0.001+0+0", 0.8),
    (f"{FEN.replace('8/2k2b2', '9/2k2b2')}+0.001+0+0", 0.8), (f"{' '.join(FEN.split()[:2])}+0.001+0+0", None),
    (f"{FEN.replace(' - ', '  - ', 1)}+0.001+0+0", None),
])  # fmt: skip
def test_no_position_no_reward(answer: str, published: float | None) -> None:
    """Six fields, one king each and the right side to move; the published grammar takes anything for a position."""
    strict, loose = judge("A", answer, A, BEFORE), judge("A", answer, A)
    assert not strict.valid
    assert (strict.raw, shaped(strict, "capped")) == (0, -0.3)
    assert loose.valid
    assert loose.scores["fen"] == similarity(answer.split("+")[0], FEN)
    assert loose.raw == pytest.approx((4 + 3 * loose.scores["fen"] + 3) / 10)
    if published is not None:
        assert shaped(loose) == published


def test_a_wrong_position_with_the_right_side_is_valid() -> None:
    verdict = judge("A", A.replace("2p4r", "2p3r1"), A, BEFORE)
    assert verdict.valid
    assert verdict.scores == judge("A", A.replace("2p4r", "2p3r1"), A).scores
    assert not verdict.exact


@pytest.mark.parametrize(("answer", "listed", "legal"), [
    (P, 5, 5), ("M: e2e4 e2e5 E: 0.42 0 B: e2e4", 2, 1), ("M: e2e5 E: 0.42 B: e2e5", 1, 0),
    ("M: e2e4 c2c4 c7c5 b8c6 E: 0.42 0.21 0 0 B: e2e4", 4, 2),
])  # fmt: skip
def test_listed_moves_have_to_be_legal(answer: str, listed: int, legal: int) -> None:
    """Weight 6 beside the others' 8.5; the published grammar does not look."""
    strict, loose = judge("P", answer, P, START), judge("P", answer, P)
    assert (strict.listed, strict.legal) == (listed, legal)
    assert strict.scores == {**loose.scores, "legal": legal / listed}
    assert strict.raw == pytest.approx((8.5 * loose.raw + 6 * legal / listed) / 14.5)
    assert (loose.listed, loose.legal) == (0, 0)


def test_moves_are_counted_in_broken_answers_too() -> None:
    verdict = judge("P", "M: e2e4 e2e4 e7e5", P, START)
    assert not verdict.valid
    assert (verdict.listed, verdict.legal) == (3, 1)


@pytest.mark.parametrize(("answer", "reward"), [
    (P, 1.0), (P.replace("0.42", "1.42"), 0.8),  # raw 0.987
    ("M: c2c4 e2e4 E: 0.21 0.42 B: c2c4", -0.3 + 1.3 * (2 + 1.5 * 2 / 5 + 2 / 5 + 6) / 14.5),
    ("M: e2e5 E: 0.42 B: e2e5", -0.3 + 1.3 * 2 / 14.5), ("M: e2e4", -0.3),
])  # fmt: skip
def test_capped_rewards_are_linear_and_at_most_four_fifths_unless_exact(answer: str, reward: float) -> None:
    """No step is lost, as on the ladder, and nearly right is worth less than right."""
    assert shaped(judge("P", answer, P, START), "capped") == pytest.approx(reward)
