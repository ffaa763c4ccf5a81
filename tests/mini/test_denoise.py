"""Gaps: how many, what they cost, and in what order they are filled."""

from __future__ import annotations

import math

import pytest
import torch

import mini.denoise
from mini.config import TextConfig
from mini.denoise import denoise_step, fill, hide, left_to_right, unmask
from mini.text_task import make_learner
from tests.mini.helpers import SMALL, small_model

MASK = SMALL.vocab_size - 1
TEXT = torch.randint(MASK, (4, 13), generator=torch.Generator().manual_seed(0))


def test_the_stated_share_is_hidden_and_at_least_one() -> None:
    text, generator = torch.zeros(100, 100, dtype=torch.long), torch.Generator().manual_seed(0)
    ids, hidden = hide(small_model(), text, 0.15, generator)
    assert hidden.float().mean().item() == pytest.approx(0.15, abs=0.01)
    assert torch.equal(ids == MASK, hidden)
    assert hide(small_model(), text, 1e-9, generator)[1].sum() == 1


def test_loss_is_the_cross_entropy_of_the_gaps_alone() -> None:
    model, config = small_model(), TextConfig(algo="denoise", n_embd=SMALL.n_embd)
    learner = make_learner(model, model, config, 0.0)
    ids, hidden = hide(model, TEXT, config.mask_share, torch.Generator().manual_seed(config.seed))
    costs = []
    for n, t in hidden.nonzero().tolist():
        logits = model.logits(model(ids[n : n + 1], torch.ones(1, 13), causal=False))[0, t, :MASK]
        costs.append(math.log(logits.exp().sum().item()) - logits[TEXT[n, t]].item())
    assert denoise_step(learner, TEXT, config)["loss"] == pytest.approx(sum(costs) / len(costs), abs=1e-4)


def test_the_mask_is_never_said() -> None:
    model = small_model()
    with torch.no_grad():
        model.wte.weight[MASK] *= 100
    assert fill(model, TEXT).shape == (4, 13, MASK)
    written = unmask(model, 4, 12, 5, torch.Generator().manual_seed(0))
    assert written.max() < MASK


def test_the_next_token_is_told_without_those_after_it() -> None:
    model, other = small_model(), TEXT.clone()
    log_probs, right = left_to_right(model, TEXT, torch.Generator().manual_seed(5))
    at = torch.randint(1, 13, (4, 1), generator=torch.Generator().manual_seed(5))
    assert torch.equal(right, TEXT.gather(1, at)[:, 0])
    other[torch.arange(13) >= at] = 7
    assert torch.equal(left_to_right(model, other, torch.Generator().manual_seed(5))[0], log_probs)


def test_sampling_fills_a_fifth_more_in_each_step_and_keeps_what_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(mini.denoise, "fill", lambda model, ids: seen.__iadd__([ids]) and fill(model, ids))
    written = unmask(small_model(), 3, 12, 5, torch.Generator().manual_seed(0))
    assert [(ids == MASK).sum(1).tolist() for ids in seen] == [[gaps] * 3 for gaps in (12, 9, 7, 4, 2)]
    for earlier, later in zip(seen, [*seen[1:], written], strict=True):
        stands = earlier != MASK
        assert torch.equal(earlier[stands], later[stands])
