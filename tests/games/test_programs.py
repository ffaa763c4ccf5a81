"""The controls beside training, the race for the best program, and the stages that are held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

import gpt_2048_rl as program
from tests.helpers import wait_until
from toolkit import UsageError, cli
from toolkit.base.workers import JailError
from toolkit.games import programs

KEYS = program.LAYOUTS["bepo"]
BROKEN = "x = 1 / 0\ndef strategy(board):\n    return 'a'"


@pytest.fixture
def evaluator() -> program.Evaluator:
    """Of a small board, where games are short."""
    return program.Evaluator(program.EvalConfig(model="tiny", games=8), 3, 64)


# ---------------------------------------------------------------------------------------------------------------------
# Controls


def test_the_rotation_plays_its_keys_in_turn_for_ever() -> None:
    """Left, up, right, down, in every layout, whatever the board."""
    for layout, keys in program.LAYOUTS.items():
        namespace: dict[str, Any] = {}
        exec(programs.controls(keys)["rotation"], namespace)
        said = [namespace["strategy"]("no board") for _ in range(5)]
        table = program.key_table(layout)
        played = [program.DIRECTIONS[table[key]] for key in said]
        assert played == ["down", "right", "up", "left", "down"]
    assert '[*"aéiu"]' in programs.controls(KEYS)["rotation"]


@pytest.mark.parametrize("layout", program.LAYOUTS)
@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_every_control_plays_every_layout_and_size(layout: program.Layout, size: int, pool: program.Pool) -> None:
    for name, source in programs.controls(program.LAYOUTS[layout]).items():
        target = 8 if size == 2 else 64
        (game,) = program.execute_strategies([source], (1,), size, target, layout, pool=pool)[0]
        assert game.outcome in ("success", "lost", "stuck"), (name, game)
        assert game.outcome != "stuck" or name == "rotation"


def test_the_expert_is_better_than_the_other_controls(evaluator: program.Evaluator, pool: program.Pool) -> None:
    games = evaluator.play(list(programs.controls(KEYS).values()), evaluator.held_out_seeds, pool=pool)
    levels = [programs.score(evaluator, played).mean_log2_tile for played in games]
    assert list(programs.controls(KEYS))[levels.index(max(levels))] == "expert"


def background_games() -> programs.BackgroundGames:
    """Without a program, on two small boards."""
    config = program.EvalConfig(model="tiny", games=10)
    return programs.BackgroundGames([(3, 64), (2, 8)], partial(program.Evaluator, config))


@pytest.mark.parametrize("ended", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_programs_reach_beside_other_work_what_they_reach_after_it(ended: bool) -> None:
    """However many of their games are left for the end, and when a program was added."""
    games = background_games()
    for name, source in programs.controls(KEYS).items():
        games.add({name: source})
    if ended:
        assert wait_until(lambda: not games._left, 60)
    expected = {stage: {name: programs.score(evaluator, evaluator.play([source], evaluator.held_out_seeds)[0])
                        for name, source in programs.controls(KEYS).items()}
                for stage, evaluator in games.evaluators.items()}  # fmt: skip
    assert games.scores() == expected


def test_a_run_gets_its_controls_where_the_spare_worker_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(evaluator: program.Evaluator) -> None:
        raise JailError("no memory")

    monkeypatch.setattr(program.Evaluator, "spare_pool", fail)
    games = background_games()
    games.add(programs.controls(KEYS))
    played = {stage: {score.games for score in scores.values()} for stage, scores in games.scores().items()}
    assert played == {"3x3": {10}, "2x2": {3}}


# ---------------------------------------------------------------------------------------------------------------------
# The race


@dataclass(frozen=True)
class Game:
    """As much of a game as a race looks at."""

    max_tile: int
    score: int


class Boards:
    """An evaluator whose programs are numbers: on every board program n scores 2 ** n."""

    target = 8

    def __init__(self) -> None:
        self.played = list[tuple[str, int]]()

    def boards(self, count: int, purpose: str) -> tuple[int, ...]:
        assert purpose == "race"
        return tuple(range(count))

    def play(self, sources: Sequence[str], seeds: Sequence[int]) -> list[list[Game]]:
        self.played += [(source, seed) for source in sources for seed in seeds]
        return [[Game(1 << int(source), 1 << int(source)) for _ in seeds] for source in sources]


def raced(boards: Any, sources: Sequence[str], games: int = 448) -> programs.Race:
    return programs.race(boards, sources, games)


def test_a_race_halves_the_programs_and_doubles_the_boards() -> None:
    boards = Boards()
    found = raced(boards, [str(n) for n in (3, 0, 5, 1, 4, 2, 7, 6)] * 2)
    assert found.ranking == tuple("76543210")
    assert (found.candidates, found.played, found.boards, found.won) == (8, 8, 15, 1.0)
    by_board = ["".join(sorted(source for source, played in boards.played if played == board)) for board in range(15)]
    assert by_board == ["01234567"] * 3 + ["4567"] * 4 + ["67"] * 8


def test_the_first_round_of_a_race_leaves_the_finalists() -> None:
    most = programs.FINALISTS[0]
    boards, count = Boards(), 2 * most
    found = raced(boards, [str(n) for n in range(count)], 1000)
    assert (found.played, found.ranking[0]) == (count, str(count - 1))
    second = {int(source) for source, board in boards.played if board == 1}
    assert second == set(range(most, count))


@pytest.mark.parametrize("games", [1, 2, 3, 5, 8, 64, 448, 1000])
def test_a_race_never_plays_more_games_than_it_may(games: int) -> None:
    """It was given seconds: the slower the machine, the fewer programs it saw and the worse was the best one."""
    boards = Boards()
    found = raced(boards, [str(n) for n in range(2000)], games)
    assert games / 2 < len(boards.played) <= games
    assert found.candidates == 2000
    assert found.ranking[0] == str(found.played - 1)
    assert found.played >= games / 4


@pytest.mark.parametrize(("games", "finalists"), [(448, 32), (427, 32), (426, 16), (64, 8), (6, 2), (5, 1)])
def test_so_many_programs_stay_that_later_rounds_take_three_quarters(games: int, finalists: int) -> None:
    boards = Boards()
    raced(boards, [str(n) for n in range(2000)], games)
    assert len([source for source, board in boards.played if board == 1]) == (finalists if finalists > 1 else 0)


def test_a_race_of_nobody_and_of_one() -> None:
    assert raced(Boards(), []) == programs.Race(0, 0, 0, 0.0, ())
    assert raced(Boards(), ["2"]) == programs.Race(1, 1, 1, 0.0, ("2",))


def test_a_race_is_won_by_skill_and_repeats(evaluator: program.Evaluator, pool: program.Pool) -> None:
    """Real programs on real boards, of which none is held out."""
    sources = [BROKEN, *programs.controls(KEYS).values()]
    found = raced(evaluator, sources)
    assert found.ranking[0] == programs.controls(KEYS)["expert"]
    assert found.ranking[-1] == BROKEN
    assert raced(evaluator, sources) == found
    assert not set(evaluator.boards(64, "race")) & set(evaluator.held_out_seeds)


# ---------------------------------------------------------------------------------------------------------------------
# Stages


def test_only_games_of_the_first_stage_go_on_to_their_end() -> None:
    config = program.EvalConfig(model="tiny", held_out=("4:2048", "6:2048", "6:1024"))
    stages = map(program.Stage.read, config.held_out)
    made = programs.BackgroundGames(stages, partial(program.Evaluator, config)).evaluators
    assert {name: (found.size, found.target) for name, found in made.items()} == {
        "4x4": (4, 2048), "6x6 2048": (6, 2048), "6x6 1024": (6, 1024)}  # fmt: skip
    goals = [getattr(found.new_game(1), "target", 0) for found in made.values()]
    assert goals == [program.TO_THE_END, 2048, 1024]


@pytest.mark.parametrize("stages", [[], ["4x2048"], ["1:2048"], ["4:1000"]])
def test_a_stage_that_cannot_be_is_refused(stages: list[str]) -> None:
    with pytest.raises(UsageError, match="--held-out"):
        cli.check_config(program.EvalConfig(model="tiny", held_out=tuple(stages)))
