"""CUDA graphs without a GPU: a step that is recorded is not executed, and each replay repeats its call."""

from __future__ import annotations

from typing import Any

from toolkit.model.decoding import Step


class Recorder:
    """In place of decoding.record."""

    def __init__(self) -> None:
        self.fails, self.recordings, self.replays = False, 0, 0

    def __call__(self, step: Step) -> tuple[Step, Any]:
        """What repeats the step, and its output."""
        import torch
        from transformers.modeling_outputs import MoeCausalLMOutputWithPast  # unsloth has to be imported before

        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        self.recordings += 1
        cache = step.keywords["past_key_values"]  # type: ignore[attr-defined]
        output = MoeCausalLMOutputWithPast(logits=torch.zeros(0), past_key_values=cache)
        windows = [layer for layer in cache.layers if layer.is_sliding]
        recorded = [dict(vars(layer)) for layer in windows]

        def replay() -> None:
            self.replays += 1
            lengths = [layer.cumulative_length_int for layer in windows]
            for layer, then in zip(windows, recorded, strict=True):  # what Python does was done at the recording
                vars(layer).update({name: then[name] for name in ("update", "cumulative_length_int") if name in then})
            output.logits = step().logits
            for layer, length in zip(windows, lengths, strict=True):
                layer.cumulative_length_int = length
                vars(layer).pop("update", None)

        return replay, output
