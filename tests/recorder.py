"""CUDA graphs without a GPU: a step that is recorded is not executed, and each replay repeats its call."""

from __future__ import annotations

from typing import Any
from unittest import mock

from toolkit.model.decoding import Step


class Recorder:
    """In place of decoding.record."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict  # no copies from the processor; Unsloth's kernels make none, what stands in for them does
        self.error: RuntimeError | None = None  # which recording raises
        self.attempts, self.replays = 0, 0

    def __call__(self, step: Step) -> tuple[Step, Any]:
        """What repeats the step, and its output.  Python's part of it is done now, and nothing that a GPU would do."""
        import torch
        from transformers.modeling_outputs import MoeCausalLMOutputWithPast  # unsloth has to be imported before

        cache = step.keywords["past_key_values"]  # type: ignore[attr-defined]
        recorded = [dict(vars(layer)) for layer in cache.layers]
        held = [value for then in recorded for value in then.values() if isinstance(value, torch.Tensor)]
        before = [tensor.clone() for tensor in held]
        self.attempts += 1
        if self.error:
            raise self.error
        forbidden = RuntimeError("a copy from the processor cannot be recorded")
        try:
            with mock.patch.object(torch, "tensor", side_effect=forbidden if self.strict else torch.tensor):
                step()
        finally:
            for tensor, value in zip(held, before, strict=True):
                tensor.copy_(value)
        output = MoeCausalLMOutputWithPast(logits=torch.zeros(0), past_key_values=cache)

        def replay() -> None:
            self.replays += 1
            now = [dict(vars(layer)) for layer in cache.layers]
            for layer, then in zip(cache.layers, recorded, strict=True):
                vars(layer).update(then)
            output.logits = step().logits
            for layer, today in zip(cache.layers, now, strict=True):
                vars(layer).clear()
                vars(layer).update(today)

        return replay, output
