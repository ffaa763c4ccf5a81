"""The task for other trainers: a question, the rewards of an answer, and what its author is told.

Thin over `gpt_2048_rl.judge` and the rewards.  A question names its boards by a number, and their seeds are drawn from
this machine's secret when an answer is judged.  So a dataset, a trace or a server's answer can be shown to anyone:
whoever knew a seed could search for a program that fits its tiles.  Machines that share work need the same secret,
`~/.cache/gpt_2048_rl/board_key`; otherwise the answers of one group play different boards.

With several turns, an answer that is not the last plays other boards, for practice.  Feedback on the boards that are
paid would let a policy keep what went well on each and draw the rest again, which raises tiles without skill.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import gpt_2048_rl as program
from toolkit import UsageError, cli


@dataclass(kw_only=True, frozen=True)
class Game:
    """What is played.  Raises ValueError, in one line."""

    size: int = 4  # cells along each side of a board; on 6x6 random moves make 2048
    target: int = 2048  # the tile that wins
    keys: program.Layout = "bepo"  # keyboard layout of the four moves
    boards: int = 4  # that an answer's program plays
    timeout: float = 5.0  # CPU seconds for a game's first 1,000 moves, again per 1,000 more

    def __post_init__(self) -> None:
        program.Stage.read(f"{self.size}:{self.target}")
        program.Job("", (), self.size, self.target, self.keys, self.timeout)  # says what no game can have
        check_count("boards", self.boards, 64)


def check_count(name: str, value: int, most: int) -> None:
    """Raises ValueError, in one line."""
    if not 1 <= value <= most:
        raise ValueError(f"{name} must lie between 1 and {most}, not {value}")


@dataclass(kw_only=True, frozen=True)
class Question(Game):
    """A prompt and its boards.  Those of "test" have the wording and the odd seeds that training never uses."""

    index: int
    split: Literal["train", "test"] = "train"

    @classmethod
    def read(cls, columns: Mapping[str, Any]) -> Question:
        """From a row, which may hold more."""
        return cls(**{field.name: columns[field.name] for field in dataclasses.fields(cls)})

    @property
    def prompt(self) -> str:
        """The user's message."""
        *training, held_out = range(len(program.WORDINGS))
        wording = held_out if self.split == "test" else training[self.index % len(training)]
        return program.build_prompt(self.size, self.target, self.keys, wording)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of the boards that are paid, on this machine."""
        return program.board_seeds(self.boards, "integrations", self.index, held_out=self.split == "test")

    @property
    def practice(self) -> tuple[int, ...]:
        """Seeds of as many other boards."""
        return program.board_seeds(self.boards, "practice", self.index, held_out=self.split == "test")


def columns(questions: Sequence[Question]) -> dict[str, list[Any]]:
    """What `judge` and the rewards of training read, for a batch."""
    names = ("seeds", "size", "target", "keys", "timeout")
    return {name: [getattr(question, name) for question in questions] for name in names}


def practise(question: Question, answer: str) -> program.Verdict:
    """The verdict on an answer that is not the last: on the boards for practice."""
    (verdict,) = program.judge([answer], **columns([question]) | {"seeds": [question.practice], "record": [True]})
    return verdict


def judge(question: Question, answer: str) -> tuple[program.Verdict, dict[str, float]]:
    """The verdict on the last answer, and its rewards by name.  Of one that is too long to be read, no more is kept."""
    return _judge(question, answer[: program.LIMITS.text_chars + 1])


@lru_cache(maxsize=64)
def _judge(question: Question, answer: str) -> tuple[program.Verdict, dict[str, float]]:
    game = columns([question])
    (verdict,) = program.judge([answer], **game)
    return verdict, {reward.__name__: reward([answer], **game)[0] for reward in program.REWARDS}


def is_final(verdict: program.Verdict) -> bool:
    """Whether nothing is left to improve in practice: every game is won.  Or it cheats, which has to cost something."""
    return bool(verdict.cheating) or all(result.outcome == "success" for result in verdict.results)


def feedback(question: Question, verdict: program.Verdict) -> str:
    """The message to the author of an answer that practised: how each game ended, and the worst one's last position."""
    lines = [f"Your program did not play: {verdict.results[0].detail}."]
    if verdict.works == "load":
        lines = [
            f"Board {i}: {result.outcome}, largest tile {result.max_tile}, {result.steps} moves. {result.detail}"
            for i, result in enumerate(verdict.results, 1)
        ]
        worst = min(verdict.results, key=lambda result: result.max_tile)
        game = program.GameBoard(question.size, worst.seed, question.target)
        for move in worst.moves:
            game.move(int(move))
        lines += [f"The last position on board {verdict.results.index(worst) + 1}:", *map(str, game.board())]
    lines.append(
        "Answer with a better program. These boards were for practice. The last answer counts, on other boards."
    )
    return "\n".join(lines)


def start(kind: type[Any], run: Callable[[Any], int], prog: str, argv: Sequence[str] | None = None) -> int:
    """Parse a command line and run a command.  Returns its exit code; 2 after one line that says what to change."""
    try:
        return run(cli.parse(kind, sys.argv[1:] if argv is None else argv, prog))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
