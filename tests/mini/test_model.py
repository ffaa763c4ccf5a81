"""GPT-2 against transformers', with padding and without, and with the cache."""

from __future__ import annotations

import pytest
import torch

from mini.generate import left_pad
from mini.model import Cache, ValueHead
from tests.mini.helpers import SMALL, small_model

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]


def test_padding_on_the_left_changes_nothing() -> None:
    model = small_model()
    ids, mask = left_pad(PROMPTS, 0)
    together = model(ids, mask)
    for row, prompt in enumerate(PROMPTS):
        alone = model(torch.tensor([prompt]), torch.ones(1, len(prompt)))
        torch.testing.assert_close(together[row, -len(prompt) :], alone[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("keep", [[True, False, True], [False, True, False]])
def test_forgetting_prompts_leaves_the_others_alone(keep: list[bool]) -> None:
    model = small_model()
    ids, mask = left_pad(PROMPTS, 0)
    next_ids, kept = torch.tensor([[7], [8], [9]]), torch.tensor(keep)
    with torch.no_grad():
        caches = [Cache(mask, 1, 2) for _ in range(2)]
        for cache in caches:
            model(ids, mask, cache)
            model.decode(next_ids, cache)
        caches[1].keep(kept)
        expected = model.decode(next_ids, caches[0])[kept]
        torch.testing.assert_close(model.decode(next_ids[kept], caches[1]), expected, atol=1e-6, rtol=0)


def test_value_head_begins_at_zero_and_has_the_stated_shape() -> None:
    head = ValueHead(SMALL.n_embd)
    assert head(torch.randn(2, 3, 32)).tolist() == [[0.0] * 3] * 2
    assert [tuple(p.shape) for p in head.parameters()] == [(16, 32), (16,), (1, 16), (1,)]
