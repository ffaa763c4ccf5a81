"""What makes a step of GRPO fast on a CPU.  Results and gradients are the same up to rounding.

Prefix sharing: the completions of a group have one prompt, whose keys and values are computed once.  Otherwise a step
computes them for each completion, when it generates and again when it scores.  Gradients flow through what is shared.
Merged adapters: while completions are generated, each adapted layer is one matrix instead of three, and experts are not
added up anew for each token.  In bfloat16 experts alone, as PEFT does: a layer's matrix would round its adapter away.
Kept memory: what a step frees stays with the process.  Otherwise the kernel clears it anew for each large tensor.

Shapes: B rows, U distinct prompts, T tokens, H heads, D numbers of a head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOM = 64  # tokens by which a cache grows at a time


def give_room(cache: Any) -> None:
    """Let a cache append in place.  transformers' own copies all keys and values for each new token."""
    from transformers.cache_utils import DynamicLayer

    class RoomyLayer(DynamicLayer):  # type: ignore[misc]
        """Keys and values (B, H, T, D) are the beginning of larger tensors."""

        def __init__(self, layer: DynamicLayer) -> None:
            super().__init__()
            self.lazy_initialization(layer.keys, layer.values)
            self.keys, self.values = layer.keys, layer.values
            self._grow()

        def _grow(self) -> None:
            B, H, T, D = self.keys.shape
            self._room = self.keys.new_empty(2, B, H, T + ROOM, D)
            self._room[0, :, :, :T], self._room[1, :, :, :T] = self.keys, self.values

        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
            T, longer = self.keys.shape[2], self.keys.shape[2] + key_states.shape[2]
            if longer > self._room.shape[3]:
                self._grow()
            self._room[0, :, :, T:longer], self._room[1, :, :, T:longer] = key_states, value_states
            self.keys, self.values = self._room[:, :, :, :longer]
            return self.keys, self.values

    cache.layers = [RoomyLayer(layer) if type(layer) is DynamicLayer else layer for layer in cache.layers]


def share_prefixes(model: Any) -> None:
    """Let a transformers model compute equal prompts once, in two kinds of calls.

    Prefill, which fills an empty cache: equal rows are computed once.  Scoring, which asks for the last logits and
    keeps no cache: what stands before these is computed once for equal rows.  A call with one row is left alone.
    """
    import torch

    whole = model.forward

    def distinct(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, **options: Any) -> Any:
        """The output for rows (B, T), of which only the U distinct ones are computed; the cache is that of all rows."""
        rows = input_ids if attention_mask is None else input_ids.where(attention_mask.bool(), -1)  # (B, T)
        _, which = torch.unique(rows, dim=0, return_inverse=True)  # (B,)
        first = torch.stack([(which == i).nonzero()[0, 0] for i in range(int(which.max()) + 1)])  # (U,)
        kinds = {"input_ids": input_ids, "attention_mask": attention_mask, **options}
        own = {name: value[first] if torch.is_tensor(value) else value for name, value in kinds.items()}
        output = whole(**own, use_cache=True)
        output.past_key_values.batch_select_indices(which)
        output.logits = output.logits[which]
        return output

    @wraps(whole)
    def forward(
        input_ids: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        use_cache: Any = None,
        logits_to_keep: Any = 0,
        **options: Any,
    ) -> Any:
        B, T = (1, 1) if input_ids is None else input_ids.shape
        if B > 1 and T > 1 and past_key_values is not None and past_key_values.get_seq_length() == 0:
            output = distinct(
                input_ids, attention_mask, past_key_values=past_key_values, logits_to_keep=logits_to_keep, **options
            )
            give_room(output.past_key_values)
            return output
        if B > 1 and past_key_values is None and not use_cache and 0 < logits_to_keep < T:
            before = T - logits_to_keep
            mask = None if attention_mask is None else attention_mask[:, :before]
            past_key_values = distinct(input_ids[:, :before], mask, logits_to_keep=1).past_key_values
            input_ids, use_cache, logits_to_keep = input_ids[:, before:], True, 0
        return whole(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **options,
        )

    model.forward = forward


@contextmanager
def merged_adapters(model: Any, experts_alone: bool = False) -> Iterator[None]:
    """Adapters are added to the weights, and afterwards the weights are those of before to the bit.

    For experts this is the sum that PEFT computes for each token, to the bit.  Linear layers round differently.
    """
    import torch
    from peft.tuners.lora.layer import Linear, ParamWrapper

    kinds = ParamWrapper if experts_alone else (Linear, ParamWrapper)
    layers = [layer for layer in model.modules() if isinstance(layer, kinds) and not layer.disable_adapters]
    parameters = [getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight")) for layer in layers]
    before = [parameter.data for parameter in parameters]
    try:
        for layer, parameter in zip(layers, parameters, strict=True):
            if isinstance(layer, ParamWrapper):
                (name,) = layer.active_adapters
                lhs, rhs, scaling = layer.get_delta_factors(name)  # (experts, in, rank), (experts, rank, out)
                parameter.data = torch.baddbmm(parameter.data, lhs, rhs, alpha=scaling)
                layer.merged_adapters.append(name)
            else:
                layer.merge(safe_merge=True)  # into a copy
        yield
    finally:
        for layer, parameter, weights in zip(layers, parameters, before, strict=True):
            parameter.data = weights
            layer.merged_adapters.clear()


def generate_merged(model: Any, experts_alone: bool = False) -> None:
    """Let a transformers model generate with merged adapters.  It needs memory for the adapted weights once more."""
    import torch

    whole = model.generate

    @wraps(whole)
    def generate(*args: Any, **options: Any) -> Any:
        with torch.no_grad(), merged_adapters(model, experts_alone):
            return whole(*args, **options)

    model.generate = generate


def keep_memory() -> None:
    """Let glibc give no freed memory back to the kernel.  Without glibc nothing changes."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    for option, value in ((-4, 0), (-1, -1)):  # M_MMAP_MAX, M_TRIM_THRESHOLD: no separate mappings, no trimming
        if set_option:
            set_option(option, value)


def speed_up(model: Any) -> None:
    """All three, for a transformers model; prompts are shared where all layers have attention."""
    import torch
    from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

    cache = DynamicCache(config=model.config.get_text_config())
    if not any(
        isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers
    ):  # its rows cannot be picked
        share_prefixes(model)
    generate_merged(model, experts_alone=model.dtype != torch.float32)
    keep_memory()
