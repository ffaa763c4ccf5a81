"""Rewards, groups and losses of text, against plain loops over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mini.config import TextConfig
from mini.model import GPT, GptConfig
from mini.rl import Baseline
from mini.text_data import CharTokens, Corpus, Counts, draw_windows
from mini.text_rl import Rollouts, group_advantages, grpo_step, ppo_step, roll_out, token_rewards, whole_rows
from mini.text_task import learn, make_learner
from mini.train import Learner
from tests.mini.helpers import SMALL, log_probs_of, small_model

T, B, K = 6, 3, 4
IDS = torch.randint(SMALL.vocab_size, (400,), generator=torch.Generator().manual_seed(0))
TEXT = draw_windows(IDS, T, B, seed=1, step=0)


def learner_and_config(**options: Any) -> tuple[Learner, TextConfig]:
    config = TextConfig(**{"algo": "grpo", "n_embd": SMALL.n_embd, "kl_warmup_tokens": 0, "beta_kl": 0.3,
                           "max_grad_norm": 1e9, "batch_size": B, **options})  # fmt: skip
    model = small_model(spread=3)
    return make_learner(model, Counts(IDS, SMALL.vocab_size), config, 1e-3), config


def test_rewards_by_hand() -> None:
    log_probs = torch.tensor([[[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]]]).log2()  # in bits: any numbers do
    rollouts = Rollouts(whole_rows(torch.tensor([[0, 0, 1]])), torch.tensor([[[0, 2], [0, 1]]]), torch.tensor([[0, 1]]),
                        log_probs, torch.empty(0))  # fmt: skip
    plus1 = token_rewards(rollouts, TextConfig())
    assert plus1.tolist() == [[[1, 0], [0, 1]]]
    both = token_rewards(rollouts, TextConfig(reward_mode="pm1"))
    assert both.tolist() == [[[1, -1], [-1, 1]]]
    partial = token_rewards(rollouts, TextConfig(partial_logprob=2.0))
    credit = 2 * torch.tensor(0.75).log2().item()
    assert partial.flatten().tolist() == pytest.approx([-1, -2, credit, 1 + credit])


@pytest.mark.parametrize("context", ["data", "model"])
def test_a_group_is_the_rollouts_of_a_window_at_one_place(context: str) -> None:
    shape = (B, T, K) if context == "data" else (B * K, T, 1)
    rewards = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    advantages = group_advantages(Baseline(), rewards, K)
    for b in range(B):
        for t in range(T):
            group = [(b, t, k) if context == "data" else (b * K + k, t, 0) for k in range(K)]
            mean = sum(rewards[at].item() for at in group) / K
            expected = [rewards[at].item() - mean for at in group]
            assert [advantages[at].item() for at in group] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("context", ["data", "model"])
def test_rollouts_read_what_they_should_and_say_what_the_policy_says(context: str) -> None:
    learner, config = learner_and_config(context=context, k_samples=600)
    rollouts = roll_out(learner, TEXT[:1], config)
    if context == "data":
        assert torch.equal(rollouts.rows.ids, TEXT[:1])
        first, right = rollouts.chosen[0, 0], rollouts.right
    else:
        assert torch.equal(rollouts.rows.ids[:, 1:, None], rollouts.chosen)
        assert (rollouts.rows.ids[:, 0] == TEXT[0, 0]).all()
        first, right = rollouts.chosen[:, 0, 0], rollouts.right[::600]
    assert torch.equal(right, TEXT[:1, 1:])
    expected = torch.tensor(log_probs_of(learner.model, TEXT[0, :1].tolist())[0]).exp()
    share = first.bincount(minlength=SMALL.vocab_size) / 600
    assert (share - expected).abs().sum() / 2 < 0.15  # as far apart as 600 draws may be from what they are drawn by


def plain_loss(learner: Learner, rollouts: Rollouts, config: TextConfig) -> Tensor:
    """-advantage * log p + beta * KL, context by context, place by place; its gradient is GRPO's."""
    K, (R, T, A) = config.k_samples, rollouts.chosen.shape
    table, total = Counts(IDS, SMALL.vocab_size), torch.zeros(())
    rewards = {(r, t, a): float(rollouts.chosen[r, t, a] == rollouts.right[r, t])
               for r in range(R) for t in range(T) for a in range(A)}  # fmt: skip
    for r in range(R):
        ids = rollouts.rows.ids[r : r + 1]
        log_probs = learner.model.logits(learner.model(ids, torch.ones_like(ids)))[0].log_softmax(1)
        for t in range(T):
            reference = table.logits(ids[:, t])[0]
            total = total + config.beta_kl * (log_probs[t].exp() * (log_probs[t] - reference)).sum() / (R * T)
            for a in range(A):
                group = [(r, t, k) for k in range(K)] if A == K else [(r // K * K + k, t, 0) for k in range(K)]
                advantage = rewards[r, t, a] - sum(rewards[at] for at in group) / K
                total = total - advantage * log_probs[t, rollouts.chosen[r, t, a]] / (R * T * A)
    return total


@pytest.mark.parametrize("context", ["data", "model"])
def test_gradient_of_grpo_is_that_of_the_plain_loss(context: str) -> None:
    """Adam's first mean is a tenth of the gradient."""
    learner, config = learner_and_config(context=context, k_samples=K)
    state = learner.generator.get_state()
    rollouts = roll_out(learner, TEXT, config)
    learner.generator.set_state(state)
    rollouts.right[:, ::2] = rollouts.chosen[:: len(rollouts.chosen) // B, ::2, 0].repeat_interleave(
        len(rollouts.chosen) // B, 0
    )  # or hardly any would be right
    text = torch.cat((TEXT[:, :1], rollouts.right[:: len(rollouts.right) // B]), 1)
    if context == "data":  # where the text is what is read: the draws have to be made again
        rollouts = roll_out(learner, text, config)
        learner.generator.set_state(state)
    expected = torch.autograd.grad(plain_loss(learner, rollouts, config), list(learner.model.parameters()),
                                   allow_unused=True)  # fmt: skip
    grpo_step(learner, text, config)
    found = [learner.optimizer.state[parameter]["exp_avg"] * 10 for parameter in learner.model.parameters()]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs, atol=2e-5, rtol=1e-3)


def test_kl_weight_rises_with_the_sampled_tokens() -> None:
    learner, config = learner_and_config(kl_warmup_tokens=200, k_samples=K)
    coefs = [grpo_step(learner, TEXT, config)["kl_coef"] for _ in range(5)]
    assert coefs == pytest.approx([0.3 * min(1, i * B * T * K / 200) for i in range(5)])


def test_value_loss_of_ppo_by_hand() -> None:
    """The value head says 0 at first, so that returns are discounted sums of rewards, and nothing is clipped."""
    learner, config = learner_and_config(algo="ppo", epochs=1, minibatches=1, gamma=0.9, gae_lambda=0.5, k_samples=K)
    state = learner.generator.get_state()
    rollouts = roll_out(learner, TEXT, config)
    learner.generator.set_state(state)
    hit = (rollouts.chosen == rollouts.right[:, :, None]).float()  # (B, T, K)
    squares = [
        sum(0.45**later * hit[b, t + later, k].item() for later in range(T - t)) ** 2
        for b in range(B) for t in range(T) for k in range(K)
    ]  # fmt: skip
    figures = ppo_step(learner, TEXT, config)
    assert figures["value_loss"] == pytest.approx(sum(squares) / len(squares), abs=1e-6)
    assert figures["clip_share"] == 0


@pytest.mark.parametrize(("algo", "context"), [("grpo", "data"), ("ppo", "data"), ("ppo", "model")])
def test_rewards_teach_a_text(algo: str, context: str) -> None:
    """0 1 2 3 0 1 2 3 ...: that the next number follows is learnt from rewards alone."""
    ids = torch.arange(4).repeat(100)
    corpus = Corpus(CharTokens("0123"), ids, ids)
    config = TextConfig(algo="ppo" if algo == "ppo" else "grpo", context="data" if context == "data" else "model",
                        n_embd=32, beta_kl=0.0, batch_size=16, k_samples=16, critic_lr=5e-4, gamma=0.0, epochs=2,
                        minibatches=2)  # fmt: skip
    torch.manual_seed(0)
    model = GPT(GptConfig(1, 2, 32, 16, 4))
    learner = make_learner(model, model, config, 3e-3)
    rewards = [figures["reward"] for figures in learn(learner, algo, corpus, 6, config, 25, 1e9)]
    assert rewards[0] < 0.4
    assert sum(rewards[-5:]) / 5 > 0.6


def test_ppo_clips_once_the_policy_has_moved() -> None:
    learner, config = learner_and_config(algo="ppo", clip_range=0.01)
    assert ppo_step(learner, TEXT, config)["clip_share"] > 0


def test_the_learning_rate_falls_to_the_end() -> None:
    """In the last half of four steps, as asked for; of a critic's rate too."""
    learner, config = learner_and_config(lr_decay=0.5, algo="ppo", critic_lr=2e-3)
    rates = [[group["lr"] for group in learner.optimizer.param_groups]
             for _ in learn(learner, "ppo", Corpus(CharTokens("a"), IDS, IDS), T, config, 4, float("inf"))]  # fmt: skip
    assert rates == [pytest.approx([share * 1e-3, share * 2e-3]) for share in (1, 1, 1, 0.5)]
