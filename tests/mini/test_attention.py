"""Latent attention against an independent reading of its formulas; what each kind of attention may see."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mini.model import Cache, GptConfig, LatentAttention, Sampling, generate, pad_rows
from tests.mini.helpers import LATENT, SMALL, small_model

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]


def rms_norm(row: Tensor, weight: Tensor) -> Tensor:
    return row / (row.square().mean() + torch.finfo(torch.float32).eps).sqrt() * weight


def test_latent_attention_is_its_formulas_one_head_and_token_at_a_time() -> None:
    torch.manual_seed(0)
    layer = LatentAttention(LATENT)
    x, D = torch.randn(1, 5, SMALL.n_embd), SMALL.n_embd // SMALL.n_head
    visible = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    rows = []
    for t in range(5):
        q = layer.w_uq.weight @ rms_norm(layer.w_dq.weight @ x[0, t], layer.q_norm.weight)
        heads = []
        for h in range(SMALL.n_head):
            one, scores, values = slice(h * D, (h + 1) * D), [], []
            for s in range(t + 1):
                c = rms_norm(layer.w_dkv.weight @ x[0, s], layer.kv_norm.weight)
                scores.append(math.exp((q[one] @ (layer.w_uk.weight @ c)[one]).item() / math.sqrt(D)))
                values.append((layer.w_uv.weight @ c)[one])
            heads.append(sum((score / sum(scores) * value for score, value in zip(scores, values, strict=True)),
                             torch.zeros(D)))  # fmt: skip
        rows.append(layer.c_proj(torch.cat(heads)))
    torch.testing.assert_close(layer(x, visible)[0], torch.stack(rows), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("config", "kept"), [(SMALL, [(3, 4, 5, 8)] * 2), (LATENT, [(3, 1, 5, 6)])],
    ids=["mha", "mla"],
)  # fmt: skip
def test_both_ways_to_read_completions_give_what_a_whole_pass_gives(
    config: GptConfig, kept: list[tuple[int, ...]]
) -> None:
    """Two completions each of prompts of several lengths, whose keys stand in memory once; absorbed where latent."""
    model = small_model(config=config)
    added = torch.tensor([[[7, 8, 9], [10, 11, 12]]]).expand(3, 2, 3) + torch.arange(3)[:, None, None]
    ids, mask = pad_rows(PROMPTS, 0)
    both = torch.cat((mask.repeat_interleave(2, 0), torch.ones(6, 3, dtype=torch.bool)), 1)
    with torch.no_grad():
        stepwise, at_once = ([Cache(2, 3) for _ in model.h] for _ in range(2))
        for cache in (stepwise, at_once):
            model(ids, mask, cache)
        steps = [model(added[:, :, t].reshape(6, 1), both[:, : 5 + t + 1], stepwise).view(3, 2, -1) for t in range(3)]
        rest = model(added.flatten(0, 1), both, at_once).unflatten(0, (3, 2))
        assert [tuple(part.shape) for part in stepwise[0].prompt] == kept
        for b, prompt in enumerate(PROMPTS):
            for k in range(2):
                document = torch.tensor([prompt + added[b, k].tolist()])
                whole = model(document, torch.ones_like(document))[0, -3:]
                torch.testing.assert_close(torch.stack([step[b, k] for step in steps]), whole, atol=1e-5, rtol=0)
                torch.testing.assert_close(rest[b, k], whole, atol=1e-5, rtol=0)


def test_the_cache_holds_one_latent_a_token_and_nothing_else() -> None:
    """Per token and layer R numbers, not the 2 C of keys and values."""
    numbers = {}
    for config in (SMALL, LATENT):
        ids, mask = pad_rows(PROMPTS, 0)
        cache = [Cache(2, 3) for _ in range(SMALL.n_layer)]
        with torch.no_grad():
            small_model(config=config)(ids, mask, cache)
        parts = [part for layer in cache for part in (*layer.prompt, *layer.own)]
        stored = sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}.values())
        tokens = 3 * 5 + 3 * 2 * 3  # of the padded prompts, and room in the completions
        assert sum(part.numel() for part in parts) * 4 <= stored
        numbers[config.latent] = stored / 4 / tokens / SMALL.n_layer
    assert numbers[6] == 6
    assert numbers[0] >= 2 * SMALL.n_embd


def test_greedy_sampling_with_latents_equals_whole_passes() -> None:
    model, prompts = small_model(config=LATENT), [[3, 1, 4], [2, 6, 5]]
    rows, _ = generate(model, prompts, 1, Sampling(0, max_new_tokens=8), -1)
    for prompt, row in zip(prompts, rows.answer_ids.tolist(), strict=True):
        document = list(prompt)
        for token in row:
            ids = torch.tensor([document])
            with torch.no_grad():
                assert model.logits(model(ids, torch.ones_like(ids)))[0, -1].argmax() == token
            document.append(token)


@pytest.mark.parametrize("config", [SMALL, LATENT], ids=["mha", "mla"])
def test_only_a_denoiser_sees_later_tokens(config: GptConfig) -> None:
    model = small_model(config=config)
    ids = torch.tensor([[3, 1, 4, 1, 5], [3, 1, 4, 7, 7]])
    mask = torch.ones_like(ids)
    causal, both_ways = model(ids, mask), model(ids, mask, causal=False)
    assert torch.equal(causal[0, :3], causal[1, :3])
    assert not torch.allclose(causal[0, 3:], causal[1, 3:])
    assert not torch.isclose(both_ways[0, :3], both_ways[1, :3]).all(-1).any()


def test_the_head_is_the_embedding() -> None:
    """Weight tying: one matrix, moved by both of its uses."""
    model = small_model(config=SMALL)
    assert [name for name, part in model.named_parameters() if part.shape[0] == SMALL.vocab_size] == ["wte.weight"]
    hidden = torch.randn(2, SMALL.n_embd)
    torch.testing.assert_close(model.logits(hidden), hidden @ model.wte.weight.T)
