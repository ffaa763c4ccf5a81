"""GPT-2, its start values, a cache that the completions of a prompt share, and sampling.

Module names are those of the published weights (h.0.attn.c_attn, ...), so runs.py has little to do.  Two departures
from the usual GPT-2: positions come from the mask, so padding on the left changes nothing; and a prompt's keys and
values are stored once, however many completions it has.

    B prompts    K completions of each    N rows, one document each    T tokens    S tokens of a padded prompt
    C width of the model    H heads    D = C / H width of a head    R width of a latent    V vocabulary
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from toolkit import UsageError


@dataclass(frozen=True)
class GptConfig:
    """A model's shape, with the names of the published config.json.  The defaults are GPT-2 with 124 M parameters."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_positions: int = 1024
    vocab_size: int = 50257
    layer_norm_epsilon: float = 1e-5
    latent: int = 0  # width of multi-head latent attention's latent (not part of GPT-2); 0: GPT-2's own attention


@dataclass
class Cache:
    """A layer's keys and values, or one latent (H = 1, D = its width) that serves as both."""

    k: int  # completions of each prompt
    room: int  # tokens in each completion
    prompt: Sequence[Tensor] = ()  # (B, H, S, D) each: shared by the completions
    own: Sequence[Tensor] = ()  # (B, H, K, room, D) each

    def keep(self, prompts: Tensor) -> None:
        """Drop the prompts, with their completions, that a (B,) of bool excludes."""
        self.prompt, self.own = ([part[prompts] for part in parts] for parts in (self.prompt, self.own))

    def add_prompts(self, *new: Tensor) -> None:
        """Store the prompts' own, (B, H, S, D) each, with room for the completions'."""
        B, H, _, D = new[0].shape
        self.prompt = [part.contiguous() for part in new]  # otherwise each new token would copy them
        self.own = [part.new_empty(B, H, self.k, self.room, D) for part in new]

    def attend(self, q: Tensor, visible: Tensor, scale: float, *new: Tensor) -> Tensor:
        """Store those of the completions' next tokens, (N, G, T, D) each with G = H or 1, and attend with theirs.

        q (N, H, T, D), visible (N, 1, T, L), over the prompt and all of the completion so far -> (N, H, T, D).
        """
        keys, values = self.prompt[0], self.prompt[-1]
        B, G, S, _ = keys.shape
        (T, L), P = visible.shape[2:], q.shape[1] // G  # P heads share keys
        for kept, part in zip(self.own, new, strict=True):
            kept[:, :, :, L - S - T : L - S] = part.unflatten(0, (B, self.k)).transpose(1, 2)
        own_keys, own_values = (self.own[i][:, :, :, : L - S] for i in (0, -1))  # (B, G, K, L - S, D)

        # One product for all queries that share a prompt's keys, so these are never copied.
        queries = (scale * q).reshape(B, self.k, G, P * T, q.shape[3]).transpose(1, 2)  # (B, G, K, P T, D)
        to_prompt = (queries.flatten(2, 3) @ keys.transpose(2, 3)).view(*queries.shape[:4], S)
        logits = torch.cat((to_prompt, queries @ own_keys.transpose(3, 4)), 4).unflatten(3, (P, T))
        weights: Tensor = logits.masked_fill(~visible.view(B, 1, self.k, 1, T, L), -math.inf).softmax(5).flatten(3, 4)
        found = (weights[..., :S].flatten(2, 3) @ values).view_as(queries) + weights[..., S:] @ own_values
        return found.transpose(1, 2).reshape_as(q)


def attend(q: Tensor, visible: Tensor, scale: float, cache: Cache | None, *new: Tensor) -> Tensor:
    """Queries (N, H, T, D) over what is visible (N, 1, T, L) of `new`, as in Cache, and of a full cache."""
    if cache and cache.prompt:
        return cache.attend(q, visible, scale, *new)
    if cache:
        cache.add_prompts(*new)
    keys, values = (new[i].expand(-1, q.shape[1], -1, -1) for i in (0, -1))
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, scale=scale)


class Attention(nn.Module):
    """Self-attention over the visible tokens."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, visible: Tensor, cache: Cache | None = None) -> Tensor:
        """x (N, T, C), visible (N, 1, T, L), as in GPT.forward -> (N, T, C)."""
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, 2))
        y = attend(q, visible, 1 / math.sqrt(q.shape[3]), cache, k, v)  # (N, H, T, D)
        out: Tensor = self.c_proj(y.transpose(1, 2).flatten(2))
        return out


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1), without its rotary part.

    A token's cache is one latent c of width R for all heads, where keys and values would take 2 C.  Queries have a
    latent of their own, as wide.  No keys or values are computed: q (W_uk c) = (q W_uk) c, and a mean of W_uv c is
    W_uv times a mean of c.
    """

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        C, R = config.n_embd, config.latent
        self.heads = config.n_head
        self.w_dq, self.q_norm, self.w_uq = nn.Linear(C, R, bias=False), nn.RMSNorm(R), nn.Linear(R, C, bias=False)
        self.w_dkv, self.kv_norm = nn.Linear(C, R, bias=False), nn.RMSNorm(R)
        self.w_uk, self.w_uv = nn.Linear(R, C, bias=False), nn.Linear(R, C, bias=False)
        self.c_proj = nn.Linear(C, C)

    def forward(self, x: Tensor, visible: Tensor, cache: Cache | None = None) -> Tensor:
        """As in Attention, but the cache holds only the latents."""
        q = self.w_uq(self.q_norm(self.w_dq(x))).unflatten(2, (self.heads, -1))  # (N, T, H, D)
        c = self.kv_norm(self.w_dkv(x))[:, None]  # (N, 1, T, R)
        w_uk, w_uv = (up.weight.unflatten(0, (self.heads, -1)) for up in (self.w_uk, self.w_uv))  # (H, D, R)
        absorbed = torch.einsum("nthd,hdr->nhtr", q, w_uk)
        mean = attend(absorbed, visible, 1 / math.sqrt(q.shape[3]), cache, c)  # (N, H, T, R)
        out: Tensor = self.c_proj(torch.einsum("nhtr,hdr->nthd", mean, w_uv).flatten(2))
        return out


class Block(nn.Module):
    """Attention, then the MLP, each with a residual connection."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        C = config.n_embd
        self.ln_1 = nn.LayerNorm(C, eps=config.layer_norm_epsilon)
        self.attn = LatentAttention(config) if config.latent else Attention(config)
        self.ln_2 = nn.LayerNorm(C, eps=config.layer_norm_epsilon)
        gelu = nn.GELU("tanh")  # the exact form does not reproduce the published model
        self.mlp = nn.Sequential(OrderedDict(c_fc=nn.Linear(C, 4 * C), gelu=gelu, c_proj=nn.Linear(4 * C, C)))

    def forward(self, x: Tensor, visible: Tensor, cache: Cache | None = None) -> Tensor:
        """(N, T, C) -> (N, T, C)."""
        x = x + self.attn(self.ln_1(x), visible, cache)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """Token ids -> hidden states -> logits.  The head shares the embedding's weights."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = cast("Sequence[Block]", nn.ModuleList(Block(config) for _ in range(config.n_layer)))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:  # layers that add to the residual stream start smaller, as in GPT-2
                residual = math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 1
                nn.init.normal_(parameter, std=0.02 / residual)

    def forward(self, ids: Tensor, mask: Tensor, cache: Sequence[Cache] | None = None, causal: bool = True) -> Tensor:
        """ids (N, T), mask (N, L), True for tokens -> hidden states (N, T, C).

        Without a cache L is T.  An empty cache keeps the keys and values of these tokens, the prompts.  A full one adds
        the next T tokens of its completions, K of each prompt; the mask is of the L tokens from the prompt to these.
        With causal=False every token also sees the later ones, as a denoiser needs.
        """
        T, L = ids.shape[1], mask.shape[1]
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)  # (N, L)
        x = self.wte(ids) + self.wpe(positions[:, L - T :])  # (N, T, C)
        columns = torch.arange(L, device=ids.device)
        rows = columns[L - T :, None]
        seen = mask[:, None, None].bool()  # (N, 1, 1, L)
        if causal:
            seen = seen & (columns <= rows)
        visible = seen | (columns == rows)  # (N, 1, T, L): with itself, because padding that sees nothing becomes NaN
        for i, block in enumerate(self.h):
            x = block(x, visible, cache and cache[i])
        out: Tensor = self.ln_f(x)
        return out

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.wte.weight.device

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., C) -> (..., V)."""
        return F.linear(hidden, self.wte.weight)


# ---------------------------------------------------------------------------------------------------------------------
# Sampling: each prompt is read once, then all completions of all prompts grow one token at a time


class Diverged(Exception):
    """A number that is not finite: its name."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0  # 0: the likeliest
    top_k: int = 0  # sample among the k likeliest; 0: all
    top_p: float = 1.0  # of these, sample among the fewest with this total probability
    max_new_tokens: int = 144


def pad_rows(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device | None = None, side: str = "left"
) -> tuple[Tensor, Tensor]:
    """Ids and mask (N, longest).  On the left: all prompts end in the same column, so all completions begin in one."""
    ids = pad_sequence([torch.tensor(row, device=device) for row in rows], True, pad, side)
    real = [torch.ones(len(row), dtype=torch.bool, device=device) for row in rows]
    return ids, pad_sequence(real, True, False, side)


@dataclass(frozen=True)
class Rows:
    """Prompts padded on the left, completions on the right, side by side.  The end token is part of a completion."""

    ids: Tensor  # (N, S + T)
    mask: Tensor  # (N, S + T): True for tokens, False for padding
    S: int
    K: int = 1  # this many successive rows share a prompt

    @staticmethod
    def of_documents(
        prompts: list[list[int]], answers: list[list[int]], pad: int, device: torch.device | None = None
    ) -> Rows:
        """Each right answer after its prompt."""
        left, right = pad_rows(prompts, pad, device), pad_rows(answers, pad, device, side="right")
        ids, mask = (torch.cat(both, 1) for both in zip(left, right, strict=True))
        return Rows(ids, mask, left[0].shape[1])

    def to(self, device: torch.device) -> Rows:
        """The same rows on a device."""
        return replace(self, ids=self.ids.to(device), mask=self.mask.to(device))

    @property
    def answer_ids(self) -> Tensor:
        """(N, T)."""
        return self.ids[:, self.S :]

    @property
    def answer_mask(self) -> Tensor:
        """(N, T)."""
        return self.mask[:, self.S :]

    def answers(self, end: int) -> list[list[list[int]]]:
        """The ids of each prompt's completions, without the end token."""
        kept = self.answer_mask & (self.answer_ids != end)
        rows = [ids[real].tolist() for ids, real in zip(self.answer_ids.cpu(), kept.cpu(), strict=True)]
        return [rows[i : i + self.K] for i in range(0, len(rows), self.K)]

    def micro_batches(self, size: int, needed: Tensor | None = None) -> list[Tensor]:
        """Row numbers sorted by length, so that a micro-batch has little padding.  Groups stay together.

        With `needed`, (N,) of bool, groups without such a row are left out.
        """
        groups = torch.arange(len(self.ids), device=self.ids.device).view(-1, self.K)  # (B, K)
        order = self.mask.sum(1).view(-1, self.K).amax(1).argsort(stable=True)  # (B,), the shortest first
        if needed is not None:
            order = order[needed[groups].any(1)[order]]
        return [part.flatten() for part in groups[order].split(max(1, size // self.K)) if len(part)]

    def pick(self, rows: Tensor) -> Rows:
        """Some rows, whole groups, without the columns that are padding in all of them."""
        used = self.mask[rows].any(0)
        first = int(used[: self.S].int().argmax())
        last = self.S + int(used[self.S :].sum())
        return Rows(self.ids[rows, first:last], self.mask[rows, first:last], self.S - first, self.K)


def policy_log_probs(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of the policy: (..., V) -> (..., V).

    The temperature is part of the policy, in sampling and in training.  Top-k and top-p are not: after an update they
    could exclude a token that was sampled, and its log-probability would be minus infinity.
    """
    return torch.log_softmax(logits / (temperature or 1.0), -1)


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """logits (N, V) -> the next tokens (N,) and their log-probabilities (N,).  Raises Diverged for a logit of NaN."""
    log_probs = policy_log_probs(logits, sampling.temperature)  # (N, V)
    if not log_probs[:, 0].sum().isfinite():  # a row is NaN in every column if it is in one
        raise Diverged("logit")
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
) -> tuple[Rows, Tensor]:
    """K completions of each prompt, and the log-probabilities of their tokens (N, T), 0 in the padding.

    A row ends at its end token; a prompt leaves the batch when all its rows have ended.
    """
    device = model.device
    prompt_ids, prompt_mask = pad_rows(prompts, end, device)
    B, S = prompt_ids.shape
    room = sampling.max_new_tokens
    if S + room > model.config.n_positions:
        raise UsageError(
            f"a prompt of {S} tokens and a completion of {room} do not fit into the model's "
            f"{model.config.n_positions} positions: shorten the prompt, or lower --max-new-tokens"
        )
    ids = F.pad(prompt_ids[:, None].expand(B, k, S), (0, room), value=end)  # (B, K, S + room)
    mask = F.pad(prompt_mask[:, None].expand(B, k, S), (0, room), value=False)
    log_probs = torch.zeros(B, k, room, device=device)
    cache = [Cache(k, room) for _ in model.h]
    hidden = model(prompt_ids, prompt_mask, cache)[:, -1:]  # (B, 1, C)
    logits = model.logits(hidden).expand(B, k, -1)  # (B, K, V)
    going = torch.arange(B, device=device)  # the prompts with a row that has not ended: (b,), b <= B
    ended = torch.zeros(B, k, dtype=torch.bool, device=device)  # (b, K)
    for t in range(room):
        token, log_prob = (part.view(-1, k) for part in choose(logits.flatten(0, 1), sampling, generator))  # (b, K)
        ids[going, :, S + t] = token.masked_fill(ended, end)
        mask[going, :, S + t] = ~ended
        log_probs[going, :, t] = log_prob.masked_fill(ended, 0)
        ended = ended | (token == end)
        left = ~ended.all(1)  # (b,)
        if t + 1 == room or not left.any():
            break
        if not left.all():
            going, ended, token = going[left], ended[left], token[left]
            for layer in cache:
                layer.keep(left)
        so_far = mask[going, :, : S + t + 1].flatten(0, 1)  # (b K, S + t + 1)
        logits = model.logits(model(token.view(-1, 1), so_far, cache)).view(-1, k, model.config.vocab_size)
    longest = S + t + 1
    rows = Rows(ids[:, :, :longest].flatten(0, 1), mask[:, :, :longest].flatten(0, 1), S, k)
    return rows, log_probs[:, :, : t + 1].flatten(0, 1)
