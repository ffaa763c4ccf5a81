#!/usr/bin/env python3
"""The cost of watching, recording and checkpoints: steps of the program against steps of TRL's own trainer.

    python benchmarks/bench_overhead.py

Both train the embedded model from the same start on the same boards with the same rewards and players, in turns.  TRL's
trainer has no rollouts.jsonl, watcher, live view, TensorBoard or checkpoints.  Random numbers are equal, so both write
and play the same programs, which is checked.  Prints a table and one JSON line; exits with code 1 if ours takes more
than 5% longer.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tyro  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import gpt_2048_rl as program  # noqa: E402
from toolkit.games import programs  # noqa: E402
from toolkit.model import machine, tiny  # noqa: E402
from toolkit.run import watch  # noqa: E402

SIDES, LIMIT = ("trl", "ours"), 1.05


@dataclass(frozen=True)
class Args:
    """What to measure."""

    repetitions: int = 3  # per side, in turns
    steps: int = 10  # per repetition; the first is not measured
    save_steps: int = 5  # checkpoints, texts and pictures four times as often as by default


def steps_of(side: str, args: Args, folder: Path) -> tuple[list[float], list[str]]:
    """Seconds of each step, and the completions of the last one."""
    config = replace(
        program.train_defaults("tiny", "stable", "none"),
        steps=args.steps,
        save_steps=args.save_steps,
        output_dir=folder.parent,
        run_name=folder.name,
    )
    model, tokenizer = program.load_model("tiny", config, lambda _: None)
    model = program.add_adapters(model, config)
    folder.mkdir()
    stage = program.Stage(6, 2048)
    ladder = program.Ladder([stage])
    rollouts = program.Rollouts(folder / "rollouts.jsonl", config, ladder)
    rows = program.training_set(config, ladder)
    ends: list[float] = []
    last: list[str] = []
    if side == "trl":
        trainer = bare(program.make_trainer(model, tokenizer, config, folder, rollouts, rows), rows)
        record(trainer, ends, last)
        trainer.train()
    else:
        games = programs.BackgroundGames([stage], partial(program.Evaluator, config))
        with (folder / "log").open("w") as file:
            progress = watch.Progress(rollouts, games, folder, Console(file=file, force_terminal=True))
            trainer = program.make_trainer(model, tokenizer, config, folder, rollouts, rows, progress)
            record(trainer, ends, last)
            progress.begin(trainer)
            with progress.watching():
                trainer.train()
    return [after - before for before, after in pairwise(ends)], last


def bare(trainer: Any, rows: Any) -> Any:
    """TRL's own trainer with the same arguments, model, rewards and rows."""
    from trl import GRPOTrainer

    trainer.args.save_strategy = "no"
    return GRPOTrainer(
        model=trainer.model,
        processing_class=trainer.processing_class,
        args=trainer.args,
        reward_funcs=[*program.REWARDS, program.ends_in_time],
        train_dataset=rows,
    )


def record(trainer: Any, ends: list[float], last: list[str]) -> None:
    """Record when each step ends, and the completions of the last one."""
    from transformers import PrinterCallback, TrainerCallback

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    first = trainer.reward_funcs[0]

    def kept(completions: Any, **columns: Any) -> list[float]:
        last[:] = map(program.completion_text, completions)
        rewards: list[float] = first(completions, **columns)
        return rewards

    kept.__name__ = first.__name__
    trainer.reward_funcs[0] = kept
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Ends())


def main(args: Args) -> int:
    """Measure and print."""
    machine.prepare_environment(offline=True)
    tiny.warm_start(program.game_spec())
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}  # per step, the mean of a repetition
    written: set[tuple[str, ...]] = set()
    with tempfile.TemporaryDirectory() as scratch:
        for repetition in range(args.repetitions):
            for side in SIDES:
                times, last = steps_of(side, args, Path(scratch) / f"{repetition} {side}")
                seconds[side].append(statistics.fmean(times[1:]))
                written.add(tuple(last))
    if len(written) > 1:
        raise SystemExit("the sides have trained different models: their times say nothing")
    ratios = {side: [ours / trl for ours, trl in zip(seconds[side], seconds["trl"], strict=True)] for side in SIDES}
    table = Table("", "s a step", "against TRL's trainer", title=f"{args.repetitions} x {args.steps - 1} steps")
    for side in SIDES:
        rows = (sorted(seconds[side]), sorted(ratios[side]))
        table.add_row(side, *(f"{statistics.median(row):.2f} ({row[0]:.2f} to {row[-1]:.2f})" for row in rows))
    Console().print(table)
    met = statistics.median(ratios["ours"]) <= LIMIT
    print(json.dumps({"args": asdict(args), "cores": os.cpu_count(), "seconds": seconds, "ratios": ratios, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
