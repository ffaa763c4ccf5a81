"""Rewards worked out by hand, and answers that once were worth more than they should be."""

from __future__ import annotations

import random

import pytest

from mini.chess_reward import Shaping, judge, levenshtein, shaped, similarity

P = "M: e2e4 c2c4 d2d4 a2a3 g1f3 E: 0.42 0.21 0.18 0.09 0.24 B: e2e4"
A = "8/2k2b2/2p4r/R2p1p2/P7/2P2B1P/5PPK/4R3 b - - 2 31+0.001+0+0"
FEN = A.split("+")[0]


def test_right_answers() -> None:
    for task, truth in (("P", P), ("A", A)):
        verdict = judge(task, truth, truth)  # type: ignore[arg-type]
        assert verdict.exact
        assert verdict.raw == 1
        assert [shaped(verdict, shaping) for shaping in ("graduated", "linear", "binary")] == [1, 1, 1]


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


@pytest.mark.parametrize("shaping", ["graduated", "linear", "binary"])
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
