"""A finished or unfinished run, read back for pages and comparisons."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit import UsageError, checked
from toolkit.base.files import naming, read_json
from toolkit.games.evaluation import HeldOut, read_scores
from toolkit.run.checkpoints import checkpoints
from toolkit.run.runs import BEST_PROGRAM, MADE_FOR
from toolkit.run.steps import Step, read_rollouts


@dataclass(frozen=True)
class Run:
    """Everything that pages and comparisons need of a run."""

    name: str
    config: dict[str, Any]
    result: dict[str, Any]  # result.json; empty if the run has not ended
    held_out: dict[str, HeldOut]  # by stage, the result first; empty if the run has not ended
    curves: dict[str, dict[int, float]]  # value by step
    steps: dict[int, Step]
    best: str  # source of the best program, or ""
    best_of_n: str  # of the untrained model, or ""
    game: dict[str, Any]  # its best game, or empty


def read_curves(folder: Path) -> dict[str, dict[int, float]]:
    """A run's curves by name, of its newest checkpoint's log and of TensorBoard, without values that are not finite."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for file in folder.glob("*tfevents*"):  # all of them are opened, and a pipe would never end
        if not file.is_file():
            raise UsageError(f"{file} is no file: remove it")
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # that a resumed run repeats steps is no matter
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # 0: keep all
    try:
        events.Reload()
    except Exception:  # damaged ones raise errors of several libraries
        raise UsageError(f"TensorBoard cannot read its files in {folder}: remove them") from None
    points: list[tuple[str, int, float]] = []
    for file in (checkpoint / "trainer_state.json" for checkpoint in checkpoints(folder)[:1]):
        with contextlib.suppress(UsageError), naming(file):  # TensorBoard may have what a damaged checkpoint lacks
            points += [
                (name, logs["step"], value)
                for logs in read_json(file)["log_history"]
                if "loss" in logs
                for name, value in logs.items()
                if isinstance(value, int | float)
            ]
    for tag in events.Tags()["scalars"]:
        points += [(tag.removeprefix("train/"), event.step, event.value) for event in events.Scalars(tag)]
    curves: dict[str, dict[int, float]] = {}
    for name, step, value in points:  # of several values for a step, the last counts
        if math.isfinite(value):
            curves.setdefault(name, {})[step] = value
    return curves


def read_game(file: Path) -> dict[str, Any]:
    """A recorded game.  Its numbers are checked here, because the page's script trusts them."""
    game = read_json(file)
    with naming(file):
        if game:
            cells, tiles = range(game["size"] ** 2), (0, 2, 4)
            moves = all(way in range(4) and cell in cells and tile in tiles[1:] for way, cell, tile in game["moves"])
            for name in ("score", "max_tile"):
                checked(game[name], int)
            if len(game["start"]) != len(cells) or not set(game["start"]) <= set(tiles) or not moves:
                raise ValueError
    return game


def read_run(folder: Path) -> Run:
    """A run, finished or not.  Raises UsageError if the folder holds no run or a file is damaged."""
    config, result = (read_json(folder / f"{name}.json") for name in ("config", "result"))
    if not {"recipe", "held_out", "steps"} <= config.keys():
        raise UsageError(f"{folder} is no run of this version: it has no config.json of one")
    with naming(folder / "result.json"):
        scores = read_scores(result)
    sources = {}
    for name in (BEST_PROGRAM, "best_of_n.py"):
        with naming(file := folder / name):
            source = file.read_text(encoding="utf-8") if file.is_file() else ""
            sources[name] = source.partition("\n")[2] if source.startswith(MADE_FOR) else source
    steps = read_rollouts(file := folder / "rollouts.jsonl")
    with naming(file):
        if file.is_file() and max(steps, default=0) < result.get("steps", 0):
            raise ValueError
    return Run(
        folder.resolve().name,
        config,
        result,
        scores,
        read_curves(folder),
        steps,
        sources[BEST_PROGRAM],
        sources["best_of_n.py"],
        read_game(folder / "best_game.json"),
    )


def read_runs(folders: Sequence[Path]) -> dict[str, Run]:
    """Several runs by name, or by path if two have the same name.  Raises UsageError."""
    if len({folder.resolve() for folder in folders}) < max(2, len(folders)):
        raise UsageError("name the folders of at least two different runs")
    runs = [read_run(folder) for folder in folders]
    distinct = len({run.name for run in runs}) == len(runs)
    return {run.name if distinct else str(folder): run for folder, run in zip(folders, runs, strict=True)}
