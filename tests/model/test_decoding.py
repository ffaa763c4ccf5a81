"""Decoding steps are recorded and replayed; tests/recorder.py stands in for the GPU."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.recorder import Recorder
from toolkit.model import decoding
from toolkit.model.decoding import WARM_UP, Decoding

NEW, WINDOW = 24, 8


@pytest.fixture
def model() -> Any:
    """A gpt-oss with random weights, whose windows are shorter than the completions."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_local_experts": 4, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "sliding_window": WINDOW}
    return GptOssForCausalLM(GptOssConfig(vocab_size=50, pad_token_id=0, eos_token_id=1, **sizes, **heads)).eval()


def generated(model: Any, prompt: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Likeliest tokens of two rows, one padded on the left, and their logits."""
    ids = torch.arange(2, 2 + 2 * prompt).view(2, prompt)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    given = {"input_ids": ids, "attention_mask": mask, "cache_implementation": "static", "do_sample": False}
    done = model.generate(
        **given, min_new_tokens=NEW, max_new_tokens=NEW, output_logits=True, return_dict_in_generate=True
    )
    return done.sequences, torch.stack(done.logits)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Recordings of this test."""
    made = Recorder(strict=True)
    monkeypatch.setattr(decoding, "record", made)
    return made


@pytest.mark.parametrize(("prompt", "recordings"), [(12, 1), (5, 2), (WINDOW - WARM_UP, 1)])
def test_replayed_steps_are_the_models(model: Any, recorder: Recorder, prompt: int, recordings: int) -> None:
    """A window that becomes full needs another recording: from then on it slides."""
    tokens, logits = generated(model, prompt)
    Decoding(model)
    for _ in range(2):  # each generation has its own recordings
        again, relogits = generated(model, prompt)
        assert (again == tokens).all()
        torch.testing.assert_close(relogits, logits)
    assert (recorder.attempts, recorder.replays) == (2 * recordings, 2 * (NEW - 1 - WARM_UP))


def test_an_adapters_base_is_what_generates(model: Any, recorder: Recorder) -> None:
    """The adapter of a finished run is loaded as a model around its base."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    Decoding(adapted)
    generated(adapted, 12)
    assert recorder.attempts == 1


def test_without_a_graph_it_generates_as_before(model: Any, recorder: Recorder) -> None:
    """What cannot be recorded is not tried again, and said once."""
    tokens, _ = generated(model, 12)
    recorder.error = RuntimeError("operation not permitted when stream is capturing\nand more")
    Decoding(model)
    with pytest.warns(UserWarning, match="without a CUDA graph: operation not permitted when stream is capturing$"):
        assert (generated(model, 12)[0] == tokens).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (generated(model, 12)[0] == tokens).all()
    assert recorder.attempts == 1


def test_where_memory_runs_out_a_step_may_fit_without_a_graph(model: Any, recorder: Recorder) -> None:
    """The next generation may be smaller."""
    tokens, _ = generated(model, 12)
    recorder.error = torch.OutOfMemoryError()
    Decoding(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all((generated(model, 12)[0] == tokens).all() for _ in range(2))
    assert recorder.attempts == 2


def change_inputs(model: Any, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what transformers' sampling loop gives to each step."""
    prepare = model.prepare_inputs_for_generation

    def changed(*args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = prepare(*args, **kwargs)
        change(inputs)
        return inputs

    model.prepare_inputs_for_generation = changed


def leave_positions_out(model: Any) -> None:
    change_inputs(model, lambda inputs: inputs.pop("position_ids"))


def give_an_object(model: Any) -> None:
    change_inputs(model, lambda inputs: inputs.update(mask_of_blocks=object()))


def move_embeddings(model: Any) -> None:
    model.get_input_embeddings = lambda: SimpleNamespace(weight=torch.empty(0, device="meta"))


@pytest.mark.parametrize("change", [leave_positions_out, give_an_object, move_embeddings])
def test_what_a_recording_would_not_see_is_not_recorded(change: Any, recorder: Recorder) -> None:
    """Positions that Python counts, the mask of FlexAttention, and embeddings in RAM."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, pad_token_id=0, eos_token_id=1, **sizes)).eval()
    change(model)
    tokens, _ = generated(model, 12)
    Decoding(model)
    assert (generated(model, 12)[0] == tokens).all()
    assert recorder.attempts == 0


def test_nothing_compiled_is_recorded(model: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training Unsloth ran experts in NF4 as torch.compile had made them, with CUDA graphs of their own, which an
    H200 could not record."""
    eager, seen = list[bool](), list[bool]()

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        eager.append(True)
        yield
        eager.append(False)

    monkeypatch.setitem(sys.modules, "unsloth_zoo.temporary_patches.utils", SimpleNamespace(unsloth_eager_decode=scope))
    model.register_forward_pre_hook(lambda *_: seen.append(bool(eager) and eager[-1]))
    Decoding(model)
    generated(model, 12)
    assert seen == [False] + [True] * NEW  # the prompt, each step, and the recording
    assert recorder.attempts == 1


def test_a_cache_that_grows_is_left_alone(model: Any, recorder: Recorder) -> None:
    Decoding(model)
    model.generate(torch.tensor([[2, 3, 4]]), max_new_tokens=NEW, do_sample=False)
    assert recorder.attempts == 0
