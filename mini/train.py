"""GRPO in one visible loop, and supervised training beside it.

    B prompts    K completions of each    N = B * K rows    S tokens of a padded prompt    T tokens of a completion
    C width    V vocabulary    n rows of a micro-batch

Only sums outlive a step.  Completions are stored as ids.  Logits exist for one micro-batch at a time, and only for
completion tokens, because prompts are read but not trained on.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from mini import rl
from mini.config import ChessConfig
from mini.generate import Completions, Sampling, generate, left_pad, policy_log_probs
from mini.model import GPT, Cache, ValueHead
from mini.rl import Baseline, KlController

Item = TypeVar("Item")


class LanguageModel(Protocol):
    """Anything that gives token probabilities: a GPT, or a reference that is not one."""

    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Task(Protocol[Item]):
    """What to learn: prompts, right answers (with their end token), and a judge of completions."""

    end: int

    def draw(self, rng: random.Random, count: int) -> list[Item]: ...

    def prompt_ids(self, item: Item) -> list[int]: ...

    def answer_ids(self, item: Item) -> list[int]: ...

    def rewards(self, items: Sequence[Item], completions: list[list[list[int]]]) -> tuple[Tensor, dict[str, float]]:
        """Rewards (B, K) of K completions of each item, and figures for the log."""


# ---------------------------------------------------------------------------------------------------------------------
# Rows: prompts with their completions


@dataclass(frozen=True)
class Rows:
    """Prompts padded on the left, completions on the right, side by side."""

    ids: Tensor  # (N, S + T)
    mask: Tensor  # (N, S + T)
    S: int
    K: int = 1  # this many successive rows share a prompt

    @staticmethod
    def of_completions(made: Completions) -> Rows:
        """Each completion after its prompt."""
        k = made.ids.shape[1]
        ids = torch.cat((made.prompt_ids.repeat_interleave(k, 0), made.ids.flatten(0, 1)), 1)
        mask = torch.cat((made.prompt_mask.repeat_interleave(k, 0), made.mask.flatten(0, 1)), 1)
        return Rows(ids, mask, made.prompt_ids.shape[1], k)

    @staticmethod
    def of_documents(prompts: list[list[int]], answers: list[list[int]], pad: int) -> Rows:
        """Each right answer after its prompt."""
        prompt_ids, prompt_mask = left_pad(prompts, pad)
        flipped_ids, flipped_mask = left_pad([answer[::-1] for answer in answers], pad)
        ids = torch.cat((prompt_ids, flipped_ids.flip(1)), 1)
        return Rows(ids, torch.cat((prompt_mask, flipped_mask.flip(1)), 1), prompt_ids.shape[1])

    @property
    def answer_mask(self) -> Tensor:
        """(N, T)."""
        return self.mask[:, self.S :]

    def micro_batches(self, size: int) -> list[Tensor]:
        """Row numbers sorted by length, so that a micro-batch has little padding.  Groups stay together."""
        groups = torch.arange(len(self.ids)).view(-1, self.K)  # (B, K)
        longest = self.mask.sum(1).view(-1, self.K).amax(1)  # (B,)
        return [part.flatten() for part in groups[longest.argsort(stable=True)].split(max(1, size // self.K))]

    def pick(self, rows: Tensor, K: int = 1) -> Rows:
        """Some rows, K per prompt, without the columns that are padding in all of them."""
        used = self.mask[rows].any(0)
        first = int(used[: self.S].int().argmax())
        last = self.S + int(used[self.S :].sum())
        return Rows(self.ids[rows, first:last], self.mask[rows, first:last], self.S - first, K)


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
        cache = Cache(prompt_mask, rows.K, 0)
        last = model(prompt_ids, prompt_mask, cache)[:, -1:].repeat_interleave(rows.K, 0)  # (n, 1, C)
        hidden = torch.cat((last, model.go_on(rows.ids[:, rows.S : -1], cache)), 1)  # (n, T, C)
    all_log_probs = policy_log_probs(model.logits(hidden), temperature)  # (n, T, V)
    log_probs = all_log_probs.gather(2, rows.ids[:, rows.S :, None])[..., 0]  # (n, T)
    return log_probs.masked_fill(~rows.answer_mask, 0), all_log_probs, hidden


def make_optimizer(parameters: list[nn.Parameter], lr: float) -> torch.optim.AdamW:
    """AdamW without weight decay, which would pull against the KL divergence from the start."""
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)


def set_lr(optimizer: torch.optim.AdamW, lr: float, step: int, warmup: int) -> None:
    """Warm up to lr, because Adam's first steps have full length however noisy the gradient is."""
    for group in optimizer.param_groups:
        group["lr"] = lr * min(1.0, (step + 1) / max(1, warmup))


# ---------------------------------------------------------------------------------------------------------------------
# Supervised training


def supervised(
    model: GPT,
    task: Task[Any],
    draw: Callable[[int], list[Any]],
    batch: int,
    lr: float,
    steps: float = float("inf"),
    seconds: float = float("inf"),
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Train on right answers for `steps` or `seconds`, whichever ends first.  Returns the number of steps made."""
    optimizer = make_optimizer(list(model.parameters()), lr)
    started, step = time.perf_counter(), 0
    while step < steps and time.perf_counter() - started < seconds:
        items = draw(batch)
        rows = Rows.of_documents([task.prompt_ids(i) for i in items], [task.answer_ids(i) for i in items], task.end)
        mean = 0.0
        for chosen in rows.micro_batches(16):
            part = rows.pick(chosen)
            log_probs, _, _ = score(model, part, 1.0)
            lengths = part.answer_mask.sum(1, keepdim=True)  # (n, 1)
            loss = -(log_probs / lengths).sum() / batch  # documents count equally, short or long
            loss.backward()
            mean += loss.item()
        done = max(step / steps, (time.perf_counter() - started) / seconds)  # 0 to 1
        set_lr(optimizer, lr * min(1.0, 2 * (1 - done)), step, 10)  # falls to 0 in the second half, for a steady end
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 50 == 0 or step == steps:
            say(f"supervised step {step}  loss {mean:.3f} nats a token  {time.perf_counter() - started:.0f} s")
    return step


# ---------------------------------------------------------------------------------------------------------------------
# GRPO


@dataclass
class Learner:
    """Everything that changes from step to step."""

    model: GPT
    reference: LanguageModel  # the frozen start; the one part that does not change
    value_head: ValueHead | None
    optimizer: torch.optim.AdamW
    baseline: Baseline
    kl: KlController
    rng: random.Random  # of the prompts
    generator: torch.Generator  # of sampling
    lr: float
    step: int = 0
    tokens: int = 0  # trained on
    seconds: float = 0.0

    def state(self) -> dict[str, Any]:
        """Everything that a checkpoint needs."""
        return {
            "model": self.model.state_dict(), "value_head": self.value_head and self.value_head.state_dict(),
            "optimizer": self.optimizer.state_dict(), "ema": self.baseline.ema, "kl_coef": self.kl.coef,
            "rng": self.rng.getstate(), "generator": self.generator.get_state(), "step": self.step,
            "tokens": self.tokens, "seconds": self.seconds,
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.model.load_state_dict(state["model"])
        if self.value_head:
            self.value_head.load_state_dict(state["value_head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.baseline.ema, self.kl.coef = state["ema"], state["kl_coef"]
        self.rng.setstate(state["rng"])
        self.generator.set_state(state["generator"])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]


def make_learner(model: GPT, reference: GPT, config: ChessConfig, lr: float) -> Learner:
    """A learner before its first step."""
    torch.manual_seed(config.seed)
    value_head = ValueHead(model.config.n_embd) if config.use_gae else None
    trained = [*model.parameters(), *(value_head.parameters() if value_head else ())]
    return Learner(
        model, reference.requires_grad_(False), value_head, make_optimizer(trained, lr),
        Baseline(config.baseline_type, config.scale_by_std, config.ema_alpha),
        KlController(config.kl_coef, config.adaptive_kl, config.kl_target, config.kl_horizon),
        random.Random(f"prompts {config.seed}"), torch.Generator().manual_seed(config.seed), lr,
    )  # fmt: skip


def train(learner: Learner, task: Task[Any], config: ChessConfig, sampling: Sampling) -> Iterator[dict[str, float]]:
    """GRPO from the learner's current step on; yields each step's figures."""
    while learner.step < config.steps:
        clock = [time.perf_counter()]
        items = task.draw(learner.rng, config.batch_size)
        prompts = [task.prompt_ids(item) for item in items]
        made = generate(learner.model, prompts, config.k_samples, sampling, task.end, learner.generator)
        clock.append(time.perf_counter())

        rewards, figures = task.rewards(items, made.tokens(task.end))  # (B, K)
        rows, old = Rows.of_completions(made), made.log_probs.flatten(0, 1)  # (N, T)
        ref = by_micro_batch(
            rows, config.micro_batch, lambda part: score(learner.reference, part, config.temperature)[0]
        )  # (N, T)
        advantages, returns = token_advantages(learner, rows, rewards, config)  # (N, T) each
        clock.append(time.perf_counter())

        seen = learner.tokens if config.kl_warmup_unit == "tokens" else learner.step
        kl_coef = rl.warmed_up(learner.kl.coef, seen, config.kl_warmup)
        figures |= exact_figures(learner, rows, config) if learner.step % 10 == 0 else {}
        set_lr(learner.optimizer, learner.lr, learner.step, config.lr_warmup)
        for _ in range(config.updates):
            losses = update(learner, rows, old, ref, advantages, returns, kl_coef, config)
        learner.kl.update(losses["kl"], rewards.numel())
        clock.append(time.perf_counter())

        learner.step += 1
        learner.tokens += int(rows.answer_mask.sum())
        learner.seconds += clock[-1] - clock[0]
        yield figures | losses | {
            "reward": rewards.mean().item(), "kl_coef": kl_coef,
            "zero_spread": rl.zero_spread(rewards).float().mean().item(),
            "length": rows.answer_mask.sum().item() / rewards.numel(), "seconds": clock[3] - clock[0],
            "seconds/generate": clock[1] - clock[0], "seconds/score": clock[2] - clock[1],
            "seconds/train": clock[3] - clock[2],
        }  # fmt: skip


@torch.no_grad()
def by_micro_batch(rows: Rows, size: int, values_of: Callable[[Rows], Tensor]) -> Tensor:
    """Assemble (N, T) from the (n, T) of each micro-batch; 0 where those are shorter."""
    values = torch.zeros(rows.answer_mask.shape)
    for chosen in rows.micro_batches(size):
        part = values_of(rows.pick(chosen, rows.K))
        values[chosen, : part.shape[1]] = part
    return values


def token_advantages(learner: Learner, rows: Rows, rewards: Tensor, config: ChessConfig) -> tuple[Tensor, Tensor]:
    """Advantages and the value head's targets, (N, T) each, from rewards (B, K)."""
    mask, head = rows.answer_mask, learner.value_head
    if head is None:  # every token of a completion has the completion's advantage
        advantages = learner.baseline.advantages(rewards).flatten()[:, None].expand(mask.shape)
        return advantages, torch.zeros(mask.shape)
    values = by_micro_batch(rows, config.micro_batch, lambda part: head(score(learner.model, part, 1.0)[2]))
    at_last = torch.zeros(mask.shape).scatter(1, mask.sum(1, keepdim=True) - 1, rewards.flatten()[:, None])
    advantages = rl.gae(at_last, values, mask, 1.0, config.gae_lambda)
    return advantages, advantages + values


def update(
    learner: Learner, rows: Rows, old: Tensor, ref: Tensor, advantages: Tensor, returns: Tensor, kl_coef: float,
    config: ChessConfig,
) -> dict[str, float]:  # fmt: skip
    """One optimizer step over all rows, micro-batch by micro-batch.  Returns means over completion tokens."""
    total = rows.answer_mask.sum()
    sums = dict.fromkeys(("loss", "kl", "clip_share", "entropy", "value_loss"), 0.0)
    for chosen in rows.micro_batches(config.micro_batch):
        part = rows.pick(chosen, rows.K)
        mask = part.answer_mask  # (n, T)
        T = mask.shape[1]
        was, frozen, advantage = old[chosen, :T], ref[chosen, :T], advantages[chosen, :T]
        lp, all_log_probs, hidden = score(learner.model, part, config.temperature)
        kl = rl.kl_estimate(lp, frozen, config.kl_type)
        with torch.set_grad_enabled(config.entropy_coef > 0):
            spread = rl.entropy(all_log_probs)
        policy = rl.policy_loss(lp, was, advantage, config.clip_range)
        loss = policy + kl_coef * kl - config.entropy_coef * spread  # (15)
        value_loss = torch.zeros_like(loss)
        if learner.value_head is not None:
            value_loss = (learner.value_head(hidden) - returns[chosen, :T]) ** 2
            loss = loss + config.value_loss_coef * value_loss  # (16)
        mean_loss = (loss * mask).sum() / total  # mean over the step's tokens, not the micro-batch's
        mean_loss.backward()
        clipped = rl.is_clipped(lp, was, advantage, config.clip_range)
        for name, values in (("loss", loss), ("kl", kl), ("clip_share", clipped), ("entropy", spread),
                             ("value_loss", value_loss)):  # fmt: skip
            sums[name] += ((values.detach() * mask).sum() / total).item()
    trained = [parameter for group in learner.optimizer.param_groups for parameter in group["params"]]
    norm = nn.utils.clip_grad_norm_(trained, config.max_grad_norm)
    if advantages.any():  # otherwise entropy bonus and momentum alone would move the weights, by full steps
        learner.optimizer.step()
    learner.optimizer.zero_grad()
    return sums | {"grad_norm": norm.item()}


@torch.no_grad()
def exact_figures(learner: Learner, rows: Rows, config: ChessConfig) -> dict[str, float]:
    """The exact KL divergence over the whole vocabulary on a few rows, to check the estimates against."""
    N = len(rows.ids)
    part = rows.pick(torch.arange(0, N, max(1, N // 8)))
    now, start = (score(model, part, config.temperature)[1] for model in (learner.model, learner.reference))
    divergence = rl.exact_kl(now, start) * part.answer_mask  # log-probabilities are logits too
    return {"kl_exact": (divergence.sum() / part.answer_mask.sum()).item()}
