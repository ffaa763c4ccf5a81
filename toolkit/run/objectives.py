"""Advantages other than GRPO's: shared by equal programs, or for the best completion of a group.

The gradient of an objective for the best is the sum of weight times grad log-probability over a group.  Its weights
become advantages: their mean is taken off, and they are scaled to the spread of TRL's own advantages, so that the
recipe's learning rate and gradient clipping still fit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from toolkit.base.ranks import RANK

LN_2 = math.log(2)  # TTT-Discover's bound, in nats


class ObjectiveConfig(Protocol):
    """The part of the training configuration that is used here."""

    @property
    def objective(self) -> str: ...
    @property
    def max_at(self) -> int: ...
    @property
    def generations(self) -> int: ...


def shares(rewards: Sequence[float], beta: float) -> list[float]:
    """exp(beta * reward), divided by the sum over the group (n,)."""
    best = max(rewards)
    powers = [math.exp(beta * (reward - best)) for reward in rewards]
    return [power / sum(powers) for power in powers]


def divergence(parts: Sequence[float]) -> float:
    """KL divergence of a distribution from the uniform one, in nats."""
    return sum(part * math.log(part * len(parts)) for part in parts if part > 0)


def entropic(rewards: Sequence[float], bound: float = LN_2) -> list[float]:
    """Weights (n,) of the entropic objective log E[exp(beta * reward)] for the rewards of a group (n,): mean 1.

    The KL divergence of weights / n from uniform is `bound`.  Where no beta reaches it, because half of the group or
    more share the best reward, these have all the weight.  From TTT-Discover (arXiv 2601.16175), without its
    leave-one-out mean, which is 0 where one completion has all the weight.
    """
    gaps = [max(rewards) - reward for reward in rewards if reward < max(rewards)]
    low, high = 0.0, 50 / min(gaps, default=1.0)  # at most exp(-50) is left to the others
    for _ in range(64):
        beta = (low + high) / 2
        low, high = (beta, high) if divergence(shares(rewards, beta)) < bound else (low, beta)
    return [len(rewards) * share for share in shares(rewards, high)]


def max_at_k(rewards: Sequence[float], k: int) -> list[float]:
    """Weights (n,) of the unbiased gradient of E[best reward of k completions] for the rewards of a group (n,).

    A weight is the mean, over all choices of k - 1 others, of what the completion adds to their best.  n is at least k.
    From PKPO (arXiv 2505.15201), with its baseline of k - 1 samples, and arXiv 2510.23393.
    """
    n = len(rewards)
    chances = [math.comb(j, k - 2) / math.comb(n - 1, k - 1) for j in range(n)]  # that the j-th lowest is their best
    ranked = sorted(rewards)
    return [
        sum(chance * max(0.0, reward - other) for chance, other in zip(chances, ranked, strict=True))
        for reward in rewards
    ]


def as_advantages(weights: Sequence[float], usual: Sequence[float]) -> list[float]:
    """Weights (n,) with mean 0 and the standard deviation of the usual advantages (n,).

    Equal weights say nothing, so the usual advantages stay.  In a flat group these are 0.  In others max_at_k has equal
    weights if nearly all completions share the best reward; without a gradient, a stage could stay unsolved.
    """
    mean, spread = statistics.fmean(weights), statistics.pstdev(weights)
    if spread < 1e-9:
        return list(usual)
    scale = statistics.pstdev(usual) / spread
    return [scale * (weight - mean) for weight in weights]


def played(completion: Mapping[str, Any]) -> Any:
    """What makes programs equal: the games that they play, which are repeatable; of others their text."""
    if completion["works"] == "load" and not completion["cheating"]:
        return tuple((game["outcome"], game["steps"], game["score"]) for game in completion["results"])
    return completion["text"]


def shared(group: Sequence[Mapping[str, Any]]) -> list[float]:
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


def with_objective(
    batch: dict[str, Any], completions: Sequence[dict[str, Any]], config: ObjectiveConfig
) -> dict[str, Any]:
    """A batch with the advantages of the config's objective.

    `completions` are those of all ranks, with the sum of their rewards.  A batch holds the groups of its own rank.
    """
    usual = batch["advantages"].tolist()  # (B,)
    own = completions[RANK * len(usual) : (RANK + 1) * len(usual)]
    advantages: list[float] = []
    for i in range(0, len(usual), config.generations):
        group, ours = own[i : i + config.generations], usual[i : i + config.generations]
        rewards = [completion["reward"] for completion in group]
        if config.objective == "shared":
            scale = statistics.pstdev(ours) / (statistics.pstdev(rewards) or 1.0)  # of --scale-rewards
            advantages += [scale * advantage for advantage in shared(group)]
            continue
        weights = entropic(rewards) if config.objective == "entropic" else max_at_k(rewards, config.max_at)
        advantages += as_advantages(weights, ours)
    return batch | {"advantages": batch["advantages"].new_tensor(advantages)}
