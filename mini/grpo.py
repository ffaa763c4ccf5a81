"""GRPO: the formulas, then the loop; supervised training beside it.

The loss is in `update`, at (17).  Numbers in brackets refer to the formulas in README.md.

    B prompts    K completions of each    N = B * K rows    S tokens of a padded prompt    T tokens of a completion
    C width    V vocabulary    n rows of a micro-batch

    lp   log-probability of a token under the policy in training         old  the same when it was sampled
    ref  the same under the frozen start

Only sums outlive a step.  Completions are stored as ids.  Logits exist for one micro-batch at a time, and only for
completion tokens, because prompts are read but not trained on.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mini.config import BaselineType, ChessConfig, KlType
from mini.model import GPT, Cache, Diverged, Rows, Sampling, generate, policy_log_probs

# ---------------------------------------------------------------------------------------------------------------------
# Loss, token by token


def policy_loss(lp: Tensor, old: Tensor, advantages: Tensor, clip_range: float) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective, as a loss, and where clipping removes its gradient: (N, T) each -> (N, T) each."""
    ratio = (lp - old).exp()
    free, clipped = ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages
    return -torch.minimum(free, clipped), clipped < free  # (1)


def exact_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """KL(policy || start) over the whole vocabulary: (..., V) each -> (...).  Its gradient is its own."""
    log_p, log_q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)  # (2)


def kl_estimate(lp: Tensor, ref: Tensor, kind: KlType) -> Tensor:
    """An estimate of the KL divergence for each sampled token, never below 0: (N, T).

    Its mean over the policy's tokens is KL(policy || start) for forward, KL(start || policy) for reverse, the mean of
    both for symmetric.  Its gradient is another: forward's is that of KL(start || policy), reverse's is that of
    neither.  `squared` is the opposite: its mean is only near KL(policy || start), and its gradient is exact.
    """
    d = ref - lp
    forward = d.exp() - d - 1  # (3)
    reverse = d * d.exp() - d.exp() + 1  # (4)
    symmetric = (forward + reverse) / 2  # (5)
    return {"forward": forward, "reverse": reverse, "symmetric": symmetric, "squared": d**2 / 2}[kind]  # (6)


def entropy(log_probs: Tensor) -> Tensor:
    """Entropy of whole distributions, from their log-probabilities: (..., V) -> (...)."""
    return -(log_probs.exp() * log_probs).sum(-1)  # (7)


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
            return rewards - before  # (10)
        mean = rewards.mean(1, keepdim=True)  # (B, 1)
        std = rewards.std(1, correction=1, keepdim=True)
        if self.kind == "group_mean":
            advantages = rewards - mean  # (8)
            if self.scale_by_std:
                advantages = advantages / (std + 1e-4)  # (9)
        elif self.kind == "adaptive":
            median = rewards.quantile(0.5, 1, keepdim=True)  # for even K, the mean of the middle two
            advantages = rewards - torch.where(std > 0.1, median, mean)  # (11)
        elif self.kind == "best":  # rejection sampling
            advantages = (rewards == rewards.amax(1, keepdim=True)).float()
        else:
            others = (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
            advantages = rewards - others  # (12)
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
        delta = rewards[:, t] + gamma * next_value - values[:, t]  # (13)
        following = (delta + gamma * lam * following) * mask[:, t]  # (14)
        next_value = values[:, t] * mask[:, t]
        advantages[:, t] = following
    return advantages


def value_head(width: int) -> nn.Sequential:
    """Hidden states (N, T, C) -> the expected reward (N, T).  Predicts 0 until it is trained."""
    hidden, out = nn.Linear(width, width // 2), nn.Linear(width // 2, 1)
    nn.init.zeros_(out.weight)
    nn.init.zeros_(out.bias)
    return nn.Sequential(hidden, nn.GELU("tanh"), out, nn.Flatten(-2))


@dataclass
class KlController:
    """The weight of the KL divergence, fixed or adapted towards a target (Ziegler et al., 2019)."""

    coef: float
    adaptive: bool = False
    target: float = 0.01  # nats a token
    horizon: float = 10_000.0  # completions

    def update(self, kl: float, completions: int) -> None:
        """Adapt the weight after a step with this many completions and this mean KL divergence."""
        if self.adaptive:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * completions / self.horizon  # (15)


def warmed_up(coef: float, seen: float, warmup: float) -> float:
    """The weight after `seen` of `warmup` steps or tokens."""
    return coef * min(1.0, seen / warmup) if warmup else coef  # (16)


# ---------------------------------------------------------------------------------------------------------------------
# Log-probabilities


class LanguageModel(Protocol):
    """Anything that gives token probabilities: a GPT, or a reference that is not one."""

    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


def score(model: LanguageModel, rows: Rows, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the completions' tokens (n, T) and of all tokens (n, T, V), and hidden states (n, T, C).

    The state of a token scores the next one, so the prompt's last state scores the first completion token.  A prompt
    is read once for all of its completions.  Padding gets exactly 0: it can be so unlikely that its ratio overflows,
    and inf times a mask of 0 is NaN.
    """
    if rows.K == 1 or not isinstance(model, GPT):
        hidden = model(rows.ids, rows.mask)[:, rows.S - 1 : -1]  # (n, T, C)
    else:
        prompt_ids, prompt_mask = (part[:: rows.K, : rows.S] for part in (rows.ids, rows.mask))  # (n / K, S)
        cache = [Cache(rows.K, rows.answer_ids.shape[1]) for _ in model.h]
        last = model(prompt_ids, prompt_mask, cache)[:, -1:].repeat_interleave(rows.K, 0)  # (n, 1, C)
        hidden = torch.cat((last, model(rows.ids[:, rows.S : -1], rows.mask[:, :-1], cache)), 1)  # (n, T, C)
    all_log_probs = policy_log_probs(model.logits(hidden), temperature)  # (n, T, V)
    log_probs = all_log_probs.gather(2, rows.answer_ids[:, :, None])[..., 0]  # (n, T)
    return log_probs.masked_fill(~rows.answer_mask, 0), all_log_probs, hidden


# ---------------------------------------------------------------------------------------------------------------------
# The learner, and the loop that every way of learning shares

COUNTERS = ("step", "tokens", "seconds", "flat")


class Learner:
    """Everything that changes from step to step, and the frozen start; with a value head if that has a learning rate.

    AdamW without weight decay, which would pull against the KL divergence.
    """

    def __init__(
        self,
        model: GPT,
        reference: LanguageModel,
        lr: float,
        seed: int,
        *,
        value_lr: float | None = None,
        baseline: Baseline | None = None,
        kl: KlController | None = None,
    ) -> None:
        torch.manual_seed(seed)
        self.model, self.reference = model, reference
        self.baseline, self.kl = baseline or Baseline(), kl or KlController(0.0)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr, (0.9, 0.95), weight_decay=0.0)
        self.value_head = None
        if value_lr is not None:
            self.value_head = value_head(model.config.n_embd).to(model.device)
            self.optimizer.add_param_group({"params": self.value_head.parameters(), "lr": value_lr})
        self.rng = random.Random(f"prompts {seed}")
        self.generator = torch.Generator(model.device).manual_seed(seed)  # of sampling
        self.step, self.seconds = 0, 0.0
        self.tokens = 0  # trained on
        self.flat = 0  # successive steps without any advantage

    def state(self) -> dict[str, Any]:
        """Everything that a checkpoint needs."""
        return {name: getattr(self, name) for name in COUNTERS} | {
            "model": self.model.state_dict(),
            "value_head": self.value_head and self.value_head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ema": self.baseline.ema,
            "kl_coef": self.kl.coef,
            "rng": self.rng.getstate(),
            "generator": self.generator.get_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.model.load_state_dict(state["model"])
        if self.value_head:
            self.value_head.load_state_dict(state["value_head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.baseline.ema, self.kl.coef = state["ema"], state["kl_coef"]
        self.rng.setstate(state["rng"])
        self.generator.set_state(state["generator"])
        for name in COUNTERS:
            setattr(self, name, state[name])

    def descend(self, max_grad_norm: float, real: bool = True) -> float:
        """One optimizer step, if the gradient is a real one.  Returns its norm; raises Diverged if it is not finite."""
        trained = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        norm = nn.utils.clip_grad_norm_(trained, max_grad_norm).item()
        if not math.isfinite(norm):
            raise Diverged("gradient")
        if real:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


def clock(model: GPT) -> Callable[[], float]:
    """Seconds of processor time, which a busy neighbour does not change; of a GPU, the seconds that pass."""
    return time.process_time if model.device.type == "cpu" else time.perf_counter


def run_steps(
    learner: Learner,
    take: Callable[[], Mapping[str, float]],
    steps: float = math.inf,
    seconds: float = math.inf,
    warmup: int = 0,
    decay: float = 0.0,
) -> Iterator[dict[str, float]]:
    """Take steps until there are so many, or so many seconds have gone; yields each step's figures.

    The learning rate rises over `warmup` steps, because Adam's first ones have full length however noisy the gradient
    is, and falls to 0 in the last share `decay`, for a steady end.
    """
    now = clock(learner.model)
    while learner.step < steps and learner.seconds < seconds:
        began = now()
        left = 1 - max(learner.step / steps, learner.seconds / seconds)  # 1 to 0
        factor = min(1.0, left / (decay or left), (learner.step + 1) / max(1, warmup))
        for group in learner.optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
        figures = take()
        spent = now() - began
        learner.step += 1
        learner.seconds += spent
        yield {**figures, "tokens": learner.tokens, "seconds": spent}


# ---------------------------------------------------------------------------------------------------------------------
# Supervised training


def likelihood(model: GPT, rows: Rows) -> float:
    """Accumulate the gradient of the cross-entropy of right answers.  Returns it in nats a token."""
    mean, total = 0.0, rows.answer_mask.sum()
    # A CPU is faster while a part fits its cache, a GPU with fewer kernels to launch.
    for chosen in rows.micro_batches(8 if rows.ids.device.type == "cpu" else 256):
        loss = -score(model, rows.pick(chosen), 1.0)[0].sum() / total
        loss.backward()
        mean += loss.item()
    return mean


def likelihood_step(learner: Learner, rows: Rows, max_grad_norm: float = 1.0) -> dict[str, float]:
    """One update on right answers."""
    loss = likelihood(learner.model, rows)
    learner.tokens += int(rows.mask.sum())
    return {"loss": loss, "grad_norm": learner.descend(max_grad_norm)}


def supervised(
    model: GPT,
    draw: Callable[[int], Rows],
    lr: float,
    steps: float = math.inf,
    seconds: float = math.inf,
    decay: float = 0.5,
) -> GPT:
    """Train a model by likelihood on right answers, drawn by step: a warm start, or the control of equal time."""
    learner = Learner(model, model, lr, 0)
    for _ in run_steps(learner, lambda: likelihood_step(learner, draw(learner.step)), steps, seconds, 10, decay):
        pass
    return model


# ---------------------------------------------------------------------------------------------------------------------
# GRPO


class Task(Protocol):
    """What to learn: prompts, and a judge of completions."""

    end: int

    def draw(self, rng: random.Random, count: int) -> list[Any]: ...

    def prompt_ids(self, item: Any) -> list[int]: ...

    def rewards(self, items: Sequence[Any], completions: list[list[list[int]]]) -> tuple[Tensor, dict[str, float]]:
        """Rewards (B, K) of K completions of each item, and figures for the log."""


@torch.no_grad()
def token_advantages(learner: Learner, rows: Rows, rewards: Tensor, config: ChessConfig) -> tuple[Tensor, Tensor]:
    """Advantages and the value head's targets, (N, T) each, from rewards (B, K)."""
    mask, head = rows.answer_mask, learner.value_head
    values = torch.zeros(mask.shape, device=mask.device)
    if head is None:  # every token of a completion has the completion's advantage
        return learner.baseline.advantages(rewards).flatten()[:, None].expand(mask.shape), values
    for chosen in rows.micro_batches(config.micro_batch):
        part = head(score(learner.model, rows.pick(chosen), 1.0)[2])
        values[chosen, : part.shape[1]] = part
    at_last = torch.zeros_like(values).scatter(1, mask.sum(1, keepdim=True) - 1, rewards.flatten()[:, None])
    advantages = gae(at_last, values, mask, 1.0, config.gae_lambda)
    return advantages, advantages + values


def divergence(
    learner: Learner, rows: Rows, lp: Tensor, all_log_probs: Tensor, config: ChessConfig
) -> tuple[Tensor, Tensor]:
    """The loss's KL term and, at the same tokens, the exact KL divergence from the start: (n, T) each."""
    with torch.no_grad():
        ref, all_ref, _ = score(learner.reference, rows, config.temperature)
    with torch.set_grad_enabled(config.kl_type == "exact"):
        exact = exact_kl(all_log_probs, all_ref)
    return (exact if config.kl_type == "exact" else kl_estimate(lp, ref, config.kl_type)), exact


def update(
    learner: Learner, rows: Rows, old: Tensor, advantages: Tensor, returns: Tensor, kl_coef: float, config: ChessConfig
) -> dict[str, float]:
    """One optimizer step over all rows, micro-batch by micro-batch.  Returns means over the completion tokens it read.

    Where the policy's is the only term of the loss, a group of equal rewards has no gradient, so it is not read again.
    """
    total, read, sums = rows.answer_mask.sum(), 0, defaultdict[str, float](float)
    more_terms = config.kl_coef or config.entropy_coef or learner.value_head
    for chosen in rows.micro_batches(config.micro_batch, None if more_terms else advantages.any(1)):
        part = rows.pick(chosen)
        mask = part.answer_mask  # (n, T)
        T = mask.shape[1]
        was, advantage = old[chosen, :T], advantages[chosen, :T]
        lp, all_log_probs, hidden = score(learner.model, part, config.temperature)
        with torch.set_grad_enabled(config.entropy_coef > 0):
            spread = entropy(all_log_probs)
        loss, clipped = policy_loss(lp, was, advantage, config.clip_range)
        figures = {"clip_share": clipped, "entropy": spread}
        loss = loss - config.entropy_coef * spread
        if config.kl_coef:
            figures["kl"], figures["kl_exact"] = divergence(learner, part, lp, all_log_probs, config)
            loss = loss + kl_coef * figures["kl"]  # (17)
        if learner.value_head is not None:
            figures["value_loss"] = (learner.value_head(hidden) - returns[chosen, :T]) ** 2
            loss = loss + config.value_loss_coef * figures["value_loss"]  # (18)
        mean_loss = (loss * mask).sum() / total  # mean over the step's tokens, not the micro-batch's
        mean_loss.backward()
        sums["loss"] += mean_loss.item()
        read += int(mask.sum())
        for name, values in figures.items():
            sums[name] += (values.detach() * mask).sum().item()
    if not math.isfinite(sums["loss"]):
        raise Diverged("loss")
    means = {name: value if name == "loss" else value / read for name, value in sums.items()}
    # Where the policy is still the start, the KL's gradient is rounding noise, and Adam would make full steps of it.
    real = advantages.any() or config.entropy_coef or kl_coef * means.get("kl_exact", 0) > 1e-6
    return means | {"grad_norm": learner.descend(config.max_grad_norm, bool(real))}


def grpo_step(learner: Learner, task: Task, config: ChessConfig, sampling: Sampling) -> dict[str, float]:
    """Sample, judge, compare, update."""
    now = clock(learner.model)
    moments = [now()]
    items = task.draw(learner.rng, config.batch_size)
    prompts = [task.prompt_ids(item) for item in items]
    rows, old = generate(learner.model, prompts, config.k_samples, sampling, task.end, learner.generator)
    moments.append(now())

    rewards, figures = task.rewards(items, rows.answers(task.end))  # (B, K)
    rewards = rewards.to(learner.model.device)
    advantages, returns = token_advantages(learner, rows, rewards, config)  # (N, T) each
    moments.append(now())

    kl_coef = warmed_up(learner.kl.coef, learner.step, config.kl_warmup)
    for _ in range(config.updates):
        losses = update(learner, rows, old, advantages, returns, kl_coef, config)
    learner.kl.update(losses.get("kl_exact", 0.0), rewards.numel())
    moments.append(now())

    learner.tokens += int(rows.answer_mask.sum())
    learner.flat = 0 if advantages.any() else learner.flat + 1
    parts = {f"seconds/{name}": moments[i + 1] - moments[i] for i, name in enumerate(("generate", "score", "train"))}
    return {**figures, **losses, **parts} | {
        "reward": rewards.mean().item(),
        "kl_coef": kl_coef,
        "zero_spread": zero_spread(rewards).float().mean().item(),
        "length": rows.answer_mask.sum().item() / rewards.numel(),
    }


def train(learner: Learner, task: Task, config: ChessConfig, sampling: Sampling) -> Iterator[dict[str, float]]:
    """GRPO from the learner's current step on; yields each step's figures."""
    take = partial(grpo_step, learner, task, config, sampling)
    return run_steps(learner, take, config.steps, warmup=config.lr_warmup, decay=config.lr_decay)
