"""The watcher: every known way in which training goes wrong has a name and a remedy, and a healthy step has none."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

import gpt_2048_rl as program
from tests.conftest import flags
from tests.helpers import HELD_OUT
from tests.preloaded import call, run
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


def test_less_reasoning_is_named_where_there_is_some() -> None:
    """SmolLM2, which has none, was told to take --reasoning none."""
    for effort in ("none", "low"):
        said = watcher_of(reasoning=effort).look(HEALTHY, {"completions/clipped_ratio": 0.9})
        assert ("--reasoning none" in said) is (effort != "none")


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
    --warmup-steps 3 --objective mean --example blank --no-curriculum --temperature 1.0 --seed 1`, from step 8 on.  The
    programs were played again, on two other boards a step, to have their scores.
    """
    watched, said, constant = watcher_of(), dict[int, str](), dict[int, int]()
    for line in (Path(__file__).parent.parent / "recorded_collapse.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        said[row["step"]] = watched.look(watcher.StepSummary.of(row, [False], 1.0), {})
        constant[row["step"]] = [done["source"] for done in row["completions"]].count(
            'def strategy(board):\n    return "a"'
        )
    assert constant == {8: 0, 9: 3, 10: 6, 11: 7, 12: 8, 13: 8, 14: 12}
    assert {step for step, warning in said.items() if warning} == {11}
    assert said[11].startswith("collapsing, most answers play as one program does: lower --learning-rate")


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
