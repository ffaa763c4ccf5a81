"""Every formula against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from mini.rl import (
    Baseline,
    BaselineType,
    KlController,
    KlType,
    entropy,
    exact_kl,
    gae,
    is_clipped,
    kl_estimate,
    policy_loss,
    warmed_up,
    zero_spread,
)

REWARDS = torch.tensor([[0.2, 0.2, 0.6, 1.0], [-0.3, -0.3, -0.3, 0.6]])  # means 0.5 and -0.075


def test_policy_loss_and_where_it_is_clipped() -> None:
    """Ratios 1.5, 1.5, 0.5, 0.5, 1.1 with clip 0.2, advantages +2, -2, +2, -2, +2."""
    lp = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1]]).log()
    advantages = torch.tensor([[2.0, -2.0, 2.0, -2.0, 2.0]])
    loss = policy_loss(lp, torch.zeros(1, 5), advantages, 0.2)
    torch.testing.assert_close(loss, torch.tensor([[-2.4, 3.0, -1.0, 1.6, -2.2]]))
    assert is_clipped(lp, torch.zeros(1, 5), advantages, 0.2).tolist() == [[True, False, False, True, False]]
    torch.testing.assert_close(policy_loss(lp, torch.zeros(1, 5), advantages, 0.6)[0, 0], torch.tensor(-3.0))


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


def test_exact_kl_and_entropy() -> None:
    logits, ref_logits = torch.tensor([[0.5, 0.5]]).log() + 3, torch.tensor([[0.25, 0.75]]).log()
    assert exact_kl(logits, ref_logits).item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert entropy(torch.tensor([0.25, 0.25, 0.5]).log()).item() == pytest.approx(1.5 * math.log(2))


@pytest.mark.parametrize(("kind", "expected"), [
    ("group_mean", [[-0.3, -0.3, 0.1, 0.5], [-0.225, -0.225, -0.225, 0.675]]),
    ("rloo", [[-0.4, -0.4, 0.4 / 3, 2 / 3], [-0.3, -0.3, -0.3, 0.9]]),  # 4 / 3 of the above
    ("adaptive", [[-0.2, -0.2, 0.2, 0.6], [0.0, 0.0, 0.0, 0.9]]),  # medians 0.4 and -0.3
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
