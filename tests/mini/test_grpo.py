"""GRPO: formulas against numbers worked out by hand; a step against itself, row by row and token by token."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from mini.config import BaselineType, ChessConfig, KlType
from mini.grpo import (
    Baseline,
    KlController,
    Learner,
    entropy,
    exact_kl,
    gae,
    kl_estimate,
    likelihood,
    policy_loss,
    score,
    supervised,
    token_advantages,
    train,
    update,
    value_head,
    warmed_up,
    zero_spread,
)
from mini.model import GPT, Cache, Diverged, Rows, Sampling, generate
from tests.mini.helpers import END, SMALL, elsewhere, log_probs_of, small_model

REWARDS = torch.tensor([[0.2, 0.2, 0.6, 1.0], [-0.3, -0.3, -0.3, 0.6]])  # means 0.5 and -0.075


def test_policy_loss_and_where_it_is_clipped() -> None:
    """Ratios 1.5, 1.5, 0.5, 0.5, 1.1 with clip 0.2, advantages +2, -2, +2, -2, +2."""
    lp = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1]]).log()
    advantages = torch.tensor([[2.0, -2.0, 2.0, -2.0, 2.0]])
    loss, clipped = policy_loss(lp, torch.zeros(1, 5), advantages, 0.2)
    torch.testing.assert_close(loss, torch.tensor([[-2.4, 3.0, -1.0, 1.6, -2.2]]))
    assert clipped.tolist() == [[True, False, False, True, False]]
    torch.testing.assert_close(policy_loss(lp, torch.zeros(1, 5), advantages, 0.6)[0][0, 0], torch.tensor(-3.0))


@pytest.mark.parametrize(("kind", "expected"), [
    ("forward", [0.0, 2 - math.log(2) - 1, 0.5 + math.log(2) - 1]),
    ("reverse", [0.0, 2 * math.log(2) - 2 + 1, -0.5 * math.log(2) - 0.5 + 1]),
    ("symmetric", [0.0, math.log(2) / 2, math.log(2) / 4]),
])  # fmt: skip
def test_kl_estimates(kind: KlType, expected: list[float]) -> None:
    """The start gives a token as much, twice and half the probability: d = 0, log 2, -log 2."""
    lp = torch.tensor([[-1.0, -1.0, -1.0]])
    ref = lp + torch.tensor([[1.0, 2.0, 0.5]]).log()
    torch.testing.assert_close(kl_estimate(lp, ref, kind), torch.tensor([expected]))


def test_kl_estimates_have_the_right_mean_and_are_never_negative() -> None:
    """Weighted by the policy, forward is KL(p || q) and reverse KL(q || p), exactly, over any vocabulary."""
    torch.manual_seed(0)
    p, q = torch.randn(2, 1, 40).log_softmax(-1)
    forward, reverse = (p.exp() * kl_estimate(p, q, kind) for kind in ("forward", "reverse"))
    torch.testing.assert_close(forward.sum(), exact_kl(p, q)[0])
    torch.testing.assert_close(reverse.sum(), (q.exp() * (q - p)).sum())
    assert min(kl_estimate(p, q, kind).min().item() for kind in ("forward", "reverse", "symmetric")) >= 0


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of log-probabilities (V,)."""
    return (p.exp() * (p - q)).sum()


KINDS: dict[KlType, Callable[[Tensor, Tensor], Tensor] | None] = {  # whose gradient each has
    "exact": kl, "squared": kl, "forward": lambda p, q: kl(q, p), "reverse": None,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "right"), KINDS.items())
def test_gradients_of_the_divergence(kind: KlType, right: Callable[[Tensor, Tensor], Tensor] | None) -> None:
    """In expectation over a policy of eight tokens, which is fixed while its samples are learnt from."""
    torch.manual_seed(0)
    logits, start = torch.randn(8, dtype=torch.double, requires_grad=True), torch.randn(8, dtype=torch.double)
    p, q = logits.log_softmax(0), start.log_softmax(0)
    expected = exact_kl(logits, start) if kind == "exact" else (p.detach().exp() * kl_estimate(p, q, kind)).sum()
    found = torch.autograd.grad(expected, logits, retain_graph=True)[0]
    for other in (kl, lambda p, q: kl(q, p)):
        gradient = torch.autograd.grad(other(p, q), logits, retain_graph=True)[0]
        same = right is not None and torch.equal(right(p, q), other(p, q))
        assert torch.allclose(found, gradient) == same


def test_squared_estimate() -> None:
    """Half the square of d = log 2, whichever way round."""
    ratio = torch.tensor([2.0, 0.5]).log()
    expected = torch.tensor([math.log(2) ** 2 / 2] * 2)
    torch.testing.assert_close(kl_estimate(torch.zeros(2), ratio, "squared"), expected)


def test_exact_kl_and_entropy() -> None:
    logits, ref_logits = torch.tensor([[0.5, 0.5]]).log() + 3, torch.tensor([[0.25, 0.75]]).log()
    assert exact_kl(logits, ref_logits).item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert entropy(torch.tensor([0.25, 0.25, 0.5]).log()).item() == pytest.approx(1.5 * math.log(2))


@pytest.mark.parametrize(("kind", "expected"), [
    ("group_mean", [[-0.3, -0.3, 0.1, 0.5], [-0.225, -0.225, -0.225, 0.675]]),
    ("rloo", [[-0.4, -0.4, 0.4 / 3, 2 / 3], [-0.3, -0.3, -0.3, 0.9]]),  # 4 / 3 of the above
    ("adaptive", [[-0.2, -0.2, 0.2, 0.6], [0.0, 0.0, 0.0, 0.9]]),  # medians 0.4 and -0.3
    ("best", [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]),
    ("ema", [[-0.0125, -0.0125, 0.3875, 0.7875], [-0.5125, -0.5125, -0.5125, 0.3875]]),  # mean of all 0.2125
])  # fmt: skip
def test_baselines(kind: BaselineType, expected: list[list[float]]) -> None:
    torch.testing.assert_close(Baseline(kind).advantages(REWARDS), torch.tensor(expected))


def test_adaptive_baseline_is_the_mean_where_the_spread_is_small() -> None:
    """Standard deviation 0.05: the mean 0.525 counts, not the median 0.5."""
    rewards = torch.tensor([[0.5, 0.5, 0.5, 0.6]])
    expected = torch.tensor([[-0.025, -0.025, -0.025, 0.075]])
    torch.testing.assert_close(Baseline("adaptive").advantages(rewards), expected)


def test_group_mean_over_the_standard_deviation() -> None:
    """Deviations -0.3 -0.3 0.1 0.5: squares sum to 0.44, over 3 (ddof 1)."""
    expected = torch.tensor([-0.3, -0.3, 0.1, 0.5]) / (math.sqrt(0.44 / 3) + 1e-4)
    torch.testing.assert_close(Baseline("group_mean", scale_by_std=True).advantages(REWARDS)[0], expected)


def test_ema_is_used_before_its_update() -> None:
    """Batch means 0.4, 1.0, 0.0: used are 0.4, 0.4, 0.4 + 0.1 * 0.6 = 0.46."""
    baseline = Baseline("ema", ema_alpha=0.1)
    used = [mean - baseline.advantages(torch.full((1, 2), mean))[0, 0].item() for mean in (0.4, 1.0, 0.0)]
    assert used == pytest.approx([0.4, 0.4, 0.46])


@pytest.mark.parametrize("kind", ["group_mean", "adaptive", "rloo"])
def test_equal_rewards_give_exactly_nothing(kind: BaselineType) -> None:
    """0.1 has no exact mean of seven in floating point."""
    rewards = torch.tensor([[0.1] * 7, [0.6] * 7])
    assert Baseline(kind, scale_by_std=True).advantages(rewards).abs().max().item() == 0
    assert zero_spread(torch.tensor([[0.1, 0.1], [0.1, 0.2]])).tolist() == [True, False]


def test_gae_over_the_tokens_of_a_completion() -> None:
    """gamma 1, lambda 0.5, reward 1 at the last token, values 0.2 0.4 0.6: deltas 0.2 0.2 0.4.

    Advantages from the end: 0.4; 0.2 + 0.5 * 0.4 = 0.4; 0.2 + 0.5 * 0.4 = 0.4.  The second row ends one token sooner:
    deltas 0.2 and 0.6, advantages 0.5 and 0.6, whatever stands in the padding.
    """
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    values = torch.tensor([[0.2, 0.4, 0.6], [0.2, 0.4, 9.9]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    expected = torch.tensor([[0.4, 0.4, 0.4], [0.5, 0.6, 0.0]])
    torch.testing.assert_close(gae(rewards, values, mask, 1.0, 0.5), expected)


def test_gae_with_lambda_one_is_the_reward_less_the_value() -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 0.7]]), torch.tensor([[0.1, 0.3, 0.2]])
    expected = torch.tensor([[0.6, 0.4, 0.5]])
    torch.testing.assert_close(gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), 1.0, 1.0), expected)


def test_kl_controller() -> None:
    """Twice the target: cut to +0.2; 64 of 10,000 completions.  Then 0.9 of the target: -0.1.  Fixed: nothing."""
    controller = KlController(0.02, adaptive=True, target=0.01, horizon=10_000)
    controller.update(0.02, 64)
    assert controller.coef == pytest.approx(0.02 * (1 + 0.2 * 64 / 10_000))
    controller = KlController(0.02, adaptive=True, target=0.01, horizon=1_000)
    controller.update(0.009, 64)
    assert controller.coef == pytest.approx(0.02 * (1 - 0.1 * 64 / 1_000))
    controller = KlController(0.02)
    controller.update(5.0, 64)
    assert controller.coef == 0.02


def test_kl_warm_up() -> None:
    assert [warmed_up(0.02, seen, 4) for seen in (0, 1, 4, 9)] == [0, 0.005, 0.02, 0.02]
    assert warmed_up(0.02, 0, 0) == 0.02


def test_value_head_begins_at_zero_and_has_the_stated_shape() -> None:
    head = value_head(SMALL.n_embd)
    assert head(torch.randn(2, 3, 32)).tolist() == [[0.0] * 3] * 2
    assert [tuple(p.shape) for p in head.parameters()] == [(16, 32), (16,), (1, 16), (1,)]


# ---------------------------------------------------------------------------------------------------------------------
# A step

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
K = 4
HERE = torch.device("cpu")


class CountSevens:
    """A task: completions are worth the share of sevens in them."""

    end = END

    def draw(self, rng: random.Random, count: int) -> list[list[int]]:
        return [rng.choice(PROMPTS) for _ in range(count)]

    def prompt_ids(self, item: list[int]) -> list[int]:
        return item

    def rewards(
        self, items: Sequence[list[int]], completions: list[list[list[int]]]
    ) -> tuple[Tensor, dict[str, float]]:
        rewards = torch.tensor([[row.count(7) / max(1, len(row)) for row in rows] for rows in completions],
                               device=HERE)  # fmt: skip
        return rewards, {"sevens": rewards.mean().item()}


@dataclasses.dataclass
class Step:
    """A learner before an update, and what it is to learn from."""

    learner: Learner
    rows: Rows
    old: Tensor
    rewards: Tensor
    advantages: Tensor
    returns: Tensor
    config: ChessConfig

    def update(self, kl_coef: float = 0.5) -> dict[str, float]:
        return update(self.learner, self.rows, self.old, self.advantages, self.returns, kl_coef, self.config)


def learner_for(model: GPT, reference: GPT, config: ChessConfig) -> Learner:
    """As the chess command makes it."""
    return Learner(
        model, reference.requires_grad_(False), config.lr or 0, config.seed,
        value_lr=config.lr if config.use_gae else None,
        baseline=Baseline(config.baseline_type, config.scale_by_std),
        kl=KlController(config.kl_coef, config.adaptive_kl, config.kl_target, config.kl_horizon),
    )  # fmt: skip


@cache
def sampled(temperature: float) -> tuple[GPT, GPT, Rows, Tensor]:
    """The start, a policy that has moved a little from it and since it sampled, and what it sampled."""
    reference, sampler, policy = small_model(1), small_model(1), small_model(1)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in sampler.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
        for ours, theirs in zip(policy.parameters(), sampler.parameters(), strict=True):
            ours.copy_(theirs + 0.01 * torch.randn_like(theirs))
    sampling = Sampling(temperature, max_new_tokens=9)
    return reference, policy, *generate(sampler, PROMPTS, K, sampling, END, torch.Generator().manual_seed(0))


def make_step(**options: Any) -> Step:
    """An update of this policy; the value head says something."""
    chosen = {"temperature": 0.9, "micro_batch": 5, "lr": 1e-2, "max_grad_norm": 1e9, "kl_coef": 0.5, **options}
    config = ChessConfig(**chosen)
    reference, policy, rows, old = copy.deepcopy(sampled(config.temperature))
    torch.manual_seed(3)
    learner = learner_for(policy, reference, config)
    if learner.value_head:
        torch.nn.init.normal_(next(islice(learner.value_head.parameters(), 2, None)))
    rewards = torch.tensor([[0.2, 0.2, 0.6, 1.0], [-0.3, -0.3, -0.3, 0.6], [0.4, 0.4, 0.4, 0.4]])
    advantages, returns = token_advantages(learner, rows, rewards, config)
    return Step(learner, rows, old, rewards, advantages, returns, config)


def documents(rows: Rows) -> list[tuple[list[int], list[int]]]:
    """Prompt and completion of each row, without padding."""
    return [
        (ids[rows.S - sum(mask[: rows.S]) : rows.S], ids[rows.S : rows.S + sum(mask[rows.S :])])
        for ids, mask in zip(rows.ids.tolist(), rows.mask.tolist(), strict=True)
    ]


def plain_loss(step: Step, kl_coef: float) -> dict[str, float]:
    """The mean loss over completion tokens, from passes over each document alone."""
    c, total = step.config, 0
    names = ("loss", "kl", "kl_exact", "clip_share", "entropy", *(["value_loss"] if step.learner.value_head else []))
    sums = dict.fromkeys(names, 0.0)
    for n, (prompt, completion) in enumerate(documents(step.rows)):
        now = log_probs_of(step.learner.model, prompt + completion, c.temperature)
        assert isinstance(step.learner.reference, GPT)
        start = log_probs_of(step.learner.reference, prompt + completion, c.temperature)
        ids = torch.tensor([prompt + completion])
        head = step.learner.value_head
        values = head(step.learner.model(ids, torch.ones_like(ids)))[0] if head else None
        for t, token in enumerate(completion):
            at = len(prompt) - 1 + t
            lp, old, d = now[at][token], step.old[n, t].item(), start[at][token] - now[at][token]
            ratio, advantage = math.exp(lp - old), step.advantages[n, t].item()
            kept = min(max(ratio, 1 - c.clip_range), 1 + c.clip_range)
            forward, reverse = math.exp(d) - d - 1, d * math.exp(d) - math.exp(d) + 1
            exact = sum(math.exp(ours) * (ours - theirs) for ours, theirs in zip(now[at], start[at], strict=True))
            kl = {"forward": forward, "reverse": reverse, "symmetric": (forward + reverse) / 2, "exact": exact,
                  "squared": d * d / 2}[c.kl_type]  # fmt: skip
            spread = -sum(math.exp(value) * value for value in now[at])
            sums["loss"] += kl_coef * kl - c.entropy_coef * spread - min(ratio * advantage, kept * advantage)
            if values is not None:
                error = (values[at].item() - step.returns[n, t].item()) ** 2
                sums["loss"] += c.value_loss_coef * error
                sums["value_loss"] += error
            sums["kl"] += kl
            sums["kl_exact"] += exact
            sums["clip_share"] += kept * advantage < ratio * advantage
            sums["entropy"] += spread
            total += 1
    return {name: value / total for name, value in sums.items()}


@pytest.mark.parametrize("options", [
    {}, {"kl_type": "forward"}, {"kl_type": "reverse"}, {"kl_type": "symmetric"}, {"kl_type": "squared"},
    {"clip_range": 0.02}, {"entropy_coef": 0.3},
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


def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each later forward pass the rows, but not those of completions after cached prompts."""
    read, forward = list[int](), GPT.forward

    def count(self: GPT, ids: Tensor, mask: Tensor, cache: list[Cache] | None = None) -> Tensor:
        read.extend([len(ids)] if cache is None or not cache[0].prompt else [])
        return forward(self, ids, mask, cache)

    monkeypatch.setattr(GPT, "forward", count)
    return read


def test_completions_of_a_single_token_are_scored_together() -> None:
    """A policy that has collapsed to the end token makes them: after the prompt nothing is left to read."""
    model = make_step().learner.model
    rows, _ = generate(model, PROMPTS, K, Sampling(max_new_tokens=1), END)
    together, alone = (score(model, part, 0.9)[0] for part in (rows, dataclasses.replace(rows, K=1)))
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


def test_a_prompt_is_read_once_for_all_of_its_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the log-probabilities and gradients of each document read alone."""
    step, read = make_step(), rows_read(monkeypatch)
    alone = dataclasses.replace(step.rows, K=1)
    weights = torch.randn(step.rows.answer_mask.shape, generator=torch.Generator().manual_seed(0))
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


@pytest.mark.parametrize(("decay", "last"), [(0.0, [4e-3, 4e-3]), (0.5, [4e-3 * 2 / 3, 4e-3 / 3])])
def test_the_learning_rate_rises_to_its_value_and_may_fall_at_the_end(decay: float, last: list[float]) -> None:
    learner, config = learner_and_config(lr=4e-3, lr_warmup=4, lr_decay=decay)
    rates = [learner.optimizer.param_groups[0]["lr"] for _ in train(learner, CountSevens(), config, SAMPLING)]
    assert rates == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3, *last])


def test_groups_without_a_gradient_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three prompts, the third has equal rewards.  The gradient and the figures of the others stay."""
    seen = rows_read(monkeypatch)
    steps = [make_step(kl_coef=coef, entropy_coef=0.0) for coef in (0.0, 1.0)]
    seen.clear()
    told = steps[0].update(0.0)
    assert sum(seen) == 2  # a prompt is read once for its group, and the start not at all
    assert "kl" not in told
    seen.clear()
    assert steps[1].update(0.0)["loss"] == pytest.approx(told["loss"])
    assert sum(seen) == 3 + 3
    ours, theirs = ([step.learner.optimizer.state[part]["exp_avg"] for part in step.learner.model.parameters()]
                    for step in steps)  # fmt: skip
    torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=1e-4)


def moved_without_spread(step: Step, kl_coef: float) -> bool:
    """Whether an update moves the weights where the rewards of every group are equal."""
    step.advantages = torch.zeros_like(step.advantages)
    before = [parameter.clone() for parameter in step.learner.model.parameters()]
    step.update(kl_coef)
    return not all(map(torch.equal, before, step.learner.model.parameters()))


def test_groups_without_spread_leave_the_start_alone() -> None:
    """The entropy bonus alone once moved a policy by a whole nat a token: Adam's steps know no small gradients."""
    step = make_step()
    assert isinstance(step.learner.reference, GPT)
    step.learner.model.load_state_dict(step.learner.reference.state_dict())
    assert not moved_without_spread(step, 0.5)


@pytest.mark.parametrize("kl_coef", [0.5, 0.0])
def test_groups_without_spread_still_pull_a_policy_back_to_its_start(kl_coef: float) -> None:
    """As far as the divergence counts."""
    assert moved_without_spread(make_step(kl_coef=kl_coef), kl_coef) == (kl_coef > 0)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_numbers_that_are_not_finite_never_reach_the_weights(what: str) -> None:
    step = make_step()
    before = [parameter.clone() for parameter in step.learner.model.parameters()]
    if what == "loss":
        step.old[0, 0] = torch.nan
    else:
        step.learner.model.wpe.weight.register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(Diverged, match=what):
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
    chosen = {"steps": 6, "batch_size": 3, "k_samples": K, "lr": 3e-3, "temperature": 1.0, "lr_decay": 0.0,
              "kl_coef": 0.02, **options}  # fmt: skip
    config = ChessConfig(**chosen)
    return learner_for(small_model(spread=2), small_model(spread=2), config), config


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


def test_kl_warm_up_by_steps() -> None:
    learner, config = learner_and_config(kl_warmup=4, kl_coef=0.1)
    coefs = [figures["kl_coef"] for figures in train(learner, CountSevens(), config, SAMPLING)]
    assert coefs == pytest.approx([0, 0.025, 0.05, 0.075, 0.1, 0.1])


def test_adaptive_weight_follows_the_divergence_of_each_step() -> None:
    learner, config = learner_and_config(adaptive_kl=True, kl_target=0.01, kl_horizon=100.0, lr=1e-2)
    coef = config.kl_coef
    for figures in train(learner, CountSevens(), config, SAMPLING):
        assert figures["kl_coef"] == pytest.approx(coef)
        coef *= 1 + min(max(figures["kl_exact"] / 0.01 - 1, -0.2), 0.2) * 3 * K / 100
    assert learner.kl.coef == pytest.approx(coef) != config.kl_coef


def test_exact_divergence_is_near_its_estimate() -> None:
    """Both are of the moment before a step's update: at the first step there is none."""
    learner, config = learner_and_config(steps=11, batch_size=8, k_samples=16, updates=1, lr=1e-3, kl_type="forward")
    figures = list(train(learner, CountSevens(), config, SAMPLING))
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


def answers(step: int) -> Rows:
    """Rows of prompts that are answered by as many sevens as they have tokens."""
    rng, task = random.Random(step), CountSevens()
    items = task.draw(rng, 8)
    return Rows.of_documents(items, [[7] * len(item) + [END] for item in items], END, HERE)


def test_likelihood_is_the_cross_entropy_of_a_token() -> None:
    """Of each answer alone, its end token included; long answers count for more."""
    model, rows = small_model(), answers(0)
    costs = [-log_probs_of(model, prompt + answer)[len(prompt) - 1 + t][token]
             for prompt, answer in documents(rows) for t, token in enumerate(answer)]  # fmt: skip
    assert likelihood(model, rows) == pytest.approx(sum(costs) / len(costs), abs=1e-4)


def test_supervised_training_learns_answers() -> None:
    before = likelihood(small_model(spread=1), answers(99))
    model = supervised(small_model(spread=1), answers, 3e-3, steps=100)
    assert likelihood(model, answers(99)) < before / 2
    made = generate(model, PROMPTS, 1, Sampling(0, max_new_tokens=9), END)[0].answers(END)
    assert [rows[0] for rows in made] == [[7] * len(prompt) for prompt in PROMPTS]


def test_supervised_training_keeps_to_its_limits() -> None:
    drawn = list[int]()
    start = small_model()

    def draw(step: int) -> Rows:
        drawn.append(step)
        return answers(step)

    model = supervised(small_model(), draw, 3e-3, seconds=0)
    assert all(map(torch.equal, model.parameters(), start.parameters()))
    supervised(model, draw, 3e-3, steps=3, seconds=1e9)
    assert drawn == [0, 1, 2]


@pytest.mark.parametrize("options", [{}, {"use_gae": True}, {"baseline_type": "ema"}], ids=str)
def test_every_tensor_of_a_step_is_made_where_the_model_is(options: dict[str, Any]) -> None:
    """What is made elsewhere has no content here."""
    losses = []
    for place in (contextlib.nullcontext, elsewhere):
        learner, config = learner_and_config(steps=2, **options)
        with place():
            told = [figures["loss"] for figures in train(learner, CountSevens(), config, SAMPLING)]
            losses.append([*told, likelihood(learner.model, answers(0))])
    assert losses[0] == losses[1]
