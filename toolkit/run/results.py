"""The end of a run: its best program, the comparison with the controls, result.json, the page."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit import OutOfMemory, ServerFailed, UsageError
from toolkit.base import files
from toolkit.base.ranks import RANK, RANKS, by_first_rank
from toolkit.games import duration, evaluation
from toolkit.games.programs import (
    BackgroundGames,
    Evaluator,
    GameResult,
    Race,
    best_game,
    evaluate_model,
    race,
    sampled_programs,
)
from toolkit.model.models import adapter_base
from toolkit.run import checkpoints, report, runs, steps, watch
from toolkit.run.card import model_card

if TYPE_CHECKING:
    from rich.console import Console

QUICK_GAMES, QUICK_BOARDS = 64, 8  # for the best program of an interrupted run
COOL = 0.4  # temperature of the answers that the trained model is surest of
BEST_OF_N = "best_of_n"  # in result.json, and the name of the files that hold the programs


def board_names(evaluator: Evaluator) -> list[str]:
    """The names of a stage's held-out boards."""
    return [evaluation.board_name(evaluator.size, seed) for seed in evaluator.held_out_seeds]


def stage_result(
    evaluator: Evaluator, scores: Mapping[str, evaluation.Score | None], others: Mapping[str, evaluation.Score]
) -> dict[str, Any]:
    """A stage's entry in result.json; `others` are the controls."""
    return {
        "target": evaluator.target,
        **{player: found and asdict(found) for player, found in scores.items()},
        "controls": {name: asdict(found) for name, found in others.items()},
        "boards": board_names(evaluator),
    }


def choose_best(evaluator: Evaluator, run: Path, games: int, first: Sequence[str] = ()) -> Race:
    """Find a run's best program and leave it in its folder.  Candidates: the `first` ones, then those of training."""
    found = race(evaluator, [*first, *steps.programs_to_race(run / "rollouts.jsonl")], games)
    for source in found.ranking[:1]:
        runs.write_program(run / runs.BEST_PROGRAM, source, evaluator.config)
        (run / "best_game.json").unlink(missing_ok=True)  # of an earlier result
    return found


def keep_game(evaluator: Evaluator, run: Path, step: int, source: str, games: Sequence[GameResult]) -> None:
    """Leave the best of the best program's games on held-out boards in a run's folder and among its curves."""
    game = best_game(evaluator, games)
    files.write_whole(run / "best_game.json", json.dumps(game) + "\n")
    if "tensorboard" in evaluator.config.report_to:
        watch.show_best(run, step, source, game)


def keep_quick_best(evaluator: Evaluator, run: Path, step: int) -> None:
    """Find and keep the best program of an interrupted run."""
    for source in choose_best(evaluator, run, QUICK_GAMES).ranking[:1]:
        (games,) = evaluator.play([source], evaluator.held_out_seeds[:QUICK_BOARDS], record=True)
        keep_game(evaluator, run, step, source, games)


def keep_best_of_n(evaluator: Evaluator, run: Path, found: Race) -> None:
    """Leave the best of the untrained model's programs in a run's folder."""
    runs.write_program(run / f"{BEST_OF_N}.py", found.ranking[0], evaluator.config)
    files.write_whole(run / f"{BEST_OF_N}.json", json.dumps(found.ranking[:100], indent=1) + "\n")


def score_untrained(
    run: Path, games: BackgroundGames, model: Any, tokenizer: Any, say: Callable[[Any], None]
) -> dict[str, evaluation.Score]:
    """The scores by stage of the model that the run began with.  They are measured once in a run, after training,
    because the first step should not wait for them, and once more where the boards have changed."""
    file, boards = run / "before.json", {stage: board_names(here) for stage, here in games.evaluators.items()}
    found = by_first_rank(partial(files.read_json, file))
    with files.naming(file):
        if {stage: row.get("boards") for stage, row in found.items()} == boards:
            return {stage: evaluation.read_score(row) for stage, row in found.items()}
    say(f"playing {games.boards} held-out boards with the untrained model")
    with model.disable_adapter():
        scores = evaluate_model(games.evaluators, model, tokenizer)
    if RANK == 0:
        rows = {stage: {"boards": boards[stage], **asdict(score)} for stage, score in scores.items()}
        files.write_whole(file, json.dumps(rows) + "\n")
    return scores


def write_result(
    progress: watch.Progress,
    before: Mapping[str, evaluation.Score],
    after: Mapping[str, evaluation.Score],
    best: Race,
    count: int,
    untrained: Sequence[str],
    started: float,
    say: Callable[[Any], None],
) -> tuple[dict[str, Any], str]:
    """Compare a run with the controls and write result.json and the page.  Returns the result and the best program.

    `untrained` are the programs in `count` answers of the untrained model.
    """
    evaluator, run, games = progress.evaluator, progress.run, progress.games
    races = {"best": best.summary()}
    if untrained:
        say(f"choosing the best of {len(untrained)} programs of the untrained model")
        found = race(evaluator, untrained, evaluator.config.race_games)
        keep_best_of_n(evaluator, run, found)
        games.add({BEST_OF_N: found.ranking[0]})
        races[BEST_OF_N] = {"sampled": count, **found.summary()}
    say("playing the held-out boards with the best programs and the controls")
    scores, played = {}, games.scores()
    for stage, here in games.evaluators.items():
        reached = played[stage].pop(evaluation.BEST, None)
        known = {"before": before[stage], "after": after[stage], "best": reached}
        scores[stage] = stage_result(here, known, played[stage])
    source = best.ranking[0] if best.ranking else ""
    if source:
        keep_game(evaluator, run, progress.steps, source, games.games[next(iter(scores)), evaluation.BEST])
    result = {
        "scores": scores,
        "races": races,
        **progress.result(),
        "run": str(run),
        "ranks": RANKS,
        "jailed": not files.read_json(run / "config.json").get("unsafe_no_jail"),  # in all sessions of the run
        "seconds": round(time.monotonic() - started, 1),
    }
    lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in result.items())
    files.write_whole(run / "result.json", "{\n" + ",\n".join(lines) + "\n}\n")  # one line per entry
    card = model_card(str(adapter_base(str(run / "adapter"))), "lora", run)
    for folder in (run, run / "adapter"):  # instead of the libraries' own
        files.write_whole(folder / "README.md", card)
    say(report.try_report(run))
    return result, source


def again(run: Path, config: Any) -> str:
    """The command that goes on with a run."""
    folder = [] if run.parent == Path("outputs") else ["--output-dir", str(run.parent)]
    return shlex.join(["python", "gpt_2048_rl.py", *folder, "--run-name", run.name, *runs.permissions(config)])


@contextlib.contextmanager
def saying_how_to_go_on(run: Path, config: Any, say: Callable[[Any], None]) -> Iterator[None]:
    """Where memory runs out or a server fails, write the page of what there is, and say how to go on."""
    try:
        yield
    except (OutOfMemory, ServerFailed) as error:  # of this rank: others may wait for it, so nothing is asked of them
        if RANK == 0:
            say(report.try_report(run))
        if isinstance(error, ServerFailed):
            say(f"to resume: {again(run, config)}")
        elif error.resume_with:
            say(f"to resume: {again(run, config)} {error.resume_with}")
        raise


def conclude(progress: watch.Progress, model: Any, tokenizer: Any, started: float, console: Console) -> dict[str, Any]:
    """End a run that has trained: evaluate the model, choose the best programs, and leave the result and the page.

    `started` is the run's time.monotonic().  The result is printed on `console`.  Returns what --json prints.
    """
    evaluator, run = progress.evaluator, progress.run
    config = evaluator.config
    say: Callable[[Any], None] = (lambda _: None) if config.quiet else partial(console.print, soft_wrap=True)
    by_first_rank(partial(checkpoints.keep_config, run, run / "adapter"))
    if progress.interrupted:
        say("choosing the best program so far (Ctrl-C skips this)")
        by_first_rank(partial(keep_quick_best, evaluator, run, progress.steps))
        say(by_first_rank(partial(report.try_report, run)))
        say(f"stopped after step {progress.steps}; to resume: {again(run, config)}")
        return {"run": str(run), "steps": progress.steps, "interrupted": progress.interrupted}
    if progress.ended:
        say(f"stopped at step {progress.steps}: {progress.ended}")
    try:
        with runs.Interruption():
            say(f"playing {progress.games.boards} held-out boards with the trained model")
            after = evaluate_model(progress.games.evaluators, model, tokenizer)
            say("choosing the best program of the run")
            sure = sampled_programs(
                evaluator, model, tokenizer, duration.SURE, temperature=min(COOL, config.temperature)
            )
            best = by_first_rank(partial(choose_best, evaluator, run, config.race_games, sure))
            if best.ranking and RANK == 0:
                progress.games.add({evaluation.BEST: best.ranking[0]})  # while the untrained model writes
            before = score_untrained(run, progress.games, model, tokenizer, say)
            count = duration.control_answers(config.best_of, progress.result()["judged"])
            if count:
                say(f"sampling {count} programs from the untrained model, as a control")
            with model.disable_adapter():
                untrained = sampled_programs(evaluator, model, tokenizer, count)
            write = partial(write_result, progress, before, after, best, count, untrained, started, say)
            result, source = by_first_rank(write)
    except (KeyboardInterrupt, SystemExit):
        say(report.try_report(run))
        say(f"training is complete, its evaluation is not; to repeat that: {again(run, config)}")
        raise
    watch.show_scores(console, result)
    if source:
        say(f"the best program ({run / runs.BEST_PROGRAM}):\n\n{source}")
    return result


def conclude_evaluation(
    model: str,
    games: BackgroundGames,
    scores: Mapping[str, evaluation.Score],
    jailed: bool,
    started: float,
    console: Console,
) -> dict[str, Any]:
    """Compare a model or a program with the controls, and with the best of N if `model` is part of a run.

    `scores` are a model's by stage; a program's are among the `games`.  Prints the tables.  Returns what `eval --json`
    prints.
    """
    file, keys = Path(model).parent / f"{BEST_OF_N}.py", next(iter(games.evaluators.values())).config.keys
    with contextlib.suppress(UsageError, OSError, UnicodeDecodeError):  # a damaged file costs no evaluation
        if file.is_file() and runs.options_of(file, ("keys",)) == ["--keys", keys]:  # with others it would win nothing
            games.add({BEST_OF_N: file.read_text(encoding="utf-8")})
    found, played = {}, games.scores()
    for stage, here in games.evaluators.items():
        known = {evaluation.MODEL: scores.get(stage) or played[stage].pop(evaluation.MODEL)}
        found[stage] = stage_result(here, known, played[stage])
    result = {"model": model, "scores": found, "seconds": round(time.monotonic() - started, 1), "jailed": jailed}
    watch.show_scores(console, result)
    return result
