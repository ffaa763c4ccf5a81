"""Advantages that equal programs of a group share, by hand and in a real step."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import pytest

import gpt_2048_rl as program
from tests.preloaded import call
from tests.script.test_train import loaded
from toolkit.run import advantages


def done_with(reward: float, score: int | None) -> dict[str, Any]:
    """A completion as in rollouts.jsonl: one without a program, or one whose game had this score."""
    games = [] if score is None else [{"outcome": "stuck", "steps": 70, "score": score}]
    works = "none" if score is None else "load"
    return {"text": f"{reward} {score}", "works": works, "cheating": "", "reward": reward, "results": games}


def test_programs_that_play_the_same_share_one_advantage() -> None:
    """With GRPO's mean, six copies of one key are pushed six times: a model collapses before it finds more."""
    group = [*[done_with(1.0, 8)] * 6, done_with(-3.0, None), done_with(11.0, 300)]
    copies, failed, better = (advantages.of_group(group)[i] for i in (0, 6, 7))
    assert (copies, failed, better) == (-2.0 / 6, -6.0, 8.0)  # from the mean of three programs, 3


def test_without_equal_programs_the_advantages_are_the_usual_ones() -> None:
    """Answers without a program are each known by their text."""
    different = [done_with(1.0, 8), done_with(2.0, 9), done_with(-3.0, None), done_with(-4.0, None)]
    assert advantages.of_group(different) == [2.0, 3.0, -2.0, -3.0]
    assert advantages.of_group([done_with(5.0, 8), done_with(9.0, 12)] * 2) == [-1.0, 1.0, -1.0, 1.0]


def test_shared_advantages_keep_the_scale_of_the_rewards() -> None:
    """With --scale-rewards group TRL divides by the group's standard deviation, here 2."""
    import torch

    group = [done_with(5.0, 8), done_with(5.0, 8), done_with(9.0, 12), done_with(9.0, 13)]
    found = advantages.shared({"advantages": torch.tensor([-1.0, -1.0, 1.0, 1.0])}, group, 4)
    assert found["advantages"].tolist() == pytest.approx([(5 - 23 / 3) / 4, (5 - 23 / 3) / 4, 2 / 3, 2 / 3])


def test_a_rank_has_the_advantages_of_its_own_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    completions = [done_with(total, i) for i, total in enumerate((3.0, 1.0, 1.0, 5.0, 1.0, 3.0, 5.0, 1.0))]
    monkeypatch.setattr(advantages, "RANK", 1)
    batch = {"advantages": torch.tensor([-1.0, 1.0, 2.0, -2.0])}
    assert advantages.shared(batch, completions, 2)["advantages"].tolist() == [-1.0, 1.0, 2.0, -2.0]


def check_a_real_step(folder: str) -> None:
    model, tokenizer = loaded()
    config = dataclasses.replace(
        program.train_defaults("tiny"), objective="shared", steps=1, generations=8, batch_size=16, max_new_tokens=48,
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
        expected = advantages.of_group(rollouts.last["completions"][i : i + 8])
        assert used[0][i : i + 8] == pytest.approx(expected, abs=1e-3)


def test_a_real_step_has_the_advantages_of_its_objective(base: Path, tmp_path: Path) -> None:
    """TRL's own are those of the mean reward."""
    call(check_a_real_step, tmp_path)
