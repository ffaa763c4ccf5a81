"""GPT-2, a cache that the completions of a prompt share, and a value head.

Module names are those of the published weights (h.0.attn.c_attn, ...), so weights.py has little to do.  Two departures
from the usual GPT-2: positions come from the mask, so padding on the left changes nothing; and a prompt's keys and
values are stored once, however many completions it has.

    B prompts    K completions of each    N rows, one document each    T tokens    S tokens of a padded prompt
    C width of the model    H heads    D = C / H width of a head    R width of a latent    V vocabulary
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GptConfig:
    """A model's shape, with the names of the published config.json.  The defaults are GPT-2 with 124 M parameters."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_positions: int = 1024
    vocab_size: int = 50257
    layer_norm_epsilon: float = 1e-5
    latent: int = 0  # R of multi-head latent attention (not part of GPT-2); 0: GPT-2's own attention


@dataclass
class LayerCache:
    """What one layer caches: keys and values, or one latent (H = 1, D = R) that serves as both."""

    prompt: tuple[Tensor, ...]  # (B, H, S, D) each: shared by all K completions of a prompt
    own: tuple[Tensor, ...]  # (B, K, H, new tokens, D) each: filled up to Cache.length


@dataclass
class Cache:
    """The keys and values of all tokens that the model has read, for generation."""

    prompt_mask: Tensor  # (B, S): True for tokens, False for padding
    k: int  # completions of each prompt
    new_tokens: int  # room in each completion
    length: int = 0  # tokens in each completion so far
    layers: list[LayerCache] = field(default_factory=list)

    def add_prompt(self, *prompt: Tensor) -> None:
        """Add the next layer's prompt tensors (B, H, S, D), with room for the completions."""
        B, H, _, D = prompt[0].shape
        own = tuple(part.new_zeros(B, self.k, H, self.new_tokens, D) for part in prompt)
        self.layers.append(LayerCache(prompt, own))

    def keep(self, prompts: Tensor) -> None:
        """Drop the prompts, with their completions, that a (B,) of bool excludes."""
        self.prompt_mask = self.prompt_mask[prompts]
        for layer in self.layers:
            layer.prompt = tuple(part[prompts] for part in layer.prompt)
            layer.own = tuple(part[prompts] for part in layer.own)

    def attend(self, layer: int, q: Tensor, scale: float, *new: Tensor) -> Tensor:
        """Cache a new token's keys and values `new` (B, K, H or 1, D) and attend with its queries (B, K, H, D)."""
        kept, at = self.layers[layer], self.length
        for own, part in zip(kept.own, new, strict=True):
            own[:, :, :, at] = part
        keys, values = kept.prompt[0], kept.prompt[-1]  # (B, H or 1, S, D)
        own_keys, own_values = (part[:, :, :, : at + 1] for part in (kept.own[0], kept.own[-1]))  # (B, K, H or 1, t, D)

        # One product for all K queries of a prompt, so the prompt's keys are never copied.
        to_prompt = (q.transpose(1, 2) @ keys.transpose(2, 3)).transpose(1, 2)  # (B, K, H, S)
        to_prompt = to_prompt.masked_fill(~self.prompt_mask[:, None, None], -math.inf)
        to_own = (q[:, :, :, None] @ own_keys.transpose(3, 4))[:, :, :, 0]  # (B, K, H, t)
        weights = (torch.cat((to_prompt, to_own), 3) * scale).softmax(3)
        on_prompt, on_own = weights.split((to_prompt.shape[3], at + 1), 3)
        found: Tensor = (on_prompt.transpose(1, 2) @ values).transpose(1, 2)
        found += (on_own[:, :, :, None] @ own_values)[:, :, :, 0]
        return found


class Attention(nn.Module):
    """Self-attention over the visible tokens."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, visible: Tensor, cache: Cache | None = None, past: LayerCache | None = None) -> Tensor:
        """x (N, T, C), visible (N, 1, T, T) -> (N, T, C).  A cache, if given, receives the keys and values.

        With the past of B prompts, which N / B rows each continue: visible (N, 1, T, S + T).
        """
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, 2))
        if cache is not None:
            cache.add_prompt(k, v)
        if past is not None:
            k, v = (torch.cat((before.repeat_interleave(len(x) // len(before), 0), new), 2)
                    for before, new in zip(past.prompt, (k, v), strict=True))  # fmt: skip
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)  # (N, H, T, D)
        out: Tensor = self.c_proj(y.transpose(1, 2).flatten(2))
        return out

    def decode(self, x: Tensor, cache: Cache, layer: int) -> Tensor:
        """One new token of every completion: x (B, K, C) -> (B, K, C)."""
        q, k, v = (part.unflatten(2, (self.heads, -1)) for part in self.c_attn(x).chunk(3, 2))  # (B, K, H, D)
        y = cache.attend(layer, q, 1 / math.sqrt(q.shape[3]), k, v)
        out: Tensor = self.c_proj(y.flatten(2))
        return out


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1), without its rotary part.

    Only c is cached for a token, R numbers for all heads, where keys and values would take 2 C.
    """

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        C, R = config.n_embd, config.latent
        self.heads = config.n_head
        self.w_dq, self.q_norm, self.w_uq = nn.Linear(C, R, bias=False), nn.RMSNorm(R), nn.Linear(R, C, bias=False)
        self.w_dkv, self.kv_norm = nn.Linear(C, R, bias=False), nn.RMSNorm(R)
        self.w_uk, self.w_uv = nn.Linear(R, C, bias=False), nn.Linear(R, C, bias=False)
        self.c_proj = nn.Linear(C, C)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (N, T, C) -> queries (N, T, H, D), latents c (N, T, R)."""
        q = self.w_uq(self.q_norm(self.w_dq(x))).unflatten(2, (self.heads, -1))
        return q, self.kv_norm(self.w_dkv(x))

    def forward(self, x: Tensor, visible: Tensor, cache: Cache | None = None, past: LayerCache | None = None) -> Tensor:
        """As in Attention, but the cache holds only the latents."""
        q, c = self.project(x)
        if cache is not None:
            cache.add_prompt(c[:, None])  # (B, 1, S, R)
        if past is not None:
            c = torch.cat((past.prompt[0][:, 0].repeat_interleave(len(x) // len(past.prompt[0]), 0), c), 1)
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


class Mlp(nn.Module):
    """Two layers with the tanh form of GELU; the exact form does not reproduce the published model."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)."""
        out: Tensor = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """Attention, then the MLP, each with a residual connection."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = LatentAttention(config) if config.latent else Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, visible: Tensor, cache: Cache | None = None, past: LayerCache | None = None) -> Tensor:
        """Whole documents, or the continuation of documents that begin in `past`: x (N, T, C)."""
        x = x + self.attn(self.ln_1(x), visible, cache, past)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out

    def decode(self, x: Tensor, cache: Cache, layer: int) -> Tensor:
        """One new token of every completion: x (B, K, C)."""
        x = x + self.attn.decode(self.ln_1(x), cache, layer)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """Token ids -> hidden states -> logits.  The head shares the embedding's weights."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:  # layers that add to the residual stream start smaller, as in GPT-2
                residual = math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 1
                nn.init.normal_(parameter, std=0.02 / residual)

    def forward(self, ids: Tensor, mask: Tensor, cache: Cache | None = None, causal: bool = True) -> Tensor:
        """ids and mask (N, T), mask True for tokens -> hidden states (N, T, C).

        A cache, if given, stores the keys and values of these tokens, the prompts.  With causal=False every token also
        sees the later ones, as a denoiser needs.
        """
        T = ids.shape[1]
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)  # (N, T)
        x = self.wte(ids) + self.wpe(positions)  # (N, T, C)
        earlier = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril(0 if causal else T)
        itself = torch.eye(T, dtype=torch.bool, device=ids.device)  # otherwise padding would see nothing and become NaN
        visible = (earlier & mask[:, None, None].bool()) | itself  # (N, 1, T, T)
        for block in self.h:
            x = block(x, visible, cache)
        out: Tensor = self.ln_f(x)
        return out

    def go_on(self, ids: Tensor, cache: Cache) -> Tensor:
        """Whole completions of the cached prompts: ids (B * K, T) -> hidden states (B * K, T, C)."""
        T = ids.shape[1]
        prompt_mask = cache.prompt_mask.bool().repeat_interleave(cache.k, 0)  # (B * K, S)
        x = self.wte(ids) + self.wpe(prompt_mask.sum(1, keepdim=True) + torch.arange(T, device=ids.device))
        earlier = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()
        visible = torch.cat((prompt_mask[:, None].expand(-1, T, -1), earlier.expand(len(ids), -1, -1)), 2)[:, None]
        for block, past in zip(self.h, cache.layers, strict=True):
            x = block(x, visible, None, past)
        out: Tensor = self.ln_f(x)
        return out

    def decode(self, ids: Tensor, cache: Cache) -> Tensor:
        """The next token of every completion: ids (B, K) -> hidden states (B, K, C)."""
        positions = cache.prompt_mask.long().sum(1, keepdim=True) + cache.length  # (B, 1)
        x = self.wte(ids) + self.wpe(positions)  # (B, K, C)
        for layer, block in enumerate(self.h):
            assert isinstance(block, Block)
            x = block.decode(x, cache, layer)
        cache.length += 1
        out: Tensor = self.ln_f(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., C) -> (..., V)."""
        return F.linear(hidden, self.wte.weight)


class ValueHead(nn.Module):
    """Hidden states -> the expected reward: C -> C / 2 -> 1.  Predicts 0 until it is trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, width // 2)
        self.out = nn.Linear(width // 2, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, C) -> (N, T)."""
        value: Tensor = self.out(F.gelu(self.hidden(x), approximate="tanh")).squeeze(-1)
        return value
