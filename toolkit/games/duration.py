"""How long the evaluations at a run's end take: doctor says it before a run, and --minutes leaves time for them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from toolkit.games.programs import Evaluator, controls

SURE = 32  # answers that the trained model is surest of, for the race
PLAYED = 8  # programs that tell how long games are


class EvaluatedConfig(Protocol):
    """What is read of a run's options."""

    best_of: int
    boards: int
    eval_batch_size: int
    race_games: int


def control_answers(best_of: int, judged: int) -> int:
    """How many answers the untrained model gives as a control: as many as the run judged and raced, or so many."""
    return judged + SURE if best_of < 0 else best_of


def answers(best_of: int, judged: int, boards: int) -> int:
    """How many answers are sampled: two models' for each held-out board, the surest, and the control's."""
    return 2 * boards + SURE + control_answers(best_of, judged)


def best_quarter(completions: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those of a step's judged completions that the evaluations play most."""
    ranked = sorted(completions, key=lambda done: float(done["reward"]), reverse=True)
    return ranked[: math.ceil(len(ranked) / 4)]


def game_seconds(completions: Sequence[Mapping[str, Any]]) -> float:
    """Mean CPU seconds of a game in training, which ends at its stage's target."""
    return statistics.fmean(game["seconds"] for done in completions for game in done["results"])


@dataclass(frozen=True)
class Games:
    """CPU seconds of a game, as far as a step tells."""

    usual: float  # of its completions
    best: float  # of the best quarter of them
    expert: float  # of the expert, which plays on where others have lost

    @classmethod
    def of(cls, completions: Sequence[Mapping[str, Any]]) -> Games:
        """As training played them: the expert's are not told."""
        best = game_seconds(best_quarter(completions))
        return cls(game_seconds(completions), best, best)

    @classmethod
    def played(cls, evaluator: Evaluator, completions: Sequence[Mapping[str, Any]]) -> Games:
        """As the evaluations play them: to their end, and on a board of their own.  A game in training ends where its
        stage does, so that it does not tell.  PLAYED of each play a board, and so does the expert."""
        parts = completions, best_quarter(completions)
        some = [[done["source"] or "" for done in part[:: math.ceil(len(part) / PLAYED)]] for part in parts]
        boards, expert = evaluator.boards(1, "duration"), controls(evaluator.letters)["expert"]
        played = (evaluator.play(part, boards) for part in (*some, [expert]))
        return cls(*(statistics.fmean(game.seconds for (game,) in games) for games in played))


def of_evaluations(
    config: EvaluatedConfig,
    boards: int,
    judged: int,
    completions: Sequence[Mapping[str, Any]],
    generate: float,
    score: float,
    games: Games,
    left: int,
) -> float:
    """Seconds that a run's evaluations will take, as far as its last step tells.

    That step's completions took `generate` and `score` seconds, `judged` is the number of all so far, there are
    `boards` held-out boards, and the expert has `left` games to play.  Each answer plays a game.  Two races and their
    winners play like the step's best quarter.
    """
    asked = answers(config.best_of, judged, boards)
    played = game_seconds(completions) * len(completions) * config.boards
    needed = asked * games.usual + 2 * (config.race_games + boards) * games.best + left * games.expert
    batches = math.ceil(asked / config.eval_batch_size)
    return batches * generate + needed * score / max(played, 1e-9)
