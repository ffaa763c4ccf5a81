"""The arithmetic of GRPO: pure functions, and two controllers that each keep one number as state.

Numbers in brackets refer to the formulas in README.md.

    B prompts    K completions of each    N = B * K completions    T tokens    V vocabulary

    lp   log-probability of a token under the policy in training         old  the same when it was sampled
    ref  the same under the frozen start                                 mask True for completion and end tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

KlType = Literal["forward", "reverse", "symmetric"]
BaselineType = Literal["group_mean", "ema", "adaptive", "rloo"]

# ---------------------------------------------------------------------------------------------------------------------
# Loss, token by token


def policy_loss(lp: Tensor, old: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """PPO's clipped objective, as a loss: (N, T) each -> (N, T)."""
    ratio = (lp - old).exp()
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return -torch.minimum(ratio * advantages, clipped * advantages)  # (1)


def is_clipped(lp: Tensor, old: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """Where clipping removes the gradient: (N, T) of bool."""
    ratio = (lp - old).exp()
    return ((ratio > 1 + clip_range) & (advantages > 0)) | ((ratio < 1 - clip_range) & (advantages < 0))


def kl_estimate(lp: Tensor, ref: Tensor, kind: KlType) -> Tensor:
    """An estimate of the KL divergence for each sampled token, never below 0: (N, T).

    Its mean over the policy's tokens is KL(policy || start), KL(start || policy), or the mean of both.  (The log-ratio
    alone has the same mean, but single tokens fall below 0; p * log-ratio estimates nothing.)
    """
    d = ref - lp
    forward = d.exp() - d - 1  # (2)
    reverse = d * d.exp() - d.exp() + 1  # (3)
    return {"forward": forward, "reverse": reverse, "symmetric": (forward + reverse) / 2}[kind]  # (4)


def exact_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """KL(policy || start) over the whole vocabulary: (..., V) each -> (...)."""
    log_p, log_q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def entropy(log_probs: Tensor) -> Tensor:
    """Entropy of whole distributions, from their log-probabilities: (..., V) -> (...)."""
    return -(log_probs.exp() * log_probs).sum(-1)  # (5)


# ---------------------------------------------------------------------------------------------------------------------
# Advantages


@dataclass
class Baseline:
    """What a completion's reward is compared with."""

    kind: BaselineType = "group_mean"
    scale_by_std: bool = False  # group_mean: divide by the group's standard deviation
    ema_alpha: float = 0.1
    ema: float | None = None  # the only state

    def advantages(self, rewards: Tensor) -> Tensor:
        """rewards (B, K) -> (B, K).

        A group of equal rewards gets advantages of exactly 0, not a rounding error divided by a tiny deviation.
        The exception is the ema baseline: it compares groups with one another, so equal rewards can have an advantage.
        """
        if self.kind == "ema":
            batch_mean = rewards.mean().item()
            before = batch_mean if self.ema is None else self.ema
            self.ema = (1 - self.ema_alpha) * before + self.ema_alpha * batch_mean
            return rewards - before  # (8)
        mean = rewards.mean(1, keepdim=True)  # (B, 1)
        std = rewards.std(1, correction=1, keepdim=True)
        if self.kind == "group_mean":
            advantages = rewards - mean  # (6)
            if self.scale_by_std:
                advantages = advantages / (std + 1e-4)  # (7)
        elif self.kind == "adaptive":
            median = rewards.quantile(0.5, 1, keepdim=True)  # for even K, the mean of the middle two
            advantages = rewards - torch.where(std > 0.1, median, mean)  # (9)
        else:
            others = (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
            advantages = rewards - others  # (10)
        return advantages.masked_fill(zero_spread(rewards)[:, None], 0)


def zero_spread(rewards: Tensor) -> Tensor:
    """Whether all rewards of a group are equal: (B, K) -> (B,) of bool."""
    return rewards.amax(1) == rewards.amin(1)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalized advantage estimation over the tokens of each completion: (N, T) each -> (N, T).

    Completions are padded on the right; the padding's content does not matter.  The value head's target is
    advantage + value.
    """
    advantages = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[:, 0])  # advantage of the next token
    next_value = torch.zeros_like(following)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]  # (11)
        following = (delta + gamma * lam * following) * mask[:, t]  # (12)
        next_value = values[:, t] * mask[:, t]
        advantages[:, t] = following
    return advantages


# ---------------------------------------------------------------------------------------------------------------------
# The weight of the KL divergence


@dataclass
class KlController:
    """The weight, fixed or adapted towards a target KL (Ziegler et al., 2019)."""

    coef: float
    adaptive: bool = False
    target: float = 0.01  # nats a token
    horizon: float = 10_000.0  # completions

    def update(self, kl: float, completions: int) -> None:
        """Adapt the weight after a step with this many completions and this mean KL divergence."""
        if self.adaptive:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * completions / self.horizon  # (13)


def warmed_up(coef: float, seen: float, warmup: float) -> float:
    """The weight after `seen` of `warmup` steps or tokens."""
    return coef * min(1.0, seen / warmup) if warmup else coef  # (14)
