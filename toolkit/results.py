"""The end of a run: its best program, the comparison with the controls, result.json, the page."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit import evaluation, report, runs, watch
from toolkit.bars import in_parts
from toolkit.export import model_card
from toolkit.machine import adapter_base
from toolkit.programs import (
    PART,
    Evaluator,
    GameResult,
    Race,
    best_game,
    controls,
    evaluate,
    evaluate_all,
    evaluate_model,
    race,
    score,
    untrained_programs,
)
from toolkit.ranks import RANKS, by_first_rank

if TYPE_CHECKING:
    from rich.console import Console

QUICK_SECONDS, QUICK_BOARDS = 10.0, 8  # for the best program of an interrupted run
BEST_OF_N = "best_of_n"  # in result.json, and the name of the files that hold the programs


def board_names(evaluator: Evaluator) -> list[str]:
    """A name for each held-out board, by which runs are compared.  It tells nothing about the seed."""
    return [hashlib.sha256(f"{evaluator.size} {seed}".encode()).hexdigest()[:12] for seed in evaluator.held_out]


def stage_result(
    evaluator: Evaluator, scores: Mapping[str, evaluation.Score | None], others: Mapping[str, evaluation.Score]
) -> dict[str, Any]:  # fmt: skip
    """A stage's entry in result.json; `others` are the controls."""
    return {
        "target": evaluator.target,
        **{player: found and asdict(found) for player, found in scores.items()},
        "controls": {name: asdict(found) for name, found in others.items()},
        "boards": board_names(evaluator),
    }


def keep_best(
    evaluator: Evaluator, run: Path, step: int, seconds: float, boards: int | None = None
) -> tuple[Race, Sequence[GameResult]]:  # fmt: skip
    """Find a run's best program and leave it in the run's folder, with its best game on the first held-out boards.

    Returns the race and these games; there are none if no program loaded.
    """
    found = race(evaluator, runs.programs_to_race(run / "rollouts.jsonl"), seconds)
    if not found.ranking:
        return found, []
    source = found.ranking[0]
    parts = (evaluator.play([source], part, record=True)[0] for part in
             in_parts(evaluator.held_out[:boards], "playing", PART))  # fmt: skip
    games = list(chain(*parts))
    game = best_game(evaluator, games)
    runs.write_program(run / "best_strategy.py", source, evaluator.config)
    runs.write_whole(run / "best_game.json", json.dumps(game) + "\n")
    watch.show_best(run, step, source, game)
    return found, games


def keep_best_of_n(evaluator: Evaluator, run: Path, untrained: Sequence[str], seconds: float) -> Race:
    """Find the best of the untrained model's programs as the run's best is found, and leave it in the run's folder."""
    found = race(evaluator, untrained, seconds)
    if found.ranking:
        runs.write_program(run / f"{BEST_OF_N}.py", found.ranking[0], evaluator.config)
        runs.write_whole(run / f"{BEST_OF_N}.json", json.dumps(found.ranking[:100], indent=1) + "\n")
    return found


def write_result(
    progress: watch.Progress, after: Mapping[str, evaluation.Score], count: int, untrained: Sequence[str], jailed: bool,
    started: float, say: Callable[[Any], None],
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """Compare a run with the controls and write result.json and the page.  Returns the result and the best program.

    `untrained` are the programs in `count` answers of the untrained model.
    """
    evaluator, run = progress.evaluator, progress.run
    seconds = evaluator.config.race_seconds
    say(f"choosing the best program of the run, in {seconds:.0f} s")
    best, games = keep_best(evaluator, run, progress.steps, seconds)
    races, untaught = {"best": best.summary()}, dict[str, str]()
    if untrained:
        say(f"choosing the best of {len(untrained)} programs of the untrained model, in {seconds:.0f} s")
        found = keep_best_of_n(evaluator, run, untrained, seconds)
        untaught[BEST_OF_N], races[BEST_OF_N] = found.ranking[0], {"sampled": count, **found.summary()}
    say("playing the held-out boards with the controls")
    played, scores = progress.controls.scores(), {}
    for stage, here in progress.evaluators.items():
        reached = None
        if best.ranking:
            reached = score(here, games) if here is evaluator else evaluate(here, best.ranking[:1])[0]
        known = {"before": progress.before[stage], "after": after[stage], "best": reached}
        scores[stage] = stage_result(here, known, played[stage] | evaluate_all(here, untaught))
    result = {
        "scores": scores,
        "races": races,
        **progress.result(),
        "run": str(run),
        "ranks": RANKS,
        "jailed": jailed,
        "seconds": round(time.monotonic() - started, 1),
    }
    runs.write_result(run, result)
    card = model_card(str(adapter_base(str(run / "adapter"))), "lora", run)
    for folder in (run, run / "adapter"):  # instead of the libraries' own
        runs.write_whole(folder / "README.md", card)
    say(report.try_report(run))
    return result, best.ranking[0] if best.ranking else ""


def conclude(
    progress: watch.Progress, model: Any, tokenizer: Any, jailed: bool, started: float, console: Console
) -> dict[str, Any]:  # fmt: skip
    """End a run that has trained: evaluate the model, choose the best programs, and leave the result and the page.

    `started` is the run's time.monotonic().  The result is printed on `console`.  Returns what --json prints.
    """
    evaluator, run = progress.evaluator, progress.run
    config = evaluator.config
    say: Callable[[Any], None] = (lambda _: None) if config.quiet else partial(console.print, soft_wrap=True)
    by_first_rank(partial(runs.keep_config, run, run / "adapter"))
    if progress.interrupted:
        say("choosing the best program so far (Ctrl-C skips this)")
        by_first_rank(partial(keep_best, evaluator, run, progress.steps, QUICK_SECONDS, QUICK_BOARDS))
        say(by_first_rank(partial(report.try_report, run)))
        say(f"stopped after step {progress.steps}; to resume: --run-name {run.name}")
        return {"run": str(run), "steps": progress.steps, "interrupted": progress.interrupted}
    if progress.collapsed:
        say(f"stopped at step {progress.steps}: nothing to learn for {config.patience} steps in a row (--patience)")
    try:
        say(f"playing {config.games} held-out boards with the trained model")
        after = evaluate_model(progress.evaluators, model, tokenizer)
        count = progress.result()["judged"] if config.best_of < 0 else config.best_of
        if count:
            say(f"sampling {count} programs from the untrained model")
        untrained = untrained_programs(evaluator, model, tokenizer, count)
        write = partial(write_result, progress, after, count, untrained, jailed, started, say)
        result, source = by_first_rank(write)
    except KeyboardInterrupt:
        say(report.try_report(run))
        say(f"training is complete, its evaluation is not; to repeat that: --run-name {run.name}")
        raise
    watch.show_scores(console, result)
    if source:
        say(f"the best program ({run / 'best_strategy.py'}):\n\n{source}")
    return result


def conclude_evaluation(
    model: str, evaluators: Mapping[str, Evaluator], scores: Mapping[str, evaluation.Score], jailed: bool,
    started: float, console: Console,
) -> dict[str, Any]:  # fmt: skip
    """Compare a model or a program with the controls, and with the best of N if `model` is part of a run.

    Prints the tables.  Returns what `eval --json` prints.
    """
    programs = controls(next(iter(evaluators.values())).keys)
    if (file := Path(model).parent / f"{BEST_OF_N}.py").is_file():
        programs[BEST_OF_N] = file.read_text(encoding="utf-8")
    found = {stage: stage_result(here, {"model": scores[stage]}, evaluate_all(here, programs))
             for stage, here in evaluators.items()}  # fmt: skip
    result = {"model": model, "scores": found, "seconds": round(time.monotonic() - started, 1), "jailed": jailed}
    watch.show_scores(console, result)
    return result
