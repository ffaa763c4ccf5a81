"""Learning a text by filling in masked tokens: a masked language model (BERT, 2018), sampled as in MaskGIT (2022).

The last id of the vocabulary is the mask.  The model sees both sides of a gap and never predicts the mask itself.

    N windows    T tokens    V vocabulary, without the mask
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mini.config import TextConfig
from mini.model import GPT
from mini.text_rl import descend
from mini.train import Learner


def fill(model: GPT, ids: Tensor, at: Any = ...) -> Tensor:
    """Masked ids (N, T) -> log-probabilities (N, T, V) of the token at each position, or only at the positions `at`."""
    hidden = model(ids, torch.ones_like(ids, dtype=torch.bool), causal=False)
    return model.logits(hidden[at])[..., :-1].log_softmax(-1)


def hide(model: GPT, text: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mask a random share of the text.  Returns ids and mask, (N, T) each, with at least one gap."""
    hidden = torch.rand(text.shape, generator=generator) < share
    hidden[0, 0] |= ~hidden.any()
    return text.masked_fill(hidden, model.config.vocab_size - 1), hidden


def denoise_step(learner: Learner, text: Tensor, config: TextConfig) -> dict[str, float]:
    """One update on the cross-entropy of the masked tokens in windows (N, T)."""
    ids, hidden = hide(learner.model, text, config.mask_share, learner.generator)
    loss = F.nll_loss(fill(learner.model, ids, hidden), text[hidden])
    learner.tokens += text.numel()
    return {"loss": loss.item(), "grad_norm": descend(learner, loss, config)}


@torch.no_grad()
def left_to_right(model: GPT, text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A denoiser as next-token predictor, with everything after it masked: log-probabilities (N, V), right ids (N,).

    One random position per window (N, T), never the first token, which the other algorithms are given as well.
    """
    at = torch.randint(1, text.shape[1], (len(text), 1), generator=generator)  # (N, 1)
    ids = text.masked_fill(torch.arange(text.shape[1]) >= at, model.config.vocab_size - 1)
    return fill(model, ids, (torch.arange(len(text)), at[:, 0])), text.gather(1, at)[:, 0]


@torch.no_grad()
def unmask(model: GPT, N: int, T: int, steps: int, generator: torch.Generator) -> Tensor:
    """Generate (N, T) from masks alone: each step fills all gaps and keeps a growing share, the surest first."""
    mask_id = model.config.vocab_size - 1
    ids = torch.full((N, T), mask_id)
    for step in range(1, steps + 1):
        log_probs = fill(model, ids)  # (N, T, V)
        drawn = torch.multinomial(log_probs.exp().flatten(0, 1), 1, generator=generator).view(N, T)
        filled = torch.where(ids == mask_id, drawn, ids)
        sure = log_probs.gather(2, filled[:, :, None])[:, :, 0].masked_fill(ids != mask_id, math.inf)
        kept = sure.topk(math.ceil(T * step / steps), 1).indices
        ids = torch.full((N, T), mask_id).scatter(1, kept, filled.gather(1, kept))
    return ids
