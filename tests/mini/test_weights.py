"""Folders of weights: read from transformers and by transformers, and what is wrong with a folder in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from mini.files import write_whole
from mini.tokens import ChessTokens
from mini.weights import load_model, load_tokens, save_model
from tests.mini.helpers import small_model
from toolkit import UsageError

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, Any]:
    """A GPT-2 that transformers has saved, and itself."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=32, n_embd=48, n_layer=3, n_head=4, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():  # biases and norms too, which begin at 0 and 1
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    return tmp_path, model


def logits(folder: Path) -> torch.Tensor:
    model = load_model(folder)
    with torch.no_grad():
        return model.logits(model(IDS, torch.ones_like(IDS)))


def test_logits_equal_those_of_transformers(published: tuple[Path, Any]) -> None:
    folder, theirs = published
    with torch.no_grad():
        torch.testing.assert_close(logits(folder), theirs(IDS).logits, atol=1e-5, rtol=0)


def test_openai_file_with_bare_names_and_old_masks(published: tuple[Path, Any]) -> None:
    """The first published file has no `transformer.`, and each layer's causal mask."""
    folder, theirs = published
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor.clone() for name, tensor in tensors.items()}
    bare |= {"h.0.attn.bias": torch.ones(1, 1, 32, 32), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    bare["lm_head.weight"] = bare["wte.weight"].clone()
    safetensors.torch.save_file(bare, folder / "model.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(logits(folder), theirs(IDS).logits, atol=1e-5, rtol=0)


def test_what_is_saved_loads_in_transformers(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    model = small_model()
    save_model(model, ChessTokens(), tmp_path)
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        ours = model.logits(model(IDS, torch.ones_like(IDS)))
        torch.testing.assert_close(theirs(IDS).logits, ours, atol=1e-5, rtol=0)
    assert theirs.config.eos_token_id == 0
    torch.testing.assert_close(load_model(tmp_path).state_dict(), model.state_dict(), atol=0, rtol=0)


def test_folder_says_which_vocabulary_is_its_own(tmp_path: Path) -> None:
    save_model(small_model(), ChessTokens(), tmp_path)
    with pytest.raises(UsageError, match="a vocabulary of 2727 tokens, but a model of 50"):
        load_tokens(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 2727}))
    assert isinstance(load_tokens(tmp_path), ChessTokens)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [({"model_type": "llama"}, "is a llama model"), ({"n_embd": 64}, "does not fit config.json"),
     ({"activation_function": "gelu"}, "activation_function is gelu"), ({"n_layer": 2}, "does not fit config.json"),
     ({"n_inner": 7}, "n_inner is 7"), ({"n_head": 5}, "48 columns cannot be shared by 5 heads")],
)  # fmt: skip
def test_config_that_does_not_fit(published: tuple[Path, Any], change: dict[str, Any], complaint: str) -> None:
    folder, _ = published
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=complaint):
        load_model(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_damaged_or_missing_file(published: tuple[Path, Any], name: str) -> None:
    folder, _ = published
    (folder / name).write_bytes((folder / name).read_bytes()[:100])
    with pytest.raises(UsageError, match=name):
        load_model(folder)
    (folder / name).unlink()
    with pytest.raises(UsageError, match="No such file"):
        load_model(folder)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, lambda file: file.write(b"old"))

    def half(file: Any) -> None:
        file.write(b"ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(UsageError, match="No space left on device"):
        write_whole(path, half)
    assert path.read_bytes() == b"old"
