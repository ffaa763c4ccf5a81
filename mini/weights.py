"""Models on disk in Hugging Face's format: config.json and model.safetensors."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from operator import methodcaller
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from mini.files import write_whole
from mini.model import GPT, GptConfig
from mini.tokens import BpeTokens, ChessTokens, Tokens
from toolkit import UsageError

TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # stored as (in, out), as in the TensorFlow original
SKIPPED = (".attn.bias", ".attn.masked_bias")  # causal masks in old files
ASSUMED = {"activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
           "add_cross_attention": False, "tie_word_embeddings": True}  # fmt: skip


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json.  Raises UsageError unless it describes a GPT-2."""
    try:
        config = json.loads((folder / "config.json").read_text())
        model_type = config["model_type"]
    except OSError as error:
        raise UsageError(f"{folder / 'config.json'}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{folder / 'config.json'} is no model's config") from None
    if model_type != "gpt2":
        raise UsageError(f"{folder} is a {model_type} model; only GPT-2 can be read")
    for name, value in ASSUMED.items():
        if config.get(name, value) != value:
            raise UsageError(f"{folder}: {name} is {config[name]}; only {value} can be read")
    if config.get("n_inner") not in (None, 4 * config.get("n_embd", 0)):
        raise UsageError(f"{folder}: n_inner is {config['n_inner']}; only 4 x n_embd can be read")
    return dict(config)


def load_model(folder: Path) -> GPT:
    """Load a GPT-2 from a folder."""
    config = read_config(folder)
    try:
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        shape = GptConfig(**{f.name: config[f.name] for f in fields(GptConfig) if f.name in config})
        if shape.n_embd % shape.n_head:
            raise ValueError(f"{shape.n_embd} columns cannot be shared by {shape.n_head} heads")
        with torch.device("meta"):
            model = GPT(shape)
        model.load_state_dict(from_published(tensors), assign=True)
    except OSError as error:
        raise UsageError(f"{folder / 'model.safetensors'}: {error.strerror or error}") from None
    except (safetensors.SafetensorError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{folder / 'model.safetensors'} does not fit config.json: {reason}") from None
    return model


def from_published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Published names and layouts -> ours.  RookWorld-LM has the prefix `transformer.`, OpenAI's own file has not."""
    ours = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("transformer.")
        if name.endswith(SKIPPED) or name == "lm_head.weight":  # the head is wte
            continue
        ours[name] = (tensor.t() if name.endswith(TRANSPOSED) else tensor).float().contiguous()
    return ours


def save_model(model: GPT, tokens: Tokens, folder: Path, vocabulary: Path | None = None) -> None:
    """Write a folder for load_model, load_tokens and transformers; BPE files are copied from `vocabulary`."""
    tensors = {f"transformer.{name}": (tensor.t() if name.endswith(TRANSPOSED) else tensor).contiguous()
               for name, tensor in model.state_dict().items()}  # fmt: skip
    config = asdict(model.config) | ASSUMED | {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "bos_token_id": tokens.end,
        "eos_token_id": tokens.end, "mini_tokens": "chess" if isinstance(tokens, ChessTokens) else "bpe",
    }  # fmt: skip
    for pair in BpeTokens.NAMES if vocabulary and isinstance(tokens, BpeTokens) else ():
        for name in pair:
            if vocabulary and (vocabulary / name).is_file():
                write_whole(folder / name, methodcaller("write", (vocabulary / name).read_bytes()))
    data = safetensors.torch.save(tensors, {"format": "pt"})
    write_whole(folder / "model.safetensors", methodcaller("write", data))
    write_whole(folder / "config.json", methodcaller("write", json.dumps(config, indent=2).encode()))


def load_tokens(folder: Path) -> Tokens:
    """The vocabulary of the model in a folder."""
    tokens: Tokens = ChessTokens() if read_config(folder).get("mini_tokens") == "chess" else BpeTokens(folder)
    size = read_config(folder).get("vocab_size", GptConfig.vocab_size)
    if tokens.size > size:
        raise UsageError(f"{folder}: a vocabulary of {tokens.size} tokens, but a model of {size}")
    return tokens
