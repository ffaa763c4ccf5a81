"""Advantages other than GRPO's: the equal programs of a group share one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.base.ranks import RANK


def played(completion: Mapping[str, Any]) -> Any:
    """What makes programs equal: the games that they play, which are repeatable; of others their text."""
    if completion["works"] == "load" and not completion["cheating"]:
        return tuple((game["outcome"], game["steps"], game["score"]) for game in completion["results"])
    return completion["text"]


def of_group(group: Sequence[Mapping[str, Any]]) -> list[float]:
    """Advantages (n,) of a group's completions, of which those that play the same games count as one and share it.

    GRPO pushes the most frequent program that is better than the mean as often as it was sampled.  A model that seldom
    writes anything better has collapsed to it before it finds something.
    """
    pairs = [(played(completion), completion["reward"]) for completion in group]
    equals: dict[Any, list[float]] = {}
    for games, reward in pairs:
        equals.setdefault(games, []).append(reward)
    mean = statistics.fmean(map(statistics.fmean, equals.values()))
    return [(reward - mean) / len(equals[games]) for games, reward in pairs]


def shared(batch: dict[str, Any], completions: Sequence[Mapping[str, Any]], group: int) -> dict[str, Any]:
    """A batch with advantages (B,) that equal programs of a group share, on the scale of --scale-rewards.

    `completions` are those of all ranks, with the sum of their rewards.  A batch holds the groups of its own rank.
    """
    usual = batch["advantages"].tolist()  # (B,)
    own = completions[RANK * len(usual) : (RANK + 1) * len(usual)]
    advantages: list[float] = []
    for i in range(0, len(usual), group):
        spread = statistics.pstdev(completion["reward"] for completion in own[i : i + group])
        scale = statistics.pstdev(usual[i : i + group]) / (spread or 1.0)
        advantages += [scale * advantage for advantage in of_group(own[i : i + group])]
    return batch | {"advantages": batch["advantages"].new_tensor(advantages)}
