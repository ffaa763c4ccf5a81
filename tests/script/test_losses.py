"""TRL's loss types: Unsloth computes the same, on-policy there are two directions, and flat groups do not count."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest

import gpt_2048_rl as program
from tests.preloaded import call
from tests.script.test_train import loaded
from toolkit import UsageError
from toolkit.run import watch

LOSSES: tuple[str, ...] = get_args(get_type_hints(program.TrainConfig)["loss_type"])


def untouched_trainer() -> Any:
    """TRL's GRPOTrainer from its file: the class in TRL itself is replaced by Unsloth."""
    import trl

    name = "trl.trainer.untouched"
    spec = importlib.util.spec_from_file_location(name, Path(trl.__file__).parent / "trainer" / "grpo_trainer.py")
    assert spec
    assert spec.loader
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GRPOTrainer


def loss_of_trl(kind: Any, loss: str, logps: Any, batch: dict[str, Any]) -> Any:
    """What TRL makes of log-probabilities (B, T)."""
    alone = SimpleNamespace(num_processes=1, gather=lambda found: found, reduce=lambda found, reduction: found)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, logps.detach(), None), aux_loss_enabled=False,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token", beta=0.0,
        loss_type=loss, epsilon_low=0.2, epsilon_high=0.2, use_vllm=False, accelerator=alone,
        args=SimpleNamespace(delta=None, steps_per_generation=1), model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1, max_completion_length=7, get_gamma_weights=kind.get_gamma_weights,
        _entropy_bonus_enabled=False, _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    return kind._compute_loss(trainer, None, batch)


def loss_of_unsloth(kind: Any, loss: str, logps: Any, batch: dict[str, Any]) -> Any:
    from unsloth_zoo.rl_replacements import grpo_compute_loss

    numbers = {"loss_type": loss, "importance_sampling_level": "token", "epsilon_low": 0.2, "max_completion_length": 7,
               "epsilon_high": 0.2, "num_items_in_batch": batch["num_items_in_batch"],
               "steps_per_generation": 1, "get_gamma_weights": kind.get_gamma_weights}  # fmt: skip
    return grpo_compute_loss(None, logps, batch.get("old_per_token_logps"), None, batch["completion_ids"],
                             batch["completion_mask"], 0.0, batch["advantages"], **numbers)[0]  # fmt: skip


def check_unsloth_has_trls_losses() -> None:
    import torch
    import unsloth  # noqa: F401

    torch.manual_seed(1)
    kind, mask = untouched_trainer(), torch.tensor([[1] * n + [0] * (6 - n) for n in (6, 2, 4, 5)])  # (B, T)
    start = -3 * torch.rand(4, 6)
    now: dict[str, Any] = {
        "prompt_ids": mask[:, :1], "prompt_mask": mask[:, :1], "completion_ids": mask, "completion_mask": mask,
        "advantages": torch.tensor([1.5, -0.5, -2.0, 1.0]), "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    older = now | {"old_per_token_logps": (start + torch.randn(4, 6) / 2) * mask}
    for loss in LOSSES:
        directions: list[Any] = []
        for batch in (now, older):
            grads: list[Any] = []
            for compute in (loss_of_trl, loss_of_unsloth):
                logps = start.clone().requires_grad_()
                compute(kind, loss, logps, batch).backward()
                grads.append(logps.grad)
            assert torch.allclose(grads[0], grads[1], atol=1e-6), (loss, grads)
            directions.append(grads[0] / grads[0].norm())
        assert (directions[0] - directions[1]).norm() > 0.01  # otherwise the older policy would show nothing


@pytest.mark.long
def test_unsloth_has_trls_losses() -> None:
    """Of every loss type, on-policy and off-policy: the gradient of Unsloth's loss is that of TRL's."""
    call(check_unsloth_has_trls_losses)


def one_step(folder: str) -> tuple[Any, Any, dict[str, Any]]:
    """A trainer after a real step of two groups, its rollouts, and the step's batch."""
    model, tokenizer = loaded()
    config = dataclasses.replace(
        program.train_defaults("tiny"), steps=1, generations=4, batch_size=8, max_new_tokens=48, ladder=("4:128",),
        entropy_coef=0.0, warmup_steps=0, decay_steps=0, learning_rate=1e-2, save_steps=10,
    )  # fmt: skip
    ladder = program.Ladder([program.Stage(4, 128)])
    rollouts = program.Rollouts(Path(folder) / "rollouts.jsonl", config, ladder)
    rows = program.training_set(config, ladder)
    trainer = program.make_trainer(model, tokenizer, config, Path(folder), rollouts, rows)
    noted: dict[str, Any] = {}
    trainer.observer.measure = noted.update
    trainer.train()
    assert rollouts.flat == [False, False]
    return trainer, rollouts, noted


def gradient(trainer: Any, batch: dict[str, Any], loss: str) -> Any:
    """The gradient of a batch's loss by all trained weights, as one vector."""
    import torch

    trainer.loss_type = trainer.args.loss_type = loss
    trainer.model.zero_grad()
    with trainer.compute_loss_context_manager():
        trainer.compute_loss(trainer.model, batch).backward()
    grads = (weights.grad for weights in trainer.model.parameters())
    return torch.cat([grad.flatten().double() for grad in grads if grad is not None])


def compared(grad: Any, other: Any) -> tuple[float, float]:
    """Cosine of two gradients, and the length of the first over that of the second."""
    return float(grad @ other / grad.norm() / other.norm()), float(grad.norm() / other.norm())


def check_the_directions(folder: str) -> None:
    trainer, _, batch = one_step(folder)
    lengths = batch["completion_mask"].sum(1).float()
    found = {loss: gradient(trainer, batch, loss) for loss in LOSSES}
    assert lengths.min() < lengths.max()
    cosine, length = compared(found["dr_grpo"], found["dapo"])
    assert cosine > 1 - 1e-6
    assert length == pytest.approx(lengths.mean().item() / trainer.max_completion_length, rel=1e-3)
    assert compared(found["grpo"], found["dapo"])[0] < 1 - 1e-3


@pytest.mark.long  # it holds TRL's and Unsloth's losses against each other: run it when a pin changes
def test_on_policy_there_are_two_directions(base: Path, tmp_path: Path) -> None:
    """grpo takes the mean of an answer's tokens first.  The others count every token alike, and their lengths differ by
    a constant of the batch."""
    call(check_the_directions, tmp_path)


def check_flat_groups(folder: str) -> None:
    import trl

    trainer, rollouts, noted = one_step(folder)
    flat = noted | {"advantages": noted["advantages"].clone()}
    flat["advantages"][:4] = 0.0
    alone = {name: value[4:] if getattr(value, "ndim", 0) else value for name, value in noted.items()}
    alone["num_items_in_batch"] = alone["completion_mask"].sum()
    rollouts.flat = [True, False]
    trl.GRPOTrainer._generate_and_score_completions = lambda self, inputs: dict(flat)
    trainer.observer = watch.Observer()
    for loss in LOSSES:
        trainer.loss_type = loss
        kept = gradient(trainer, trainer._generate_and_score_completions([]), loss)
        cosine, length = compared(kept, gradient(trainer, alone, loss))
        print(f"{loss:8} with a flat group beside without: cosine {cosine:.6f}, length {length:.4f}")
        assert cosine > 1 - 1e-6, loss
        assert length == pytest.approx(1.0, rel=1e-3), loss


@pytest.mark.long  # it holds TRL's and Unsloth's losses against each other: run it when a pin changes
def test_a_flat_group_does_not_thin_out_the_other_with_any_loss(base: Path, tmp_path: Path) -> None:
    """Some losses take the mean over completions, some over tokens: the gradient is that of the other group alone."""
    call(check_flat_groups, tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [("--loss-type dr_grpo --scale-rewards group", "Unsloth would leave the rewards unscaled"),
     ("--loss-type ppo", "--loss-type")],
)  # fmt: skip
def test_what_would_be_refused_or_replaced_later_is_refused_at_once(words: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        program.parse_arguments(["--model", "tiny", *words.split()])


def check_the_arguments(folder: str) -> None:
    model, tokenizer = loaded()
    for loss in LOSSES:
        config = program.parse_arguments(["--model", "tiny", "--loss-type", loss])
        ladder = program.Ladder([program.Stage(4, 128)])
        rollouts = program.Rollouts(Path(folder) / "rollouts.jsonl", config, ladder)
        rows = program.training_set(config, ladder)
        args = program.make_trainer(model, tokenizer, config, Path(folder), rollouts, rows).args
        assert (args.loss_type, args.importance_sampling_level, args.epsilon) == (loss, "token", 0.2)


def test_the_loss_reaches_the_trainer(base: Path, tmp_path: Path) -> None:
    call(check_the_arguments, tmp_path)
