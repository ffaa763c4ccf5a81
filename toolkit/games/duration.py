"""How long the evaluations at a run's end take: doctor says it before a run, and --minutes leaves time for them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from toolkit.games.programs import BackgroundGames, Evaluator

SURE = 32  # answers that the trained model is surest of, for the race
PLAYED = 8  # programs that tell how long games are
COMPILING = 3  # first steps of a start, which say little about the next
AGAIN = 10  # steps between games that are played to tell


class EvaluatedConfig(Protocol):
    """What is read of a run's options."""

    minutes: float
    best_of: int
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


def play_some(evaluator: Evaluator, completions: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """CPU seconds of a game as the evaluations play it: of a step's completions, and of the best of them.

    Games in training do not tell: they end where their stage does.  PLAYED of the completions play a board, and as many
    of their best quarter, whose longer half counts: a race weeds out the others.
    """
    parts = completions, best_quarter(completions)
    some = [[done["source"] or "" for done in part[:: math.ceil(len(part) / PLAYED)]] for part in parts]
    boards = evaluator.boards(1, "duration")
    usual, best = (sorted(game.seconds for (game,) in evaluator.play(part, boards)) for part in some)
    return statistics.fmean(usual), statistics.fmean(best[len(best) // 2 :])


def of_evaluations(
    config: EvaluatedConfig,
    boards: int,
    judged: int,
    completions: Sequence[Mapping[str, Any]],
    generate: float,
    score: float,
    games: tuple[float, float] | None,
    expert: float,
) -> float:
    """Seconds that a run's evaluations will take, as far as its last step tells.

    That step's completions took `generate` and `score` seconds, `judged` is the number of all so far, there are
    `boards` held-out boards, `games` is what play_some found, if it was asked, and the expert's games to come take
    `expert` CPU seconds.  Each answer plays a game.  The races and their winners play like the step's best quarter.
    """
    asked = answers(config.best_of, judged, boards)
    usual, best = games or (game_seconds(completions), game_seconds(best_quarter(completions)))
    races = 2 if control_answers(config.best_of, judged) else 1
    needed = asked * usual + races * (config.race_games + boards) * best + expert
    played: dict[tuple[str, str], float]
    played = {(done["source"], game["board"]): game["seconds"] for done in completions for game in done["results"]}
    slower = score / max(sum(played.values()), score, 1e-9)  # where nothing was played, the time went elsewhere
    return math.ceil(asked / config.eval_batch_size) * generate + needed * slower


class TimeLimit:
    """When training has to end, so that the evaluations are over within --minutes."""

    def __init__(self, games: BackgroundGames) -> None:
        """`games` are those that are played beside training."""
        self._games = games
        self._config: EvaluatedConfig = games.first.config
        self._some: tuple[float, float] | None = None  # what play_some found, where there is a limit
        self._steps = 0  # since this start of the run

    def evaluations(self, judged: int, completions: Sequence[Mapping[str, Any]], seconds: Mapping[str, float]) -> float:
        """Seconds that they will take.  `seconds` are those of the last step's parts, see of_evaluations."""
        known = seconds["generate"], seconds["score"], self._some, self._games.to_come("expert")
        return of_evaluations(self._config, self._games.boards, judged, completions, *known)

    def is_up(self, waited: float, step: float, judged: int, completions: Any, seconds: Mapping[str, float]) -> bool:
        """Whether they have to begin after `waited` seconds, because another step would take as long as the last."""
        self._steps += 1
        if self._config.minutes and self._steps % AGAIN == COMPILING:
            self._some = play_some(self._games.first, completions)
        foreseen = step + self.evaluations(judged, completions, seconds) if self._steps >= COMPILING else 0.0
        return 0 < 60 * self._config.minutes < waited + foreseen
