"""The watcher: every known way in which training goes wrong has a name and a remedy, and a healthy step has none."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import gpt_2048_rl as program
from tests.test_cli import run

HEALTHY = program.StepSummary(won=0.4, works=0.9, distinct=0.9, reward=8.0, spread=8.0, identical=False,
                              largest_tile=512, timeouts=0.0, scoring_seconds=1.0)  # fmt: skip
FLAT = {"frac_reward_zero_std": 1.0}


def test_a_healthy_step_is_silent() -> None:
    logs = {"frac_reward_zero_std": 0.0, "completions/clipped_ratio": 0.1, "entropy": 0.4}
    assert program.Watcher(patience=3).look(HEALTHY, logs) == ""


@pytest.mark.parametrize(
    ("change", "logs", "named"),
    [
        ({}, {"completions/clipped_ratio": 0.9}, "--max-new-tokens"),
        ({"works": 0.05}, {}, "valid code"),
        ({"identical": True, "won": 0.0}, FLAT, "all completions are equal"),
        ({"won": 0.0}, FLAT, "no gradient"),
        ({"won": 1.0, "identical": True}, FLAT, "raise --target"),
        ({"timeouts": 0.7}, {}, "--timeout"),
    ],
)
def test_a_trouble_is_named_with_its_remedy(change: dict[str, float], logs: dict[str, float], named: str) -> None:
    step = dataclasses.replace(HEALTHY, **change)  # type: ignore[arg-type]
    assert named in program.Watcher(patience=3).look(step, logs)


def test_entropy_that_runs_away_is_named() -> None:
    """As with an entropy bonus of 0.02 on the embedded model: 0.4 became 1.2 and more, and code turned to noise."""
    watcher = program.Watcher(patience=3)
    said = [watcher.look(HEALTHY, {"entropy": entropy}) for entropy in (0.4, 0.4, 0.4, 0.4, 0.4, 0.7, 1.2, 2.0)]
    assert said[:7] == [""] * 7
    assert "entropy runs away" in said[7]


def test_a_trouble_that_lasts_is_named_now_and_then() -> None:
    watcher = program.Watcher(patience=100)
    step = dataclasses.replace(HEALTHY, works=0.0)
    said = [bool(watcher.look(step, {})) for _ in range(2 * program.Watcher.REPEAT)]
    assert [i for i, spoke in enumerate(said) if spoke] == [0, program.Watcher.REPEAT]


def test_collapse_is_proven_by_lost_steps_in_a_row() -> None:
    watcher = program.Watcher(patience=3)
    lost = dataclasses.replace(HEALTHY, won=0.0)
    for logs in (FLAT, FLAT, {}, FLAT, FLAT):  # one step with a gradient begins the count anew
        watcher.look(lost, logs)
        assert not watcher.collapsed
    watcher.look(lost, FLAT)
    assert watcher.collapsed


def test_a_solved_task_is_no_collapse() -> None:
    watcher = program.Watcher(patience=1)
    watcher.look(dataclasses.replace(HEALTHY, won=1.0), FLAT)
    assert not watcher.collapsed


def test_a_run_that_never_learns_stops_and_says_so(tmp_path: Path) -> None:
    """A model of random weights writes noise for ever: two lost steps end it, saved, with exit code 3."""
    program.prepare_environment(offline=True)
    noise = program.warm_start(tmp_path / "noise", config=program.TinyConfig(steps=1, batch=4, corpus=50))
    numbers = {"steps": 50, "generations": 4, "batch-size": 4, "accumulation": 1, "games": 2, "target": 64,
               "max-new-tokens": 8, "patience": 2}  # fmt: skip
    flags = [text for name, value in numbers.items() for text in (f"--{name}", str(value))]
    done = run("--model", noise, "--output-dir", tmp_path, "--run-name", "lost", "--json", *flags)
    assert done.returncode == 3, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["steps"], result["collapsed"], result["best"]) == (2, True, None)
    assert "watch out: " in done.stderr
    assert (tmp_path / "lost" / "checkpoint-2").is_dir()
