"""The reward of an answer to a chess prompt.

An answer is judged once against the right one: first by a strict grammar, then field by field.  Rewards and reports
only read the verdict.  This is stricter than the original: fields must be in order with nothing around them, repeated
moves break the grammar, and only a fully exact answer gets 1.0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from mini.chess_data import Task

Shaping = Literal["graduated", "linear", "binary"]

FORMAT = {"P": 2.0, "A": 4.0}  # weight of the grammar
WEIGHTS = {"P": {"best": 4.0, "candidates": 1.5, "evals": 1.0}, "A": {"fen": 3.0, "flags": 2.0, "reward": 1.0}}
INVALID = -0.3  # reward of an answer that breaks the grammar
LADDER = ((0.4, 0.2), (0.6, 0.4), (0.8, 0.6), (0.95, 0.8))  # raw score below -> reward
EVALS_EXACT = 0.95  # evals with this score or more count as exact
REWARD_TOLERANCE = 0.01

MOVE = r"[a-h][1-8][a-h][1-8][qrbn]?"
NUMBER = r"-?\d{1,9}(?:\.\d{1,9})?"
P_GRAMMAR = re.compile(rf"M:((?: +{MOVE}){{1,5}}) +E:((?: +{NUMBER}){{1,5}}) +B: +({MOVE})")
A_GRAMMAR = re.compile(rf"([^+\n]+)\+({NUMBER})\+([01])\+([01])")


@dataclass(frozen=True)
class Verdict:
    """The judgement of an answer against the right one."""

    task: Task
    valid: bool  # matches the grammar
    scores: dict[str, float]  # per field, 0 to 1; empty if not valid

    @property
    def raw(self) -> float:
        """Weighted mean of grammar and fields."""
        weights = WEIGHTS[self.task]
        if not self.valid:
            return 0.0
        content = sum(weights[name] * score for name, score in self.scores.items())
        return (FORMAT[self.task] + content) / (FORMAT[self.task] + sum(weights.values()))

    @property
    def exact(self) -> bool:
        """Whether every field is right; evals may be slightly off."""
        return self.valid and all(score >= (EVALS_EXACT if name == "evals" else 1.0)
                                  for name, score in self.scores.items())  # fmt: skip


def judge(task: Task, answer: str, truth: str) -> Verdict:
    """Judge an answer.  Raises ValueError if the truth itself breaks the grammar."""
    scores = {"P": judge_policy, "A": judge_environment}[task](answer.strip(), truth.strip())
    return Verdict(task, scores is not None, scores or {})


def shaped(verdict: Verdict, shaping: Shaping = "graduated") -> float:
    """A verdict's reward."""
    if shaping == "binary":
        return 1.0 if verdict.exact else 0.0
    if not verdict.valid:
        return INVALID
    if shaping == "linear":
        return INVALID + (1 - INVALID) * verdict.raw
    if verdict.exact:
        return 1.0
    return next((reward for below, reward in LADDER if verdict.raw < below), LADDER[-1][1])


# ---------------------------------------------------------------------------------------------------------------------
# P


def parse_policy(answer: str) -> tuple[dict[str, float], str] | None:
    """Each candidate's eval, and the best move; None if the answer breaks the grammar."""
    parts = P_GRAMMAR.fullmatch(answer)
    if not parts:
        return None
    moves, evals, best = parts[1].split(), [float(number) for number in parts[2].split()], parts[3]
    distinct = len(set(moves)) == len(moves) == len(evals) and all(move[:2] != move[2:4] for move in moves)
    return (dict(zip(moves, evals, strict=True)), best) if distinct and best in moves else None


def judge_policy(answer: str, truth: str) -> dict[str, float] | None:
    """Scores of best move, candidates and evals."""
    right, given = parse_policy(truth), parse_policy(answer)
    if right is None:
        raise ValueError(f"no answer of a P line: {truth!r}")
    if given is None:
        return None
    (evals, best), (right_evals, right_best) = given, right
    shared = evals.keys() & right_evals.keys()
    close = sum(max(0.0, 1 - abs(evals[move] - right_evals[move]) / (1 + abs(right_evals[move]))) for move in shared)
    return {"best": float(best == right_best), "candidates": len(shared) / max(len(evals), len(right_evals)),
            "evals": close / len(right_evals)}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# A


def levenshtein(a: str, b: str) -> int:
    """The smallest number of single characters to insert, delete or replace."""
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(previous[j - 1] + (x != y), previous[j] + 1, row[-1] + 1))
        previous = row
    return previous[-1]


def similarity(a: str, b: str) -> float:
    """From 0 for texts with nothing in common to 1 for equal texts."""
    return 1 - levenshtein(a, b) / max(len(a), len(b)) if a != b else 1.0


def judge_environment(answer: str, truth: str) -> dict[str, float] | None:
    """Scores of the new position, the flags and the reward."""
    right, given = A_GRAMMAR.fullmatch(truth), A_GRAMMAR.fullmatch(answer)
    if right is None:
        raise ValueError(f"no answer of an A line: {truth!r}")
    if given is None:
        return None
    return {"fen": similarity(given[1], right[1]), "flags": float(given.group(3, 4) == right.group(3, 4)),
            "reward": float(abs(float(given[2]) - float(right[2])) < REWARD_TOLERANCE)}  # fmt: skip
