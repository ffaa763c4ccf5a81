"""Objectives for the best of a group: their weights, and the advantages of a real step."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

import gpt_2048_rl as program
from tests.preloaded import call
from tests.script.test_train import loaded
from toolkit import UsageError
from toolkit.run import objectives


def done_with(reward: float, score: int | None) -> dict[str, Any]:
    """A completion as in rollouts.jsonl: one without a program, or one whose game had this score."""
    games = [] if score is None else [{"outcome": "stuck", "steps": 70, "score": score}]
    works = "none" if score is None else "load"
    return {"text": f"{reward} {score}", "works": works, "cheating": "", "reward": reward, "results": games}


def test_programs_that_play_the_same_share_one_advantage() -> None:
    """With GRPO's mean, six copies of one key are pushed six times: a model collapses before it finds more."""
    group = [*[done_with(1.0, 8)] * 6, done_with(-3.0, None), done_with(11.0, 300)]
    copies, failed, better = (objectives.shared(group)[i] for i in (0, 6, 7))
    assert (copies, failed, better) == (-2.0 / 6, -6.0, 8.0)  # from the mean of three programs, 3


def test_without_equal_programs_the_advantages_are_the_usual_ones() -> None:
    """Answers without a program are each known by their text."""
    different = [done_with(1.0, 8), done_with(2.0, 9), done_with(-3.0, None), done_with(-4.0, None)]
    assert objectives.shared(different) == [2.0, 3.0, -2.0, -3.0]
    assert objectives.shared([done_with(5.0, 8), done_with(9.0, 12)] * 2) == [-1.0, 1.0, -1.0, 1.0]


def test_shared_advantages_keep_the_scale_of_the_rewards() -> None:
    """With --scale-rewards group TRL divides by the group's standard deviation, here 2."""
    import torch

    config = program.TrainConfig(objective="shared", generations=4, batch_size=4, accumulation=1)
    group = [done_with(5.0, 8), done_with(5.0, 8), done_with(9.0, 12), done_with(9.0, 13)]
    found = objectives.with_objective({"advantages": torch.tensor([-1.0, -1.0, 1.0, 1.0])}, group, config)
    assert found["advantages"].tolist() == pytest.approx([(5 - 23 / 3) / 4, (5 - 23 / 3) / 4, 2 / 3, 2 / 3])


REWARDS = (22.0, 7.5, 3.25, 9.0, 7.5, -3.0, 11.0, 0.0)


def test_entropic_weights_are_as_far_from_uniform_as_ln_2() -> None:
    weights = objectives.entropic(REWARDS)
    assert statistics.fmean(weights) == pytest.approx(1.0)
    shares = [weight / len(weights) for weight in weights]
    assert sum(share * math.log(share * len(shares)) for share in shares) == pytest.approx(math.log(2))


def test_entropic_weights_are_exponential_in_the_reward() -> None:
    """One beta for the whole group, so better completions weigh more."""
    weights = objectives.entropic(REWARDS)
    pairs = combinations(zip(weights, REWARDS, strict=True), 2)
    betas = [math.log(w / v) / (r - s) for (w, r), (v, s) in pairs if r != s]
    assert min(betas) > 0
    assert betas == pytest.approx([betas[0]] * len(betas))


@pytest.mark.parametrize("rewards", [(1.0, 3.0), (3.0, 3.0, 1.0), (2.0, 3.0, 3.0 - 1e-4, 3.0, 3.0)])
def test_where_half_share_the_best_reward_these_have_all_the_weight(rewards: Sequence[float]) -> None:
    """No beta gives them the divergence: it is at most ln 2 there."""
    best = rewards.count(max(rewards))
    expected = [len(rewards) / best if reward == max(rewards) else 0.0 for reward in rewards]
    assert objectives.entropic(rewards) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("k", [2, 3, 5, 8])
def test_max_at_k_is_what_a_completion_adds_to_the_best_of_others(k: int) -> None:
    """Against all choices of k - 1 others."""

    def added(i: int) -> float:
        others = combinations(REWARDS[:i] + REWARDS[i + 1 :], k - 1)
        return statistics.fmean(max(REWARDS[i], *chosen) - max(chosen) for chosen in others)

    assert objectives.max_at_k(REWARDS, k) == pytest.approx([added(i) for i in range(len(REWARDS))])


def expected_best(logits: Sequence[float], rewards: Sequence[float], k: int) -> float:
    """E[best reward of k draws] from a softmax policy, over all draws."""
    chances = [math.exp(logit) / sum(map(math.exp, logits)) for logit in logits]
    draws = product(range(len(logits)), repeat=k)
    return sum(math.prod(chances[i] for i in draw) * max(rewards[i] for i in draw) for draw in draws)


@pytest.mark.parametrize("k", [2, 3])
def test_max_at_k_is_unbiased(k: int) -> None:
    """For a softmax over three answers, over all groups of four: the gradient of the expected best of k."""
    logits, rewards, n, step = [0.3, -0.2, 0.1], [1.0, 4.0, 2.5], 4, 1e-5
    chances = [math.exp(logit) / sum(map(math.exp, logits)) for logit in logits]
    gradient = [0.0] * 3
    for group in product(range(3), repeat=n):
        chance = math.prod(chances[i] for i in group)
        for i, weight in zip(group, objectives.max_at_k([rewards[i] for i in group], k), strict=True):
            for j in range(3):
                gradient[j] += chance * k / n * weight * ((i == j) - chances[j])
    for j in range(3):
        up, down = ([logit + sign * step * (i == j) for i, logit in enumerate(logits)] for sign in (1, -1))
        slope = (expected_best(up, rewards, k) - expected_best(down, rewards, k)) / (2 * step)
        assert gradient[j] == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("weigh", [objectives.entropic, lambda rewards: objectives.max_at_k(rewards, 3)])
def test_advantages_have_the_spread_of_the_rewards(weigh: Callable[[Sequence[float]], list[float]]) -> None:
    usual = [reward - statistics.fmean(REWARDS) for reward in REWARDS]
    advantages = objectives.as_advantages(weigh(REWARDS), usual)
    assert statistics.fmean(advantages) == pytest.approx(0.0)
    assert statistics.pstdev(advantages) == pytest.approx(statistics.pstdev(REWARDS))
    assert max(advantages) == advantages[0] > max(usual)
    ranked = [advantage for _, advantage in sorted(zip(REWARDS, advantages, strict=True))]
    assert ranked == sorted(ranked)


@pytest.mark.parametrize("weigh", [objectives.entropic, lambda rewards: objectives.max_at_k(rewards, 3)])
def test_a_flat_group_stays_flat(weigh: Callable[[Sequence[float]], list[float]]) -> None:
    assert objectives.as_advantages(weigh([7.1] * 5), [0.0] * 5) == [0.0] * 5


def test_a_group_whose_best_are_many_keeps_its_usual_advantages() -> None:
    """Any two others hold the best reward already, so max_at_k has no gradient: the loser would stay as likely."""
    usual = [1.0, 1.0, 1.0, -3.0]
    assert objectives.max_at_k([22.0, 22.0, 22.0, 9.0], 3) == [0.0] * 4
    assert objectives.as_advantages(objectives.max_at_k([22.0, 22.0, 22.0, 9.0], 3), usual) == usual


def test_a_rank_has_the_objective_of_its_own_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    config = program.TrainConfig(objective="max_at_k", max_at=2, generations=2, batch_size=4)
    completions = [{"reward": total} for total in (3.0, 1.0, 1.0, 5.0, 1.0, 3.0, 5.0, 1.0)]
    monkeypatch.setattr(objectives, "RANK", 1)
    batch = {"advantages": torch.tensor([-1.0, 1.0, 2.0, -2.0])}
    assert objectives.with_objective(batch, completions, config)["advantages"].tolist() == [-1.0, 1.0, 2.0, -2.0]


def check_a_real_step(folder: str) -> None:
    model, tokenizer = loaded()
    config = dataclasses.replace(
        program.train_defaults("tiny"), objective="entropic", steps=1, generations=8, batch_size=16, max_new_tokens=48,
        ladder=("4:128",), skip_flat_groups=False, save_steps=10,
    )  # fmt: skip
    ladder = program.Ladder([program.Stage(4, 128)])
    rollouts = program.Rollouts(Path(folder) / "rollouts.jsonl", config, ladder)
    rows = program.training_set(config, ladder)
    trainer = program.make_trainer(model, tokenizer, config, Path(folder), rollouts, rows)
    usual, used = list[list[float]](), list[list[float]]()
    trainer.observer.measure = lambda batch: usual.append(batch["advantages"].tolist())
    generate = trainer._generate_and_score_completions

    def noting(inputs: Any) -> dict[str, Any]:
        batch: dict[str, Any] = generate(inputs)
        used.append(batch["advantages"].tolist())
        return batch

    trainer._generate_and_score_completions = noting
    trainer.train()
    totals = [row["reward"] for row in rollouts.last["completions"]]
    assert rollouts.flat != [True, True]
    assert usual[0] != used[0]
    for i in (0, 8):
        group = totals[i : i + 8]
        assert usual[0][i : i + 8] == pytest.approx([total - statistics.fmean(group) for total in group], abs=1e-3)
        expected = objectives.as_advantages(objectives.entropic(group), usual[0][i : i + 8])
        assert used[0][i : i + 8] == pytest.approx(expected, abs=1e-4)


def test_a_real_step_has_the_advantages_of_its_objective(base: Path, tmp_path: Path) -> None:
    """TRL's own are those of the mean reward."""
    call(check_a_real_step, tmp_path)


def test_the_published_recipe_keeps_its_objective() -> None:
    with pytest.raises(UsageError, match="--objective entropic needs --recipe stable"):
        program.parse_arguments(["--model", "tiny", "--recipe", "published", "--objective", "entropic"])
