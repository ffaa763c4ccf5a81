"""What rollouts.jsonl says: steps, their programs, and which of them may be the best."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from toolkit import checked, stage_name
from toolkit.base.files import naming, write_whole
from toolkit.base.ranks import RANK

OUTCOMES = ("success", "lost", "stuck", "timeout", "error", "invalid_move", "no_function")  # how a game can end


@dataclass(frozen=True)
class Attempt:
    """One completion of a training step."""

    source: str | None
    reward: float
    tiles: tuple[int, ...]  # the largest tile of each game
    plays: bool  # its program loads and does not cheat
    cheating: str  # what the program does that it may not, or ""

    def __str__(self) -> str:
        tile = f"largest tile {statistics.fmean(self.tiles):.0f}"
        return f"reward {self.reward:.1f}, " + (f"does not play: it {self.cheating}" if self.cheating else tile)


@dataclass(frozen=True)
class Step:
    """One training step."""

    stage: str  # board and target
    attempts: tuple[Attempt, ...]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Step:
        """One line of rollouts.jsonl.  Any error means that it is damaged."""
        attempts = (
            Attempt(
                checked(done["source"], str | None),
                checked(done["reward"], float),
                tuple(checked(game["max_tile"], int) for game in done["results"]),
                done["works"] == "load" and not done["cheating"],
                checked(done["cheating"], str),
            )
            for done in row["completions"]
        )
        return cls(stage_name(checked(row["size"], int), checked(row["target"], int)), tuple(attempts))


def read_rollouts(file: Path) -> dict[int, Step]:
    """The steps by their number.  A resumed run may log a step twice: the last one counts.

    A last line without its line break was cut off by a kill and is skipped.
    """
    steps: dict[int, Step] = {}
    if not file.is_file():
        return steps
    with naming(file), file.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                row = json.loads(line)
                steps[int(row["step"])] = Step.of(row)
    return steps


def first_lines(file: Path, steps: int) -> list[str]:
    """The lines of rollouts.jsonl for so many steps.  Raises UsageError if it has fewer, or damaged ones."""
    with naming(file), file.open(encoding="utf-8") as lines:
        kept = list(islice(lines, steps))
        if len([Step.of(json.loads(line)) for line in kept]) < steps:
            raise ValueError
    return kept


def rewind(file: Path, steps: int) -> list[dict[str, Any]]:
    """Cut rollouts.jsonl off after so many steps, and return them.  Raises UsageError if it has fewer."""
    kept = first_lines(file, steps)
    if RANK == 0:
        write_whole(file, "".join(kept))
    return [json.loads(line) for line in kept]


def programs_to_race(file: Path) -> list[str]:
    """The distinct programs of rollouts.jsonl that load and do not cheat, the most promising first.

    The order is by the last stage that a program was judged at, its mean reward there, and its newest step.
    """
    steps = read_rollouts(file)
    order = {stage: i for i, stage in enumerate(dict.fromkeys(step.stage for step in steps.values()))}
    rewards: dict[str, dict[int, list[float]]] = {}  # of each program by stage
    newest: dict[str, int] = {}
    for number, step in steps.items():
        for attempt in step.attempts:
            if attempt.source and attempt.plays:
                rewards.setdefault(attempt.source, {}).setdefault(order[step.stage], []).append(attempt.reward)
                newest[attempt.source] = number

    def promise(source: str) -> tuple[int, float, int]:
        last = max(rewards[source])
        return last, statistics.fmean(rewards[source][last]), newest[source]

    return sorted(rewards, key=promise, reverse=True)
