"""A step of GRPO against the same step worked out row by row, token by token, in plain Python."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from mini.config import ChessConfig
from mini.generate import Sampling, generate
from mini.model import GPT
from mini.train import (
    Learner,
    Rows,
    by_micro_batch,
    make_learner,
    score,
    supervised,
    token_advantages,
    train,
    update,
)
from tests.mini.helpers import END, log_probs_of, small_model

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
K = 4


class CountSevens:
    """A task: completions are worth the share of sevens in them."""

    end = END

    def draw(self, rng: random.Random, count: int) -> list[list[int]]:
        return [rng.choice(PROMPTS) for _ in range(count)]

    def prompt_ids(self, item: list[int]) -> list[int]:
        return item

    def answer_ids(self, item: list[int]) -> list[int]:
        return [7] * len(item) + [END]

    def rewards(
        self, items: Sequence[list[int]], completions: list[list[list[int]]]
    ) -> tuple[Tensor, dict[str, float]]:
        rewards = torch.tensor([[row.count(7) / max(1, len(row)) for row in rows] for rows in completions])
        return rewards, {"sevens": rewards.mean().item()}


@dataclasses.dataclass
class Step:
    """A learner before an update, and what it is to learn from."""

    learner: Learner
    rows: Rows
    old: Tensor
    ref: Tensor
    rewards: Tensor
    advantages: Tensor
    returns: Tensor
    config: ChessConfig

    def update(self, kl_coef: float = 0.5) -> dict[str, float]:
        return update(self.learner, self.rows, self.old, self.ref, self.advantages, self.returns, kl_coef, self.config)


def make_step(**options: Any) -> Step:
    """The policy has moved a little since it sampled, and a little from the start; the value head says something."""
    config = ChessConfig(**{"temperature": 0.9, "micro_batch": 5, "lr": 1e-2, "max_grad_norm": 1e9, **options})
    reference, sampler, policy = small_model(1), small_model(1), small_model(1)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in sampler.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
        for ours, theirs in zip(policy.parameters(), sampler.parameters(), strict=True):
            ours.copy_(theirs + 0.01 * torch.randn_like(theirs))
    sampling = Sampling(config.temperature, max_new_tokens=9)
    made = generate(sampler, PROMPTS, K, sampling, END, torch.Generator().manual_seed(0))
    learner = make_learner(policy, reference, config, config.lr or 0)
    if learner.value_head:
        torch.nn.init.normal_(learner.value_head.out.weight)
    rows = Rows.of_completions(made)
    rewards = torch.tensor([[0.2, 0.2, 0.6, 1.0], [-0.3, -0.3, -0.3, 0.6], [0.4, 0.4, 0.4, 0.4]])
    advantages, returns = token_advantages(learner, rows, rewards, config)
    ref = by_micro_batch(rows, 5, lambda part: score(reference, part, config.temperature)[0])
    return Step(learner, rows, made.log_probs.flatten(0, 1), ref, rewards, advantages, returns, config)


def documents(rows: Rows) -> list[tuple[list[int], list[int]]]:
    """Prompt and completion of each row, without padding."""
    return [
        (ids[rows.S - sum(mask[: rows.S]) : rows.S], ids[rows.S : rows.S + sum(mask[rows.S :])])
        for ids, mask in zip(rows.ids.tolist(), rows.mask.tolist(), strict=True)
    ]


def plain_loss(step: Step, kl_coef: float) -> dict[str, float]:
    """The mean loss over completion tokens, from passes over each document alone."""
    c, sums, total = step.config, dict.fromkeys(("loss", "kl", "clip_share", "entropy", "value_loss"), 0.0), 0
    for n, (prompt, completion) in enumerate(documents(step.rows)):
        now = log_probs_of(step.learner.model, prompt + completion, c.temperature)
        assert isinstance(step.learner.reference, GPT)
        start = log_probs_of(step.learner.reference, prompt + completion, c.temperature)
        ids = torch.tensor([prompt + completion])
        for t, token in enumerate(completion):
            at = len(prompt) - 1 + t
            lp, old, d = now[at][token], step.old[n, t].item(), start[at][token] - now[at][token]
            ratio, advantage = math.exp(lp - old), step.advantages[n, t].item()
            kept = min(max(ratio, 1 - c.clip_range), 1 + c.clip_range)
            forward, reverse = math.exp(d) - d - 1, d * math.exp(d) - math.exp(d) + 1
            kl = {"forward": forward, "reverse": reverse, "symmetric": (forward + reverse) / 2}[c.kl_type]
            spread = -sum(math.exp(value) * value for value in now[at])
            error = 0.0
            if step.learner.value_head:
                hidden = step.learner.model(ids, torch.ones_like(ids))
                error = (step.learner.value_head(hidden)[0, at].item() - step.returns[n, t].item()) ** 2
            policy = -min(ratio * advantage, kept * advantage)
            weight = c.value_loss_coef if step.learner.value_head else 0
            sums["loss"] += policy + kl_coef * kl - c.entropy_coef * spread + weight * error
            sums["kl"] += kl
            sums["clip_share"] += kept * advantage < ratio * advantage
            sums["entropy"] += spread
            sums["value_loss"] += error
            total += 1
    return {name: value / total for name, value in sums.items()}


@pytest.mark.parametrize("options", [
    {}, {"kl_type": "reverse"}, {"kl_type": "symmetric"}, {"clip_range": 0.02}, {"entropy_coef": 0.3},
    {"entropy_coef": 0.0}, {"temperature": 0.6}, {"baseline_type": "rloo"}, {"baseline_type": "adaptive"},
    {"baseline_type": "ema"}, {"scale_by_std": False}, {"use_gae": True}, {"use_gae": True, "gae_lambda": 0.3},
    {"use_gae": True, "value_loss_coef": 2.0}, {"micro_batch": 1}, {"micro_batch": 100},
], ids=str)  # fmt: skip
def test_losses_are_those_worked_out_token_by_token(options: dict[str, Any]) -> None:
    step = make_step(**options)
    expected = plain_loss(step, 0.5)
    assert expected["kl"] > 1e-4
    told = step.update(0.5)
    assert {name: told[name] for name in expected} == pytest.approx(expected, abs=2e-5)
    assert make_step(**options).update(0.7)["loss"] == pytest.approx(expected["loss"] + 0.2 * expected["kl"], abs=2e-5)
    if options == {"clip_range": 0.02}:
        assert 0 < expected["clip_share"] < 1


def test_advantages_reach_every_token_of_their_completion() -> None:
    step = make_step(scale_by_std=False)
    expected = torch.tensor([-0.3, -0.3, 0.1, 0.5, -0.225, -0.225, -0.225, 0.675, 0, 0, 0, 0])
    torch.testing.assert_close(step.advantages, expected[:, None].expand_as(step.advantages))


def test_gae_takes_the_reward_at_the_last_token_and_the_value_heads_word() -> None:
    step = make_step(use_gae=True, gae_lambda=1.0)
    assert step.learner.value_head is not None
    for n, (prompt, completion) in enumerate(documents(step.rows)):
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            values = step.learner.value_head(step.learner.model(ids, torch.ones_like(ids)))[0, len(prompt) - 1 : -1]
        length = len(completion)
        reward = step.rewards.flatten()[n]
        torch.testing.assert_close(step.advantages[n, :length], reward - values, atol=1e-4, rtol=0)
        torch.testing.assert_close(step.returns[n, :length], reward.expand(length), atol=1e-4, rtol=0)


def test_micro_batches_change_nothing() -> None:
    """The mean is over the step's tokens, however they are cut up."""
    whole, cut = make_step(micro_batch=100), make_step(micro_batch=2)
    whole.update()
    cut.update()
    ours, theirs = ([step.learner.optimizer.state[part]["exp_avg"] for part in step.learner.model.parameters()]
                    for step in (cut, whole))  # fmt: skip
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_a_prompt_is_read_once_for_all_of_its_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the log-probabilities and gradients of each document read alone."""
    step, read = make_step(), list[int]()
    alone = dataclasses.replace(step.rows, K=1)
    weights = torch.randn(step.rows.answer_mask.shape, generator=torch.Generator().manual_seed(0))
    forward = GPT.forward

    def count(self: GPT, ids: Tensor, *rest: Any) -> Tensor:
        read.append(len(ids))
        return forward(self, ids, *rest)

    monkeypatch.setattr(GPT, "forward", count)
    found = []
    for rows in (step.rows, alone):
        log_probs, _, hidden = score(step.learner.model, rows, 0.9)
        gradients = torch.autograd.grad((weights * log_probs).sum(), list(step.learner.model.parameters()))
        found.append((log_probs, hidden[rows.answer_mask], gradients))
    assert read == [len(PROMPTS), len(PROMPTS) * K]
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


def test_the_first_adam_step_is_as_long_as_the_learning_rate() -> None:
    """Whatever the gradient: its first mean over the root of its first square is its sign."""
    step = make_step(lr=3e-3)
    before = [parameter.clone() for parameter in step.learner.model.parameters()]
    step.update()
    moved = [(b - a).abs() for a, b in zip(before, step.learner.model.parameters(), strict=True)]
    assert max(part.max().item() for part in moved) == pytest.approx(3e-3, rel=1e-3)
    assert torch.cat([part.flatten() for part in moved]).median().item() == pytest.approx(3e-3, rel=1e-3)


def test_the_learning_rate_rises_to_its_value() -> None:
    learner, config = learner_and_config(lr=4e-3, lr_warmup=4)
    rates = [learner.optimizer.param_groups[0]["lr"] for _ in train(learner, CountSevens(), config, SAMPLING)]
    assert rates == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3, 4e-3, 4e-3])


def test_groups_without_spread_leave_the_weights_alone() -> None:
    """The entropy bonus alone once moved a policy by a whole nat a token: Adam's steps know no small gradients."""
    step = make_step()
    step.advantages = torch.zeros_like(step.advantages)
    before = [parameter.clone() for parameter in step.learner.model.parameters()]
    step.update()
    assert all(map(torch.equal, before, step.learner.model.parameters()))


def test_long_gradients_are_cut() -> None:
    """By Adam's second step the length counts: a first gradient that was cut weighs less beside the second."""
    norms = [make_step(max_grad_norm=limit).update()["grad_norm"] for limit in (1e9, 1e-3)]
    assert norms[0] == pytest.approx(norms[1])
    step = make_step(max_grad_norm=1e-3)
    step.update()
    first_mean = [step.learner.optimizer.state[p]["exp_avg"] for p in step.learner.model.parameters()]
    total = math.sqrt(sum(part.square().sum().item() for part in first_mean))
    assert total == pytest.approx(0.1 * 1e-3, rel=1e-2)  # 1 - the first beta, times the limit


def test_prompts_and_padding_are_not_trained_on() -> None:
    """An update is the same whatever tokens the padding holds, and scores no prompt token."""
    step, other = make_step(), make_step()
    other.rows.ids[~other.rows.mask] = 33
    assert step.update() == pytest.approx(other.update(), rel=1e-4)
    log_probs, _, _ = score(step.learner.model, step.rows, 1.0)
    assert log_probs.shape == step.rows.answer_mask.shape
    assert (log_probs[~step.rows.answer_mask] == 0).all()


def learner_and_config(**options: Any) -> tuple[Learner, ChessConfig]:
    config = ChessConfig(**{"steps": 6, "batch_size": 3, "k_samples": K, "lr": 3e-3, "temperature": 1.0, **options})
    return make_learner(small_model(spread=2), small_model(spread=2), config, config.lr or 0), config


SAMPLING = Sampling(1.0, max_new_tokens=6)


def test_the_loop_learns() -> None:
    learner, config = learner_and_config(steps=20, batch_size=4, k_samples=8, lr=1e-2)
    sevens = [figures["sevens"] for figures in train(learner, CountSevens(), config, SAMPLING)]
    assert sum(sevens[-5:]) / 5 > sum(sevens[:5]) / 5 + 0.3


def test_first_update_clips_nothing_and_a_second_one_may() -> None:
    """At the first update the policy is the one that sampled."""
    (once, config), (often, more) = learner_and_config(updates=1), learner_and_config(updates=4, clip_range=0.01)
    assert [figures["clip_share"] for figures in train(once, CountSevens(), config, SAMPLING)] == [0] * 6
    assert max(figures["clip_share"] for figures in train(often, CountSevens(), more, SAMPLING)) > 0


def test_kl_warm_up_by_steps_and_by_tokens() -> None:
    learner, config = learner_and_config(kl_warmup=4, kl_coef=0.1)
    coefs = [figures["kl_coef"] for figures in train(learner, CountSevens(), config, SAMPLING)]
    assert coefs == pytest.approx([0, 0.025, 0.05, 0.075, 0.1, 0.1])
    learner, config = learner_and_config(kl_warmup=100, kl_warmup_unit="tokens", kl_coef=0.1)
    seen, coefs, expected = 0.0, list[float](), list[float]()
    for figures in train(learner, CountSevens(), config, SAMPLING):
        coefs.append(figures["kl_coef"])
        expected.append(0.1 * min(1, seen / 100))
        seen += figures["length"] * 3 * K
    assert coefs == pytest.approx(expected)
    assert len(set(coefs)) > 2


def test_adaptive_weight_follows_the_divergence_of_each_step() -> None:
    learner, config = learner_and_config(adaptive_kl=True, kl_target=0.01, kl_horizon=100.0, lr=1e-2)
    coef = config.kl_coef
    for figures in train(learner, CountSevens(), config, SAMPLING):
        assert figures["kl_coef"] == pytest.approx(coef)
        coef *= 1 + min(max(figures["kl"] / 0.01 - 1, -0.2), 0.2) * 3 * K / 100
    assert learner.kl.coef == pytest.approx(coef) != config.kl_coef


def test_exact_divergence_is_near_its_estimate() -> None:
    """Measured before the tenth step's update, when the start and the policy differ."""
    learner, config = learner_and_config(steps=11, batch_size=8, k_samples=16, updates=1, lr=1e-3)
    figures = list(train(learner, CountSevens(), config, SAMPLING))
    assert [n for n, step in enumerate(figures) if "kl_exact" in step] == [0, 10]
    assert figures[0]["kl_exact"] == pytest.approx(0, abs=1e-5)
    assert figures[10]["kl_exact"] == pytest.approx(figures[10]["kl"], rel=1)
    assert figures[10]["kl_exact"] > 1e-4


@pytest.mark.parametrize("options", [{}, {"baseline_type": "ema", "adaptive_kl": True}, {"use_gae": True}], ids=str)
def test_a_resumed_run_has_the_same_numbers(options: dict[str, Any]) -> None:
    """Checkpoint after two steps, restored into a fresh learner."""
    whole, config = learner_and_config(**options)
    expected = [figures["loss"] for figures in train(whole, CountSevens(), config, SAMPLING)]
    first, _ = learner_and_config(**options)
    losses = [figures["loss"] for figures in islice(train(first, CountSevens(), config, SAMPLING), 2)]
    state = copy.deepcopy(first.state())
    second, _ = learner_and_config(**options)
    second.restore(state)
    losses += [figures["loss"] for figures in train(second, CountSevens(), config, SAMPLING)]
    assert losses == expected


def test_the_start_stays_frozen() -> None:
    learner, config = learner_and_config()
    for _ in train(learner, CountSevens(), config, SAMPLING):
        pass
    start: GPT = small_model(spread=2)
    assert isinstance(learner.reference, GPT)
    assert all(map(torch.equal, learner.reference.parameters(), start.parameters()))
    assert not all(map(torch.equal, learner.model.parameters(), start.parameters()))


def test_supervised_training_learns_answers_and_keeps_to_its_limits() -> None:
    model, said = small_model(spread=1), list[str]()
    rng, task = random.Random(0), CountSevens()

    def draw(count: int) -> list[list[int]]:
        return task.draw(rng, count)

    assert supervised(model, CountSevens(), draw, 8, 3e-3, steps=100, say=said.append) == 100
    losses = [float(line.split("loss ")[1].split()[0]) for line in said]
    assert losses[-1] < losses[0] / 2
    made = generate(model, PROMPTS, 1, Sampling(0, max_new_tokens=9), END).tokens(END)
    assert [rows[0] for rows in made] == [[7] * len(prompt) for prompt in PROMPTS]
    assert supervised(model, CountSevens(), draw, 8, 3e-3, seconds=0) == 0
