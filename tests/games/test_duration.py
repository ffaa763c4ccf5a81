"""How long a run's evaluations take, and when training has to end for them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import gpt_2048_rl as program
from toolkit.games import duration, programs


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[..., duration.TimeLimit]:
    """The limit of a run with 312 held-out boards, of whose games 20 s of the expert's are left.  No game is played."""
    monkeypatch.setattr(duration, "play_some", lambda *_: None)

    def limit(minutes: float, best_of: int = 512) -> duration.TimeLimit:
        options = SimpleNamespace(minutes=minutes, best_of=best_of, eval_batch_size=32, race_games=256)
        games: Any = SimpleNamespace(boards=312, to_come=lambda name: 20.0, first=SimpleNamespace(config=options))
        return duration.TimeLimit(games)

    return limit


def a_step(seconds: float = 0.05, steps: int = 4) -> tuple[int, list[dict[str, Any]], dict[str, float]]:
    """What is known after so many steps of 32 answers, whose last games took so many seconds."""
    done = [{"source": str(n), "reward": float(n),
             "results": [{"board": "a", "outcome": "lost", "seconds": seconds}]} for n in range(32)]  # fmt: skip
    return 32 * steps, done, {"generate": 6.0, "score": 1.6}


WAITED = 6.5 * 60


def is_up_after(limit: duration.TimeLimit, steps: int, step: float = 30.0, seconds: float = 0.05) -> bool:
    """Whether the last of so many steps is said to be the last of the run."""
    return [limit.is_up(WAITED, step, *a_step(seconds, n)) for n in range(1, steps + 1)][-1]


@pytest.mark.parametrize(
    ("minutes", "best_of", "over"),
    [(13.1, 512, False), (12.9, 512, True), (10.6, 0, False), (10.3, 0, True), (12.9, -1, False), (0.0, 512, False)],
)
def test_the_evaluations_have_their_part_of_the_minutes(
    limited: Callable[..., duration.TimeLimit], minutes: float, best_of: int, over: bool
) -> None:
    """An hour of a rented GPU was over before they began.  Here 1,168 answers in 37 batches take 222 s, 2,304 games of
    0.05 s 115, and the expert 20 s, after 6.5 minutes; another step takes 30 s.  Without a control there is one race,
    and 656 answers in 21 batches and 1,224 games take 187 s instead of 337."""
    assert is_up_after(limited(minutes, best_of), steps=4) == over


def test_the_first_steps_say_little_about_the_next(limited: Callable[..., duration.TimeLimit]) -> None:
    """They compile, also those after a resume."""
    assert not is_up_after(limited(13.1), steps=2, step=300.0)
    assert is_up_after(limited(13.1), steps=4, step=300.0)


def test_a_step_that_played_nothing_ends_no_run(limited: Callable[..., duration.TimeLimit]) -> None:
    """The price of a second of CPU time, worked out from games of no length, was that of thirty years."""
    assert not is_up_after(limited(60.0), steps=4, seconds=0.0)


def test_equal_programs_are_judged_once(limited: Callable[..., duration.TimeLimit]) -> None:
    """So 32 of them cost what one costs."""
    judged, done, seconds = a_step()
    same = [{**each, "source": "the same"} for each in done]
    limit = limited(0.0)
    some = limit.evaluations(judged, done, seconds)
    assert limit.evaluations(judged, same, {**seconds, "score": 0.05}) == pytest.approx(some)


def test_with_a_limit_games_are_played_as_the_evaluations_play_them(
    limited: Callable[..., duration.TimeLimit], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --minutes 4 they took 150 s where 60 were foreseen: they go on where a stage ends them, and most are those
    of the best programs."""
    monkeypatch.setattr(duration, "play_some", lambda *_: (0.01, 0.2))
    for minutes, steps, foreseen in ((60.0, 3, 1168 * 0.01 + 1136 * 0.2), (60.0, 2, 2304 * 0.05),
                                     (0.0, 3, 2304 * 0.05)):  # fmt: skip
        limit = limited(minutes)
        is_up_after(limit, steps)
        # What took 1.6 s were 1.6 s of CPU time.
        assert limit.evaluations(*a_step()) == pytest.approx(37 * 6.0 + 20 + foreseen)


def test_games_to_come_take_as_long_as_those_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """The expert's come first: 320 of them took five minutes that nobody had foreseen."""
    monkeypatch.setattr(programs.BackgroundGames, "_play_beside", lambda _: None)
    games = program.held_out_games(program.TrainConfig(games=3, held_out=("4:2048",)))
    assert games.to_come("expert") == 0  # none is played: nothing is known
    assert [whose for (_, whose), _ in games._left][:4] == ["expert"] * 3 + ["greedy"]
    played: Any = [SimpleNamespace(seconds=2.0), SimpleNamespace(seconds=4.0)]
    games.games["4x4", "expert"] = played
    assert games.to_come("expert") == 9.0


def test_some_games_are_of_a_step_and_of_its_best_quarter() -> None:
    """The longer half of that tells how long the programs play which a race leaves."""
    long: dict[str, float] = {"": 0.0, "quick": 1.0, "slow": 4.0}  # seconds

    def play(sources: list[str], boards: tuple[int, ...]) -> list[list[SimpleNamespace]]:
        return [[SimpleNamespace(seconds=long[source]) for _ in boards] for source in sources]

    done: list[dict[str, Any]] = [{"source": None, "reward": 0.0}] * 24
    done += [{"source": source, "reward": 1.0} for source in ("slow", "quick") for _ in range(4)]
    evaluator: Any = SimpleNamespace(boards=lambda count, purpose: (7,) * count, play=play)
    assert duration.play_some(evaluator, done) == (5 / 8, 4.0)
