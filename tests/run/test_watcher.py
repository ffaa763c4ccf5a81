"""The watcher: every known way in which training goes wrong has a name and a remedy, and a healthy step has none."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

import gpt_2048_rl as program
from tests.conftest import flags
from tests.helpers import HELD_OUT
from tests.preloaded import call, run
from toolkit.games import duration, programs
from toolkit.model import tiny
from toolkit.run import watch, watcher
from toolkit.run.steps import OUTCOMES

HEALTHY = watcher.StepSummary(
    size=6, target=2048, random_won=1.0, won=0.4, works=0.9, cheating=0.0, distinct=0.9, commonest=0.1, identical=False,
    flat=0.0, reward=8.0, spread=8.0, largest_tile=512, level=9.0, tiles={512: 1.0},
    outcomes=dict.fromkeys(OUTCOMES, 0.0), jailed=0.0, usual=frozenset())  # fmt: skip


def watcher_of(**options: Any) -> watcher.Watcher:
    """A watcher with these options, where the stage stays."""
    return watcher.Watcher(program.TrainConfig(**{"curriculum": False, **options}))


def test_a_healthy_step_is_silent() -> None:
    logs = {"completions/clipped_ratio": 0.1, "entropy": 0.4, "sampled/kl": 0.1}
    assert watcher_of(patience=3).look(HEALTHY, logs) == ""


@pytest.mark.parametrize(
    ("change", "logs", "named"),
    [
        ({}, {"completions/clipped_ratio": 0.9}, "--max-new-tokens"),
        ({"works": 0.05}, {}, "valid code"),
        ({"identical": True, "flat": 1.0}, {}, "all programs play alike"),
        ({"commonest": 0.6}, {}, "most answers play as one program does"),
        ({"flat": 1.0}, {}, "no gradient"),
        ({"won": 1.0, "flat": 1.0, "identical": True}, {}, "--ladder"),
        ({"cheating": 0.7}, {}, "cheat"),
        ({"outcomes": {"timeout": 0.7}}, {}, "--timeout"),
        ({"jailed": 0.7}, {}, "the jail ends most games"),
        ({}, {"sampled/kl": 9.0}, "KL runs away"),
        ({}, {"sampler/untold": 1.0}, "no log-probabilities"),
    ],
)
def test_a_trouble_is_named_with_its_remedy(change: dict[str, Any], logs: dict[str, float], named: str) -> None:
    step = dataclasses.replace(HEALTHY, **change)
    assert named in watcher_of(patience=3).look(step, logs)


def test_entropy_that_runs_away_is_named() -> None:
    """An entropy bonus of 0.02 did this to the embedded model: 0.4 became 1.2, and code turned into noise."""
    watcher = watcher_of(patience=3)
    said = [watcher.look(HEALTHY, {"entropy": entropy}) for entropy in (0.4, 0.4, 0.4, 0.4, 0.4, 0.7, 1.2, 2.0)]
    assert said[:7] == [""] * 7
    assert "entropy runs away" in said[7]


def test_a_stage_that_is_never_won_is_named_before_the_model_collapses() -> None:
    """On an H200 SmolLM2 won no game on 4x4 to 64 and settled on one key from step 34 on.  The watcher said that random
    moves would do as well, and asked for a harder stage."""
    watcher = watcher_of(patience=100)
    step = dataclasses.replace(HEALTHY, won=0.0)
    said = [watcher.look(step, {}) for _ in range(11)]
    assert said[:10] == [""] * 10
    assert "raise --generations, or begin --ladder with an easier stage" in said[10]
    assert watcher.look(dataclasses.replace(step, won=0.1), {}) != said[10]


def step_of(sources: str, scores: str, groups: int) -> watcher.StepSummary:
    """A step whose programs, a letter each, play a game each, to a score of one digit."""
    rows = [
        {"text": "", "source": source, "works": "load", "cheating": "", "reward": 1.0,
         "results": [{"outcome": "stuck", "max_tile": 64, "steps": 9, "score": int(score), "detail": ""}]}
        for source, score in zip(sources, scores, strict=True)
    ]  # fmt: skip
    row = {"size": 6, "target": 2048, "completions": rows}
    return watcher.StepSummary.of(row, [False] * groups, 1.0)


@pytest.mark.parametrize(("sources", "commonest"), [("1234", 0.0), ("1123", 0.5), ("1111", 1.0)])
def test_two_different_answers_are_not_one_program(sources: str, commonest: float) -> None:
    """Of a group of two each has half of the answers.  So the published recipe, which has such groups, was said to
    collapse in every step, while SmolLM2's trouble was that it won no game."""
    step = step_of(sources, sources, groups=2)
    assert step.commonest == commonest
    assert ("most answers play as one program" in watcher_of().look(step, {})) == (commonest >= 0.5)


def test_one_key_in_many_spellings_is_a_collapse() -> None:
    """`return "s" if board[0] == "s" else "d"` is `return "d"`.  With the published recipe three in four of SmolLM2's
    last answers were one key behind such a condition.  Each had another text, so nothing was said for ten steps, and
    then that random moves would do as well."""
    step = step_of("abcdefgh", "22222213", groups=1)
    assert (step.distinct, step.commonest, step.identical) == (1.0, 0.75, False)
    assert watcher_of().look(step, {}).startswith("collapsing, most answers play as one program")


def test_a_trouble_that_lasts_is_named_now_and_then() -> None:
    watcher = watcher_of(patience=100)
    step = dataclasses.replace(HEALTHY, works=0.0)
    said = [bool(watcher.look(step, {})) for _ in range(15)]
    assert [i for i, spoke in enumerate(said) if spoke] == [0, 10]


def test_collapse_is_proven_by_lost_steps_in_a_row() -> None:
    watcher = watcher_of(patience=3)
    for flat in (1.0, 1.0, 0.5, 1.0, 1.0):  # one step with a gradient begins the count anew
        watcher.look(dataclasses.replace(HEALTHY, flat=flat), {})
        assert not watcher.ended
    watcher.look(dataclasses.replace(HEALTHY, flat=1.0), {})
    assert watcher.ended


def test_a_solved_task_is_no_collapse() -> None:
    watcher = watcher_of(patience=1)
    watcher.look(dataclasses.replace(HEALTHY, won=1.0, flat=1.0), {})
    assert not watcher.ended


def test_a_solved_stage_is_no_trouble_where_a_harder_one_follows() -> None:
    solved = dataclasses.replace(HEALTHY, won=1.0, random_won=0.5, flat=1.0, identical=True)
    assert watcher_of(patience=1, curriculum=True).look(solved, {}) == ""


def test_it_is_said_when_random_moves_would_do_as_well() -> None:
    """The first steps of a stage do not count, because no program can be better yet."""
    watcher = watcher_of(patience=20)
    said = [watcher.look(dataclasses.replace(HEALTHY, size=size), {}) for size in [6] * 12 + [4] * 10]
    assert [i for i, word in enumerate(said) if "random moves would do as well" in word] == [10]
    better = dataclasses.replace(HEALTHY, size=4, random_won=0.3)
    assert watcher.look(better, {}) == ""


def last_view(troubles: list[str], source: str = "def strategy(board):", width: int = 100, height: int = 40) -> str:
    """The terminal's text after so many steps with rising rewards."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system=None, width=width, height=height)
    with watch.TrainingView(console, steps=9) as view:
        for number, trouble in enumerate(troubles, 1):
            screen.truncate(screen.seek(0))
            step = dataclasses.replace(HEALTHY, reward=float(number), outcomes={"success": 0.25, "lost": 0.75})
            view.step(number, step, 50.0, 60.0, 120.0, trouble, trouble, (source, 512.0, 2))
        return screen.getvalue()


def test_a_terminal_has_one_view_of_it_all() -> None:
    shown = last_view(["", "", ""])
    for part in ("step 3/9", "0:08:00 left", "▁▅█", "success 25%  lost 75%", "mean tile 512 in step 2", "def strategy"):
        assert part in shown
    assert "warning" not in shown


def test_a_log_says_how_long_it_will_take() -> None:
    """Only a terminal was told.  The first step, which compiles, does not count."""
    said = io.StringIO()
    view = watch.TrainingView(Console(file=said, width=100), steps=9)
    for number, seconds in enumerate((300.0, 60.0, 60.0, 60.0), 1):
        view.step(number, HEALTHY, 50.0, seconds, 120.0, "", "", None)
    assert said.getvalue().count("left") == 1
    assert said.getvalue().splitlines()[3] == "  about 0:08:00 left, 0:02:00 of them evaluations"


def test_the_collapse_of_a_real_model_is_named_before_it_is_complete() -> None:
    """SmolLM2 with a high rate and without its example ends at `return "a"`: 12 of 16 answers in step 14.  The first
    run that did, in eleven steps, was told that random moves would do as well.

    `train --model smollm2 --keys wasd --generations 16 --batch-size 16 --accumulation 1 --learning-rate 3e-4
    --warmup-steps 3 --objective mean --example blank --no-curriculum --temperature 1.0 --seed 1`, from step 8 on.
    """
    watched, said, constant = watcher_of(), dict[int, str](), dict[int, int]()
    for line in (Path(__file__).parent.parent / "recorded_collapse.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        said[row["step"]] = watched.look(watcher.StepSummary.of(row, [False], 1.0), {})
        constant[row["step"]] = [done["source"] for done in row["completions"]].count(
            'def strategy(board):\n    return "a"'
        )
    assert constant == {8: 0, 9: 3, 10: 6, 11: 7, 12: 8, 13: 8, 14: 12}
    assert {step for step, warning in said.items() if warning} == {12}
    assert said[12].startswith("collapsing, most answers are one program: lower --learning-rate")


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


def test_the_view_fits_a_small_terminal() -> None:
    """Its line of figures was 86 characters long, and the program alone had 18 lines."""
    shown = last_view(["", "", "all lost"], "\n".join(f"line {i} " + 100 * "x" for i in range(50)), width=80, height=24)
    lines = [re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", line) for line in shown.splitlines()]
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    assert "distinct  90%" in shown


def test_a_small_terminal_shows_what_matters_first() -> None:
    """The warning stood below the curve and the ends of the games, where a program pushed it out of 24 lines."""
    trouble = "the jail ends most games (`detail` in rollouts.jsonl says why): lower --temperature or --learning-rate"
    shown = last_view(["", trouble], "\n".join(f"line {i}" for i in range(50)), width=80, height=24)
    assert len(shown.splitlines()) <= 24
    places = [shown.index(part) for part in ("step 2/9", "warning: ", "won", "reward ▁█", "games: ", "best program")]
    assert places == sorted(places)


def test_of_a_program_the_view_shows_what_others_do_not_have() -> None:
    """The panel ended before the part in which good programs differ."""
    usual = ["def slide(row):", "    return row", "def strategy(board):"]
    source = "\n".join([usual[0], "    x = 1", *usual[1:], "    return 'a'"])
    assert watch.excerpt(source, usual, 9) == "...\n    x = 1\n...\n    return 'a'"
    assert watch.excerpt("\n".join(usual), usual, 2) == "def slide(row):\n    return row\n..."


def test_a_trouble_stands_there_for_as_long_as_it_lasts() -> None:
    assert "warning: all lost" in last_view(["", "all lost"])
    assert "warning" not in last_view(["all lost", ""])


def test_a_program_cannot_take_the_terminal_over() -> None:
    shown = last_view([""], "[bold]x = '\x1b[2J'[/bold]")
    assert "[bold]x = '\\x1b[2J'[/bold]" in shown


def make_noise(folder: str) -> None:
    """Without a corpus its tokens are bytes: a part of a program alone can be a strategy that loads."""
    tiny.warm_start(program.game_spec(), config=tiny.WarmStartConfig(steps=1, batch=4, corpus=0), folder=Path(folder))


@pytest.mark.slow
def test_a_run_that_never_learns_stops_and_says_so(tmp_path: Path) -> None:
    """A model of random weights writes noise for ever: two lost steps end it, saved, with exit code 3.

    All rewards are equal but an entropy bonus is not, which alone must not move the weights.
    """
    noise = tmp_path / "noise"
    call(make_noise, noise)
    numbers = {"steps": 50, "generations": 4, "batch-size": 4, "accumulation": 1, "games": 2, "ladder": "4:64",
               "max-new-tokens": 8, "patience": 2, "entropy-coef": 0.1, "best-of": 4}  # fmt: skip
    words = [*HELD_OUT, *(text for name, value in numbers.items() for text in (f"--{name}", str(value)))]
    done = run("--model", noise, "--output-dir", tmp_path, "--run-name", "lost", "--json", *words)
    assert done.returncode == 3, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["steps"], result["collapsed"], result["scores"]["3x3"]["best"]) == (2, True, None)
    assert "warning: " in done.stderr
    assert (tmp_path / "lost" / "checkpoint-2").is_dir()
    assert "no gradient in 100% of groups" in done.stderr
    weights = load_file(tmp_path / "lost" / "adapter" / "adapter_model.safetensors")
    assert not any(tensor.any() for name, tensor in weights.items() if "lora_B" in name)  # no step was taken


def train_with_broken_gradients(out: str, broken: str, status: str) -> None:
    """A run in which the advantages of these steps are NaN."""
    keep = program.without_flat_groups
    number = map(str, range(1, 100))

    def changed(batch: dict[str, Any], flat: Any, by_token: bool) -> dict[str, Any]:
        batch = keep(batch, flat, by_token)
        return batch | {"advantages": batch["advantages"] * math.nan} if next(number) in broken else batch

    program.without_flat_groups = changed
    words = flags(output_dir=out, run_name="run", steps=4, save_steps=1)
    assert program.main([*words, "--quiet"]) == int(status)


def adapter_after(out: Path, step: int) -> dict[str, Any]:
    return dict(load_file(out / "run" / f"checkpoint-{step}" / "adapter_model.safetensors"))


@pytest.mark.slow
def test_a_step_without_a_finite_gradient_is_left_out(base: Path, tmp_path: Path) -> None:
    """One NaN made all weights NaN: the log showed a loss of 0, and no checkpoint could be resumed."""
    call(train_with_broken_gradients, tmp_path, "2", 0)
    first, second, third = (adapter_after(tmp_path, step) for step in (1, 2, 3))
    assert all(np.array_equal(weights, second[name]) for name, weights in first.items())
    assert any(not np.array_equal(weights, third[name]) for name, weights in second.items())
    assert all(np.isfinite(weights).all() for weights in third.values())


@pytest.mark.slow
def test_three_steps_without_a_finite_gradient_end_the_run(base: Path, tmp_path: Path) -> None:
    """Its weights are good, and its page is written."""
    call(train_with_broken_gradients, tmp_path, "234", 3)
    assert all(np.isfinite(weights).all() for weights in adapter_after(tmp_path, 4).values())
    assert "no finite gradient" in json.loads((tmp_path / "run" / "result.json").read_text())["ended"]
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_difference_that_rounding_may_explain_ends_nothing_at_once() -> None:
    """A run that costs money ends after three steps, or after a large one."""
    small, large = ({"sampler/gap": gap, "sampler/limit": 0.1} for gap in (0.2, 0.6))
    watched = watcher_of()
    for _ in range(2):
        assert "another model" in watched.look(HEALTHY, small)
        watched.trouble = ""
        assert not watched.ended
    watched.look(HEALTHY, small)
    assert watched.ended
    watched = watcher_of()
    watched.look(HEALTHY, large)
    assert watched.ended


def test_a_run_that_ended_for_another_model_can_go_on() -> None:
    """Resuming looks at all its steps again, and the last one of those is not the next one."""
    watched = watcher_of()
    watched.look(HEALTHY, {"sampler/gap": 0.6, "sampler/limit": 0.1})
    watched.look(HEALTHY, {"sampler/gap": 0.001, "sampler/limit": 0.1})
    assert not watched.ended
