"""The end of a run: the controls, the race for the best program, the best of N, and the stages they are shown at."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import gpt_2048_rl as program
from tests.conftest import Run
from tests.helpers import HELD_OUT, wait_until
from tests.preloaded import call, run
from toolkit import OutOfMemory, ServerFailed, UsageError, cli
from toolkit.base.workers import JailError
from toolkit.games import duration, programs
from toolkit.run import results

KEYS = program.LAYOUTS["bepo"]
GOOD = "def strategy(board):\n    return 'a'"
CHEATS = "import os\ndef strategy(board):\n    return 'a'"
BROKEN = "x = 1 / 0\ndef strategy(board):\n    return 'a'"


@pytest.fixture
def evaluator() -> program.Evaluator:
    """Of a small board, where games are short."""
    return program.Evaluator(program.EvalConfig(model="tiny", games=8), 3, 64)


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (ServerFailed("it ended"), ""),
        (OutOfMemory("the model was updated", "--batch-size 2", resume_with="--batch-size 2"), " --batch-size 2"),
        (OutOfMemory("the policy was measured", "fewer --max-new-tokens"), None),  # a resumed run may not change it
    ],
    ids=["server", "other options", "none"],
)
def test_a_run_that_breaks_off_says_how_it_goes_on_if_it_can(
    error: UsageError, options: str | None, tmp_path: Path
) -> None:
    said: list[str] = []
    with pytest.raises(type(error)), results.saying_how_to_go_on(tmp_path / "run", program.TrainConfig(), said.append):
        raise error
    command = f"to resume: python gpt_2048_rl.py --output-dir {tmp_path} --run-name run"
    assert said[1:] == ([] if options is None else [command + options])


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


# ---------------------------------------------------------------------------------------------------------------------
# The best of N


def test_the_best_of_n_is_kept_with_those_behind_it(trained: Run) -> None:
    """As many answers as training judged, and a race like that of the run's own programs."""
    best = json.loads((trained.folder / "best_of_n.json").read_text())
    assert (trained.folder / "best_of_n.py").read_text().partition("\n")[2] == best[0] + "\n"
    race = trained.result["races"]["best_of_n"]
    assert race["sampled"] == sum(len(step["completions"]) for step in trained.rollouts) + duration.SURE
    assert len(best) == min(100, race["played"])
    assert 0 < trained.result["races"]["best"]["played"] <= race["sampled"]


def check_the_untrained_model() -> None:
    config = program.train_defaults("tiny", "stable", "none")
    config.games, config.max_new_tokens = 8, 64
    model, tokenizer = program.load_model("tiny", config, lambda _: None)
    evaluator = program.Evaluator(config, 4, 128)
    start = evaluator.answers(model, tokenizer, 12, range(2))
    model = program.add_adapters(model, config)
    for name, weights in model.named_parameters():
        if "lora_B" in name:
            weights.data.normal_(std=0.1)
    assert evaluator.answers(model, tokenizer, 12, range(2)) != start
    with model.disable_adapter():
        assert evaluator.answers(model, tokenizer, 12, range(2)) == start


def test_the_best_of_n_is_written_by_the_untrained_model(base: Path) -> None:
    """An adapter that was trained changes the answers; switched off, it does not."""
    call(check_the_untrained_model)


def check_the_wordings() -> None:
    config = program.train_defaults("tiny", "stable", "none")
    model, tokenizer = program.load_model("tiny", config, lambda _: None)
    answers = [GOOD, "no program", CHEATS, BROKEN] * 3

    def sample(model: Any, tokenizer: Any, prompts: Sequence[str], config: Any) -> list[str]:
        assert prompts == [program.build_prompt(4, 128, wording=n % 8) for n in range(12)]
        assert config.temperature == 0.4
        return answers

    program.sample_completions = sample
    evaluator, adapted = program.Evaluator(config, 4, 128), program.add_adapters(model, config)
    assert programs.sampled_programs(evaluator, adapted, tokenizer, 12, temperature=0.4) == [GOOD]


def test_programs_are_asked_for_in_the_wordings_of_training(base: Path) -> None:
    """For the best of N, and at a lower temperature for the race.  Those that cheat or do not load take no part."""
    call(check_the_wordings)


def test_eval_of_a_run_shows_its_best_of_n(trained: Run) -> None:
    done = run("eval", trained.folder, "--games", 4, *HELD_OUT, "--max-new-tokens", 48, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])["scores"]
    assert {name: stage["controls"] for name, stage in told.items()} == {
        name: stage["controls"] for name, stage in trained.result["scores"].items()}  # fmt: skip
