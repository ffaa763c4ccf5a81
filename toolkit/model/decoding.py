"""A token of all completions by one launch: the decoding step as a CUDA graph.

The processor launches thousands of kernels for a token of gpt-oss-20b, and the GPU waits for it.  A graph holds them
all: in each call of `generate` the step is recorded, in the time of a few tokens, and replayed from then on.
torch.compile, the libraries' own way, takes half a minute for each shape, and TRL switches it off.
"""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Step = Callable[[], Any]
WARM_UP = 2  # steps before the recording: kernels are compiled then


def record(step: Step) -> tuple[Step, Any]:
    """Record a step on the GPU, without executing it: what executes it, and its output, which each replay rewrites."""
    import torch

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = step()
    except BaseException:
        torch.cuda.set_stream(stream)  # a recording that CUDA has ended does not leave its own
        raise
    return graph.replay, output


def leaves(inputs: Mapping[str, Any]) -> Iterator[Any]:
    """A step's inputs, one by one; the masks of several kinds of layers are a dictionary."""
    for value in inputs.values():
        if isinstance(value, dict):
            yield from leaves(value)
        else:
            yield value


def is_known(inputs: Mapping[str, Any]) -> bool:
    """Whether each input is a tensor or stays what it is, unlike FlexAttention's mask.

    Without positions the model would count them on the processor, and the recording would repeat one.
    """
    import torch
    from transformers import Cache

    known = (torch.Tensor, Cache, bool, int, float, str, type(None))
    return inputs.get("position_ids") is not None and all(isinstance(value, known) for value in leaves(inputs))


def tensors(inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among a step's inputs."""
    import torch

    return [value for value in leaves(inputs) if isinstance(value, torch.Tensor)]


def copied(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A step's inputs with tensors of their own."""
    import torch

    def own(value: Any) -> Any:
        return copied(value) if isinstance(value, dict) else value.clone() if isinstance(value, torch.Tensor) else value

    return {name: own(value) for name, value in inputs.items()}


def slide(layer: Any, keys: torch.Tensor, values: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What a full sliding window does with one more token.  transformers' own way copies an index from the processor,
    which cannot be recorded."""
    import torch

    for held, new in ((layer.keys, keys), (layer.values, values)):
        held.copy_(torch.cat((held[:, :, 1:], new), 2))
    return layer.keys, layer.values


class Steps:
    """Decoding steps of one call of `generate`, in place of the model's forward `step`.  `give_up` hears of a step that
    cannot be recorded."""

    def __init__(self, step: Callable[..., Any], give_up: Callable[[], None]) -> None:
        self._step, self._give_up = step, give_up
        self._plain: float = WARM_UP  # steps that are still to be done without a recording
        self._replay: Step | None = None
        self._full: list[bool] | None = None  # which windows were, at the recording: a full one does something else

    def __call__(self, **inputs: Any) -> Any:
        """A step with the inputs of transformers' sampling loop: the model's output."""
        windows = [layer for layer in inputs["past_key_values"].layers if layer.is_sliding]
        full = [layer.cumulative_length_int >= layer.max_cache_len for layer in windows]
        if self._plain == 0 and full != self._full:
            self._record(copied(inputs), windows, full)
        if self._plain > 0 or self._replay is None:
            self._plain -= 1
            return self._step(**inputs)
        for own, new in zip(tensors(self._inputs), tensors(inputs), strict=True):
            own.copy_(new)
        self._replay()
        for layer in windows:
            layer.cumulative_length_int += 1  # a number of Python's, from which the next masks are made
        return self._output

    def _record(self, inputs: dict[str, Any], windows: list[Any], full: list[bool]) -> None:
        """Record a step, which changes no tensor yet, and leave Python's part of the cache as it was."""
        import torch

        if not is_known(inputs):
            self._plain = math.inf
            return
        lengths = [layer.cumulative_length_int for layer in windows]
        for layer in compress(windows, full):
            layer.update = partial(slide, layer)
        try:
            self._replay, self._output = record(partial(self._step, **inputs))
            self._inputs, self._full = inputs, full
        except RuntimeError as error:
            self._plain = math.inf
            if not isinstance(error, torch.OutOfMemoryError):  # a kernel that cannot be recorded
                self._give_up()
                reason = str(error).partition("\n")[0]
                warnings.warn(f"tokens are generated without a CUDA graph: {reason}", stacklevel=2)
        finally:
            for layer, length in zip(windows, lengths, strict=True):
                layer.cumulative_length_int = length
                vars(layer).pop("update", None)


class Decoding:
    """Lets `generate` of a model on a GPU replay its decoding steps, wherever its cache has a fixed size."""

    def __init__(self, model: Any) -> None:
        # What generates is an adapter's base.
        self.model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.works = True
        self.model._valid_auto_compile_criteria = self._applies  # transformers then asks for what it would compile
        self.model.get_compiled_call = lambda _config: Steps(self.step, self.give_up)

    def step(self, **inputs: Any) -> Any:
        """A step, without what Unsloth has compiled: with experts in NF4 that has CUDA graphs of its own."""
        zoo = sys.modules.get("unsloth_zoo.temporary_patches.utils")
        with zoo.unsloth_eager_decode() if zoo else contextlib.nullcontext():
            return self.model(**inputs)

    def give_up(self) -> None:
        """Record nothing from now on."""
        self.works = False

    def _applies(self, inputs: Mapping[str, Any], _config: Any) -> bool:
        from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

        layers = getattr(inputs.get("past_key_values"), "layers", [])
        fixed = bool(layers) and all(type(layer) in (StaticLayer, StaticSlidingWindowLayer) for layer in layers)
        ends = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        in_ram = len({end.weight.device for end in ends}) > 1  # the embeddings: a recording cannot wait for them
        return self.works and fixed and not in_ram
