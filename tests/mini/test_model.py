"""The model: padding and the cache; sampling in batches against sampling one by one, without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mini.grpo import score
from mini.model import GPT, Cache, Diverged, GptConfig, Sampling, choose, generate, pad_rows
from tests.mini.helpers import END, LATENT, SMALL, elsewhere, log_probs_of, small_model
from toolkit import UsageError

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5], [3, 5, 8, 9, 7, 9, 3]]
GREEDY = Sampling(temperature=0, max_new_tokens=20)


def test_padding_on_the_left_changes_nothing() -> None:
    model = small_model()
    ids, mask = pad_rows(PROMPTS[:3], 0)
    together = model(ids, mask)
    for row, prompt in enumerate(PROMPTS[:3]):
        alone = model(torch.tensor([prompt]), torch.ones(1, len(prompt)))
        torch.testing.assert_close(together[row, -len(prompt) :], alone[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("keep", [[True, False, True], [False, True, False]])
def test_forgetting_prompts_leaves_the_others_alone(keep: list[bool]) -> None:
    model = small_model()
    ids, mask = pad_rows(PROMPTS[:3], 0)
    next_ids, kept = torch.tensor([[7], [8], [9]]), torch.tensor(keep)
    with torch.no_grad():
        caches = [[Cache(1, 2) for _ in model.h] for _ in range(2)]
        once, twice = (torch.cat((mask, torch.ones(3, new, dtype=torch.bool)), 1) for new in (1, 2))
        for cache in caches:
            model(ids, mask, cache)
            model(next_ids, once, cache)
        for layer in caches[1]:
            layer.keep(kept)
        expected = model(next_ids, twice, caches[0])[kept]
        torch.testing.assert_close(model(next_ids[kept], twice[kept], caches[1]), expected, atol=1e-6, rtol=0)


# ---------------------------------------------------------------------------------------------------------------------
# Sampling


def greedy_alone(model: GPT, prompt: list[int], room: int) -> list[int]:
    """The likeliest tokens, each from a pass over the whole document."""
    made: list[int] = []
    while len(made) < room and END not in made:
        row = log_probs_of(model, prompt + made)[-1]
        made.append(row.index(max(row)))
    return made


def ending_model(seed: int = 1) -> GPT:
    """Says the end token now and then: its embedding is that of a likely token, a little shorter."""
    model = small_model(seed)
    with torch.no_grad():
        model.wte.weight[END] *= 1.5
    return model


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_batched_greedy_equals_one_by_one(seed: int) -> None:
    model = ending_model(seed)
    rows, _ = generate(model, PROMPTS, 2, GREEDY, END)
    for prompt, answers in zip(PROMPTS, rows.answers(END), strict=True):
        expected = [token for token in greedy_alone(model, prompt, 20) if token != END]
        assert answers == [expected, expected]


def test_rows_end_at_their_own_end_token_which_counts() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, log_probs = generate(ending_model(), PROMPTS, 16, Sampling(max_new_tokens=20), END, generator)
    lengths = rows.answer_mask.sum(1)
    assert lengths.unique().numel() > 3
    for ids, mask in zip(rows.answer_ids.tolist(), rows.answer_mask.tolist(), strict=True):
        length = sum(mask)
        assert mask == [True] * length + [False] * (len(mask) - length)
        assert END not in ids[: length - 1]
        assert set(ids[length:]) <= {END}
        assert ids[length - 1] == END or length == 20
    assert log_probs[~rows.answer_mask].abs().max() == 0


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_log_probs_are_those_of_the_sampling_policy(temperature: float) -> None:
    """Against passes over each document alone, and against what the first update works out."""
    model = ending_model()
    sampling = Sampling(temperature, top_k=20, top_p=0.9, max_new_tokens=12)
    rows, log_probs = generate(model, PROMPTS, 3, sampling, END, torch.Generator().manual_seed(0))
    for n, (ids, mask, found) in enumerate(zip(rows.answer_ids, rows.answer_mask, log_probs, strict=True)):
        prompt, row = PROMPTS[n // 3], ids[mask].tolist()
        alone = log_probs_of(model, prompt + row, temperature)
        expected = [alone[len(prompt) - 1 + t][token] for t, token in enumerate(row)]
        torch.testing.assert_close(found[: len(row)], torch.tensor(expected), atol=1e-4, rtol=0)
    recomputed, _, _ = score(model, rows, temperature)
    torch.testing.assert_close(recomputed, log_probs, atol=1e-4, rtol=0)


def test_a_prompt_is_read_once_whatever_the_number_of_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = small_model(), list[Any]()
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda ids, *more: read.__iadd__([tuple(ids.shape)]) and forward(ids, *more))
    generate(model, PROMPTS, 8, GREEDY, END)
    assert read[0] == (4, 7)
    assert {T for _, T in read[1:]} == {1}


def test_prompts_that_have_ended_cost_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model, widths = ending_model(), list[int]()
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda ids, *more: widths.__iadd__([len(ids)]) and forward(ids, *more))
    rows, _ = generate(model, PROMPTS, 2, Sampling(max_new_tokens=50), END, torch.Generator().manual_seed(0))
    longest = rows.answer_mask.sum(1).view(-1, 2).amax(1)
    assert widths == [4, *(2 * int((longest > t + 1).sum()) for t in range(len(widths) - 1))]
    assert widths[-1] < 8


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (8, 0.6), (1, 0.5)])
def test_the_tokens_left_to_choose_from_are_those_of_transformers(top_k: int, top_p: float) -> None:
    """And each is drawn as often as it should be."""
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    torch.manual_seed(0)
    logits = 2 * torch.randn(1, 30)
    expected = TemperatureLogitsWarper(0.8)(torch.tensor([[0]]), logits)
    expected = TopKLogitsWarper(top_k or 30)(torch.tensor([[0]]), expected)
    expected = TopPLogitsWarper(top_p)(torch.tensor([[0]]), expected).softmax(1)[0]
    drawn = 40_000
    tokens, log_probs = choose(logits.expand(drawn, -1), Sampling(0.8, top_k, top_p), torch.Generator().manual_seed(1))
    shares = tokens.bincount(minlength=30) / drawn
    assert set(shares.nonzero().flatten().tolist()) <= set(expected.nonzero().flatten().tolist())
    torch.testing.assert_close(shares, expected, atol=0.015, rtol=0)
    torch.testing.assert_close(log_probs[:5], (logits[0] / 0.8).log_softmax(0)[tokens[:5]])


def test_the_same_seed_samples_the_same() -> None:
    model = small_model()
    first, second, other = (
        generate(model, PROMPTS, 4, Sampling(max_new_tokens=10), END, torch.Generator().manual_seed(seed))[0].ids
        for seed in (5, 5, 6)
    )
    assert torch.equal(first, second)
    assert first.shape != other.shape or not torch.equal(first, other)


def test_a_completion_that_cannot_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="do not fit into the model's 64 positions"):
        generate(small_model(), PROMPTS, 1, Sampling(max_new_tokens=60), END)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_no_number_ends_the_run(temperature: float) -> None:
    """Not a device's assertion in the middle of multinomial."""
    logits = torch.zeros(2, 5)
    logits[1, 3] = torch.nan
    with pytest.raises(Diverged, match="logit"):
        choose(logits, Sampling(temperature), None)


@pytest.mark.parametrize("config", [SMALL, LATENT], ids=["mha", "mla"])
def test_every_tensor_of_sampling_is_made_where_the_model_is(config: GptConfig) -> None:
    """What is made elsewhere has no content here."""
    model = small_model(config=config)
    expected = generate(model, PROMPTS, 2, GREEDY, END)[0].ids
    with elsewhere():
        rows, _ = generate(model, PROMPTS, 2, GREEDY, END)
    assert torch.equal(rows.ids, expected)
