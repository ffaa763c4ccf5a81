"""The best programs of a run so far, shown in the training prompt as examples (TTT-Discover, ThetaEvolve)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from toolkit import stage_name

EXAMPLE = """
A program that did well so far: it won {won:.0%} of {games} games of {stage}, and its mean tile was {tile:.0f}.
```python
{source}
```"""


class ArchiveConfig(Protocol):
    """The part of the training configuration that is used here."""

    @property
    def archive(self) -> int: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def seed(self) -> int: ...


@dataclass
class Program:
    """A program, and what all of its games at a stage came to."""

    source: str
    rewards: list[float] = field(default_factory=list)  # one for each completion with this source
    tiles: list[int] = field(default_factory=list)  # the largest of each game
    won: int = 0  # games
    step: int = 0  # the newest

    def add(self, done: Mapping[str, Any], step: int) -> None:
        """Take note of a completion with this source."""
        self.rewards.append(done["reward"])
        self.tiles += [game["max_tile"] for game in done["results"]]
        self.won += sum(game["outcome"] == "success" for game in done["results"])
        self.step = step

    def rank(self) -> tuple[float, int, int]:
        """The best program has the highest: mean reward; then the shorter, then the newer."""
        return sum(self.rewards) / len(self.rewards), -len(self.source), self.step

    def example(self, stage: str) -> str:
        """The text for the prompt, after the task."""
        games = len(self.tiles)
        tile = sum(self.tiles) / games
        return EXAMPLE.format(won=self.won / games, games=games, stage=stage, tile=tile, source=self.source)


class Archive:
    """The best distinct programs of the newest stage that has results.

    The data loader makes the rows of a step during the step before, so they know only the steps before that one.  This
    holds for a resumed run too, so it makes the same prompts.
    """

    def __init__(self, config: ArchiveConfig, tokenizer: Any) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._stage, self._programs = "", dict[str, Program]()
        self._since: list[tuple[int, list[str]]] = []  # (first step, examples, best first)

    def _fits(self, example: str) -> bool:
        """Whether an example takes no more tokens than an answer may, and cannot end its fence or its message."""
        if example.count("```") > 2 or "<|" in example:
            return False
        return len(self._tokenizer(example)["input_ids"]) <= self._config.max_new_tokens

    def add(self, row: Mapping[str, Any]) -> None:
        """Take note of a step: a line of rollouts.jsonl."""
        if not self._config.archive:
            return
        if (stage := stage_name(row["size"], row["target"])) != self._stage:
            self._stage, self._programs = stage, {}
        for done in row["completions"]:
            if done["works"] == "load" and not done["cheating"]:
                self._programs.setdefault(done["source"], Program(done["source"])).add(done, row["step"])
        ranked = sorted(self._programs.values(), key=Program.rank, reverse=True)
        fitting = filter(self._fits, (program.example(stage) for program in ranked))
        examples = list(islice(fitting, self._config.archive))
        self._since.append((row["step"] + 1, examples))  # the first step is 1 here, and 0 for the data loader

    def example(self, step: int, group: int) -> str:
        """One of the examples for a group's prompt, chosen by the seed and the group's number; "" if there is none.

        The first step and the first group are 0.
        """
        examples = next((known for first, known in reversed(self._since) if first <= step), [])
        return random.Random(f"{self._config.seed} {group}").choice(examples) if examples else ""
