"""Sampling: each prompt is read once, then all completions of all prompts grow one token at a time.

B prompts    K completions of each    S tokens of a padded prompt    T tokens of a padded completion    V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mini.model import GPT, Cache
from toolkit import UsageError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0  # 0: the likeliest
    top_k: int = 0  # sample among the k likeliest; 0: all
    top_p: float = 1.0  # of these, sample among the fewest with this total probability
    max_new_tokens: int = 144


@dataclass(frozen=True)
class Completions:
    """Prompts padded on the left, completions on the right.  Masks are True for tokens, including the end token."""

    prompt_ids: Tensor  # (B, S)
    prompt_mask: Tensor  # (B, S)
    ids: Tensor  # (B, K, T)
    mask: Tensor  # (B, K, T)
    log_probs: Tensor  # (B, K, T) of the sampled tokens, 0 in the padding

    def tokens(self, end: int) -> list[list[list[int]]]:
        """The ids of each prompt's completions, without the end token."""
        return [
            [[token for token, real in zip(row, is_real, strict=True) if real and token != end]
             for row, is_real in zip(rows, masks, strict=True)]
            for rows, masks in zip(self.ids.tolist(), self.mask.tolist(), strict=True)
        ]  # fmt: skip


def left_pad(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and mask (B, S): all prompts end in the same column, so all completions begin in the same one."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return ids, torch.arange(longest) >= longest - lengths[:, None]


def policy_log_probs(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of the policy: (..., V) -> (..., V).

    The temperature is part of the policy, in sampling and in training.  Top-k and top-p are not: after an update they
    could exclude a token that was sampled, and its log-probability would be minus infinity.
    """
    return torch.log_softmax(logits / (temperature or 1.0), -1)


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """logits (N, V) -> the next tokens (N,) and their log-probabilities (N,)."""
    log_probs = policy_log_probs(logits, sampling.temperature)  # (N, V)
    if sampling.temperature == 0:
        token = log_probs.argmax(1, keepdim=True)  # (N, 1)
    else:
        kept = min(sampling.top_k or logits.shape[1], logits.shape[1])
        best, order = log_probs.topk(kept)  # (N, kept), likeliest first
        probs = best.softmax(1)
        likelier = probs.cumsum(1) - probs  # 0 for the likeliest token, so it is always kept
        probs = probs.masked_fill(likelier >= sampling.top_p, 0)
        token = order.gather(1, torch.multinomial(probs, 1, generator=generator))  # (N, 1)
    return token[:, 0], log_probs.gather(1, token)[:, 0]


@torch.no_grad()
def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    k: int,
    sampling: Sampling,
    end: int,
    generator: torch.Generator | None = None,
) -> Completions:
    """K completions of each prompt.  A row ends at its end token; a prompt leaves the batch when all its rows have."""
    prompt_ids, prompt_mask = left_pad(prompts, end)
    B, S = prompt_ids.shape
    room = sampling.max_new_tokens
    if S + room > model.config.n_positions:
        raise UsageError(f"a prompt of {S} tokens and a completion of {room} do not fit into the model's "
                         f"{model.config.n_positions} positions: lower --max-new-tokens")  # fmt: skip
    ids = torch.full((B, k, room), end)
    mask = torch.zeros(B, k, room, dtype=torch.bool)
    log_probs = torch.zeros(B, k, room)
    cache = Cache(prompt_mask, k, room)
    hidden = model(prompt_ids, prompt_mask, cache)[:, -1:]  # (B, 1, C)
    logits = model.logits(hidden).expand(B, k, -1)  # (B, K, V)
    going = torch.arange(B)  # the prompts with a row that has not ended: (b,), b <= B
    ended = torch.zeros(B, k, dtype=torch.bool)  # (b, K)
    for t in range(room):
        token, log_prob = (part.view(-1, k) for part in choose(logits.flatten(0, 1), sampling, generator))  # (b, K)
        ids[going, :, t] = token.masked_fill(ended, end)
        mask[going, :, t] = ~ended
        log_probs[going, :, t] = log_prob.masked_fill(ended, 0)
        ended = ended | (token == end)
        left = ~ended.all(1)  # (b,)
        if t + 1 == room or not left.any():
            break
        if not left.all():
            going, ended, token = going[left], ended[left], token[left]
            cache.keep(left)
        logits = model.logits(model.decode(token, cache))
    return Completions(prompt_ids, prompt_mask, ids[:, :, : t + 1], mask[:, :, : t + 1], log_probs[:, :, : t + 1])
