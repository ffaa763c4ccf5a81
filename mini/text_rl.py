"""Learning a text from rewards for each token: GRPO, and PPO with a critic.

A rollout chooses a token at each position of a window and is rewarded if the text has the same one.  With
`--context data` it reads the text's own tokens, whatever it chose before.  With `--context model` it reads its own
choices, as in RL of language models.  Once it has left the text it never finds back, so the best policy is to always
choose the commonest token; collapse() in text_task.py reports that.

    B windows    K rollouts of each    R contexts: B, or B * K with --context model    T tokens
    A tokens chosen at each position of a context: K, or 1 with --context model    C width    V vocabulary

Numbers in brackets refer to the formulas in README.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mini import rl
from mini.config import TextConfig
from mini.generate import Sampling, generate
from mini.train import Learner, Rows, score

NO_END = -1  # no token has this id, because a text does not end


@dataclass(frozen=True)
class Rollouts:
    """The contexts, the chosen tokens, the right ones, and the model's outputs."""

    rows: Rows  # (R, 1 + T)
    chosen: Tensor  # (R, T, A)
    right: Tensor  # (R, T)
    log_probs: Tensor  # (R, T, V)
    hidden: Tensor  # (R, T, C)


def whole_rows(text: Tensor) -> Rows:
    """Windows (N, 1 + T) as rows: one given token and T scored ones."""
    return Rows(text, torch.ones_like(text, dtype=torch.bool), 1)


def roll_out(learner: Learner, text: Tensor, config: TextConfig) -> Rollouts:
    """K rollouts of each window (B, 1 + T) under the current policy; one forward pass serves sampling and gradient."""
    K, right = config.k_samples, text[:, 1:]
    if config.context == "model":
        sampling = Sampling(max_new_tokens=right.shape[1])
        made = generate(learner.model, text[:, :1].tolist(), K, sampling, NO_END, learner.generator)
        rows, right = Rows.of_completions(made), right.repeat_interleave(K, 0)
    else:
        rows = whole_rows(text)
    _, log_probs, hidden = score(learner.model, rows, 1.0)
    if config.context == "model":
        return Rollouts(rows, rows.ids[:, 1:, None], right, log_probs, hidden)
    probs = log_probs.detach().exp().flatten(0, 1)  # (B * T, V)
    chosen = torch.multinomial(probs, K, replacement=True, generator=learner.generator).unflatten(0, right.shape)
    return Rollouts(rows, chosen, right, log_probs, hidden)


def token_rewards(rollouts: Rollouts, config: TextConfig) -> Tensor:
    """(R, T, A): 1 for the right token, otherwise 0 (-1 with pm1), plus partial credit.

    The credit depends on the context alone.  With `--context data` a group shares its context, so the credit cancels.
    """
    right = rollouts.right[:, :, None]
    hit = (rollouts.chosen == right).float()  # (R, T, A)
    credit = config.partial_logprob * rollouts.log_probs.detach().gather(2, right)  # (R, T, 1)
    return (2 * hit - 1 if config.reward_mode == "pm1" else hit) + credit  # (17)


def group_advantages(baseline: rl.Baseline, rewards: Tensor, K: int) -> Tensor:
    """Each reward minus the mean of its group at the same position: (R, T, A) -> (R, T, A)."""
    R, T, A = rewards.shape
    groups = rewards.view(R * A // K, K // A, T, A).transpose(1, 2)  # (B, T, K / A, A)
    return baseline.advantages(groups.reshape(-1, K)).view_as(groups).transpose(1, 2).reshape(R, T, A)


def descend(learner: Learner, loss: Tensor, config: TextConfig) -> float:
    """One optimizer step.  Returns the gradient norm."""
    learner.optimizer.zero_grad()
    loss.backward()
    trained = [parameter for group in learner.optimizer.param_groups for parameter in group["params"]]
    norm = nn.utils.clip_grad_norm_(trained, config.max_grad_norm)
    learner.optimizer.step()
    return norm.item()


def supervised_step(learner: Learner, text: Tensor, config: TextConfig) -> dict[str, float]:
    """One update on the cross-entropy of all tokens of the windows (B, 1 + T)."""
    loss = -score(learner.model, whole_rows(text), 1.0)[0].mean()
    learner.tokens += text[:, 1:].numel()
    return {"loss": loss.item(), "grad_norm": descend(learner, loss, config)}


def grpo_step(learner: Learner, text: Tensor, config: TextConfig) -> dict[str, float]:
    """One update per step, so the ratio is 1 and nothing is clipped.  The KL divergence is exact."""
    rollouts = roll_out(learner, text, config)
    lp = rollouts.log_probs.gather(2, rollouts.chosen)  # (R, T, A)
    rewards = token_rewards(rollouts, config)
    advantages = group_advantages(learner.baseline, rewards, config.k_samples)
    kl_coef = rl.warmed_up(learner.kl.coef, learner.tokens, config.kl_warmup_tokens)
    kl = divergence(learner, rollouts.rows, rollouts.log_probs).mean()
    loss = rl.policy_loss(lp, lp.detach(), advantages, config.clip_range).mean() + kl_coef * kl  # (18)
    learner.tokens += lp.numel()
    return {"loss": loss.item(), "reward": rewards.mean().item(), "kl": kl.item(), "kl_coef": kl_coef,
            "entropy": rl.entropy(rollouts.log_probs.detach()).mean().item(),
            "grad_norm": descend(learner, loss, config)}  # fmt: skip


def divergence(learner: Learner, rows: Rows, log_probs: Tensor) -> Tensor:
    """KL(policy || reference) at each position: (R, T, V) -> (R, T)."""
    with torch.no_grad():
        reference = score(learner.reference, rows, 1.0)[1]
    return rl.exact_kl(log_probs, reference)


def ppo_step(learner: Learner, text: Tensor, config: TextConfig) -> dict[str, float]:
    """Actor and critic share the network; the value head has its own learning rate."""
    assert learner.value_head is not None
    with torch.no_grad():
        rollouts = roll_out(learner, text, config)
        old = rollouts.log_probs.gather(2, rollouts.chosen)  # (R, T, A)
        rewards = token_rewards(rollouts, config)
        values = learner.value_head(rollouts.hidden)[:, :, None].expand_as(rewards)  # before the token is chosen
        paid, expected = (part.transpose(1, 2).flatten(0, 1) for part in (rewards, values))  # (R * A, T)
        advantages = rl.gae(paid, expected, torch.ones_like(paid), config.gamma, config.gae_lambda)
        advantages = advantages.unflatten(0, (-1, rewards.shape[2])).transpose(1, 2)  # (R, T, A)
        returns = advantages + values
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    kl_coef = rl.warmed_up(learner.kl.coef, learner.tokens, config.kl_warmup_tokens)
    sums, count = dict.fromkeys(("loss", "value_loss", "kl", "clip_share", "grad_norm"), 0.0), 0
    for _ in range(config.epochs):
        for chosen in torch.randperm(len(old), generator=learner.generator).chunk(config.minibatches):
            rows = Rows(rollouts.rows.ids[chosen], rollouts.rows.mask[chosen], 1)
            _, log_probs, hidden = score(learner.model, rows, 1.0)  # (r, T, V)
            lp = log_probs.gather(2, rollouts.chosen[chosen])  # (r, T, A)
            kl = divergence(learner, rows, log_probs).mean()
            value_loss = ((learner.value_head(hidden)[:, :, None] - returns[chosen]) ** 2).mean()
            policy = rl.policy_loss(lp, old[chosen], advantages[chosen], config.clip_range).mean()
            loss = policy + kl_coef * kl + config.value_loss_coef * value_loss
            clipped = rl.is_clipped(lp, old[chosen], advantages[chosen], config.clip_range).float().mean()
            norm = descend(learner, loss, config)
            for name, value in (("loss", loss.item()), ("value_loss", value_loss.item()), ("kl", kl.item()),
                                ("clip_share", clipped.item()), ("grad_norm", norm)):  # fmt: skip
                sums[name] += value
            count += 1
    learner.tokens += old.numel()
    return {name: value / count for name, value in sums.items()} | {"reward": rewards.mean().item(), "kl_coef": kl_coef}
