"""The end of a run: its best program, the comparison with the controls, result.json, the page."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit import report, runs, watch
from toolkit.programs import Evaluator, best_game, evaluate_controls
from toolkit.ranks import RANKS, by_first_rank

if TYPE_CHECKING:
    from rich.console import Console


def board_names(evaluator: Evaluator) -> list[str]:
    """A name for each held-out board, by which runs are compared.  It tells nothing about the seed."""
    return [hashlib.sha256(f"{evaluator.size} {seed}".encode()).hexdigest()[:12] for seed in evaluator.held_out]


def keep_best(evaluator: Evaluator, run: Path, step: int) -> tuple[str, runs.Score | None]:
    """Choose a run's best program and leave it in the run's folder, with its best held-out game.

    The candidates are the programs with the largest tiles in training (--finalists).  The one with the highest score on
    four further boards is the best.  Returns its source and its score on the held-out boards; "" and None where no
    program played.
    """
    sources = runs.finalists(run / "rollouts.jsonl", evaluator.config.finalists)
    if not sources:
        return "", None
    scores = [sum(game.score for game in games) for games in evaluator.play(sources, evaluator.boards(4, "final"))]
    source = sources[scores.index(max(scores))]
    (games,) = evaluator.play([source], evaluator.held_out, record=True)
    game = best_game(evaluator, games)
    runs.write_whole(run / "best_strategy.py", source + "\n")
    runs.write_whole(run / "best_game.json", json.dumps(game) + "\n")
    watch.show_best(run, step, source, game)
    return source, runs.score([game.max_tile for game in games], evaluator.target)


def write_result(
    progress: watch.Progress, after: runs.Score, jailed: bool, started: float, say: Callable[[Any], None]
) -> tuple[dict[str, Any], str]:
    """Compare a run with the controls and write result.json and the page.  Returns the result and the best program."""
    say("playing them with both controls")
    controls = evaluate_controls(progress.evaluator)
    say("choosing the best program of the run, and playing them with it")
    source, best = keep_best(progress.evaluator, progress.run, progress.steps)
    result = {
        "before": asdict(progress.before),
        "after": asdict(after),
        "controls": {name: asdict(score) for name, score in controls.items()},
        "best": best and asdict(best),
        "boards": board_names(progress.evaluator),
        **progress.result(),
        "run": str(progress.run),
        "ranks": RANKS,
        "jailed": jailed,
        "seconds": round(time.monotonic() - started, 1),
    }
    runs.write_result(progress.run, result)
    say(report.try_report(progress.run))
    return result, source


def conclude(
    progress: watch.Progress, evaluate: Callable[[], runs.Score], jailed: bool, started: float, console: Console
) -> dict[str, Any]:
    """End a run that has trained: evaluate the model, choose the best program, and leave the result and the page.

    `evaluate` plays the held-out boards with the trained model; `started` is the run's time.monotonic().  The result is
    printed on `console`.  Returns what --json prints.
    """
    config, run = progress.evaluator.config, progress.run
    say: Callable[[Any], None] = (lambda _: None) if config.quiet else partial(console.print, soft_wrap=True)
    if progress.interrupted:
        say("choosing the best program so far (Ctrl-C skips this)")
        by_first_rank(partial(keep_best, progress.evaluator, run, progress.steps))
        say(by_first_rank(partial(report.try_report, run)))
        say(f"stopped after step {progress.steps}; to resume: --run-name {run.name}")
        return {"run": str(run), "steps": progress.steps, "interrupted": progress.interrupted}
    if progress.collapsed:
        say(f"stopped at step {progress.steps}: nothing to learn for {config.patience} steps in a row (--patience)")
    say(f"playing {config.games} held-out boards with the trained model")
    after = evaluate()
    result, source = by_first_rank(partial(write_result, progress, after, jailed, started, say))
    watch.show_scores(console, result, progress.evaluator.target)
    if source:
        say(f"the best program ({run / 'best_strategy.py'}):\n\n{source}")
    return result
