"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1), without its rotary part.

A token's cache is one latent c for all heads, instead of keys and values.  Queries have a latent of their own width.

    N rows    T tokens    B prompts    K completions of each    C width    H heads    D = C / H    R width of c
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from mini.model import Cache, GptConfig


class LatentAttention(nn.Module):
    """Self-attention that caches R numbers per token, where keys and values would take 2 C."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        C, R, Q = config.n_embd, config.latent, config.q_latent or config.latent
        self.heads = config.n_head
        self.w_dq, self.q_norm, self.w_uq = nn.Linear(C, Q, bias=False), nn.RMSNorm(Q), nn.Linear(Q, C, bias=False)
        self.w_dkv, self.kv_norm = nn.Linear(C, R, bias=False), nn.RMSNorm(R)
        self.w_uk, self.w_uv = nn.Linear(R, C, bias=False), nn.Linear(R, C, bias=False)
        self.c_proj = nn.Linear(C, C)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (N, T, C) -> queries (N, T, H, D), latents c (N, T, R)."""
        q = self.w_uq(self.q_norm(self.w_dq(x))).unflatten(2, (self.heads, -1))
        return q, self.kv_norm(self.w_dkv(x))

    def forward(self, x: Tensor, visible: Tensor, cache: Cache | None = None, layer: int = 0) -> Tensor:
        """As in Attention, but the cache holds only the latents."""
        q, c = self.project(x)
        if cache is not None:
            c = cache.extended(layer, c[:, None])[0][:, 0]  # (N, S + T, R) after the prompts
        k, v = (up(c).unflatten(2, (self.heads, -1)).transpose(1, 2) for up in (self.w_uk, self.w_uv))  # (N, H, T, D)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=visible)  # (N, H, T, D)
        out: Tensor = self.c_proj(y.transpose(1, 2).flatten(2))
        return out

    def decode(self, x: Tensor, cache: Cache, layer: int) -> Tensor:
        """Computes no keys or values: q (W_uk c) = (q W_uk) c, and a mean of W_uv c is W_uv times a mean of c."""
        q, c = self.project(x)  # (B, K, H, D), (B, K, R)
        w_uk, w_uv = (up.weight.unflatten(0, (self.heads, -1)) for up in (self.w_uk, self.w_uv))  # (H, D, R)
        absorbed = torch.einsum("bkhd,hdr->bkhr", q, w_uk)
        mean = cache.attend(layer, absorbed, 1 / math.sqrt(q.shape[3]), c[:, :, None])  # (B, K, H, R)
        out: Tensor = self.c_proj(torch.einsum("bkhr,hdr->bkhd", mean, w_uv).flatten(2))
        return out
