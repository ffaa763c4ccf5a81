"""What a model takes of the disk and of memory, and what is said when memory runs out.

The disk is checked before a download.  Memory is estimated, so it only warns.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from toolkit import OutOfMemory, UsageError
from toolkit.base.ranks import RANKS, SHARDED
from toolkit.model.machine import Machine, available_memory
from toolkit.model.models import adapter_base, config_of, parameter_shapes, uses_transformers
from toolkit.model.settings import ModelConfig, rows_at_once

# ---------------------------------------------------------------------------------------------------------------------
# Disk


def check_disk(folder: Path, needed: float, remedy: str) -> None:
    """Raise UsageError if a folder's disk has less than `needed` bytes free."""
    place = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UsageError(f"{folder} needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} are free: {remedy}")


def download_size(name: str) -> int:
    """Bytes of a model's files that are not downloaded yet."""
    from huggingface_hub import constants, snapshot_download

    if Path(name).is_dir() or constants.HF_HUB_OFFLINE:
        return 0
    files = snapshot_download(name, dry_run=True, ignore_patterns=["*/*"])
    return sum(file.file_size or 0 for file in files if file.will_download)


def check_download(name: str) -> None:
    """Raise UsageError if the disk has no room for the files of a model that are not downloaded yet."""
    from huggingface_hub import constants

    check_disk(Path(constants.HF_HUB_CACHE), download_size(name), "set HF_HOME to a folder on a larger disk")


def four_bit_name(name: str) -> str:
    """The repository that Unsloth downloads for a model in 4 bits, often one with 4-bit weights.  Needs a GPU."""
    from unsloth.models.loader_utils import get_model_name

    return str(get_model_name(name, load_in_4bit=True) or name)


# ---------------------------------------------------------------------------------------------------------------------
# The estimate

KEYS_AND_VALUES = "keys and values"  # of the completions that are generated together
SERVER = "vLLM server"  # that a run starts: weights as stored, twice these, 6 GB for adapters, graphs, activations


def memory_needed(name: str, config: ModelConfig) -> dict[str, float]:
    """Bytes of GPU memory by purpose, estimated from the model's config; empty if that says too little.

    Experts and projections take 4.13 bits a weight in NF4 and 4.25 in MXFP4, all other weights 16.  A weight of an
    adapter takes 16 bytes with its gradient and both moments.  Keys and values are those of the completions that are
    generated together.  The update takes twice the size that its scores over the vocabulary have in 16 bits, without
    Unsloth four times.  With gpt-oss-20b's shape and the default options an H200 took 18.3 GB in all in MXFP4, 18.2 in
    NF4 and 46.2 in 16 bits.
    """
    try:
        model_config = config_of(str(adapter_base(name) or name))
        shapes = parameter_shapes(model_config)
        text = model_config.get_text_config()
        heads = getattr(text, "num_key_value_heads", text.num_attention_heads)
        width = heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    except Exception:  # transformers does not know every architecture; loading will tell
        return {}
    unpacked = config.weights == "16bit" or uses_transformers(config)
    packing = getattr(model_config, "quantization_config", None) or {}
    stored = 4.25 / 8 if packing else 2.0
    packed = 4.13 / 8 if config.weights in ("auto", "4bit") else 2.0
    whole = re.compile(r"embed|lm_head|router|bias")  # these parameters are never packed

    def held(packed: float) -> float:
        return sum(
            shape.numel() * (2 if len(shape) < 2 or whole.search(name) else packed) for name, shape in shapes.items()
        )

    place = "self_attn" if getattr(config, "adapt", "all") == "attention" else ""
    adapted = sum(
        sum(shape[-2:]) * math.prod(shape[:-2])
        for name, shape in shapes.items()
        if len(shape) > 1 and not whole.search(name) and place in name
    )
    scores = 2.0 * getattr(config, "batch_size", 0) * getattr(config, "max_new_tokens", 0) * text.vocab_size
    parts = RANKS if SHARDED else 1
    own_server = getattr(config, "sampler", "") == "vllm" and not getattr(config, "vllm_server", "")
    cached = 4.0 * rows_at_once(config) * config.max_seq_length * text.num_hidden_layers * width
    return {
        **({SERVER: held(stored) + 2 * cached + 6e9} if own_server else {}),
        "weights": held(2.0 if unpacked else min(packed, stored)) / parts,
        "adapters": 16.0 * getattr(config, "lora_rank", 0) * adapted / parts,
        KEYS_AND_VALUES: cached,
        "update": (4.0 if uses_transformers(config) else 2.0) * scores,
        "CUDA": 1.5e9,
    }


def too_little_memory(name: str, machine: Machine, needed: Mapping[str, float]) -> str:
    """A warning that a model may not fit into GPU memory; "" if it fits."""
    import torch

    free = available_memory() if machine.unified else torch.cuda.mem_get_info()[0]
    if sum(needed.values()) <= free:
        return ""
    parts = ", ".join(f"{part} {size / 1e9:.1f}" for part, size in needed.items())
    return (
        f"{name} may run out of memory: it needs about {sum(needed.values()) / 1e9:.0f} GB ({parts}), and "
        f"{free / 1e9:.0f} are free; end other programs, lower --batch-size, or use a smaller --model (tiny fits)"
    )


def memory_warning(name: str, machine: Machine, config: ModelConfig) -> str:
    """A warning that a model may not fit into GPU memory; "" if it fits or nothing is known.

    It is no refusal, because the estimate was compared with one GPU.
    """
    return too_little_memory(name, machine, memory_needed(name, config)) if machine.gpu else ""


# ---------------------------------------------------------------------------------------------------------------------
# Running out of memory

Found = TypeVar("Found")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on a CPU."""
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def unless_out_of_memory(call: Callable[[], Found]) -> Found | None:
    """What a call returns; None where memory ran out, which is free again by then."""
    import torch

    try:
        return call()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    torch.cuda.empty_cache()
    return None


@contextlib.contextmanager
def naming_memory(doing: str, remedy: str, resume_with: str = "") -> Iterator[None]:
    """Raise OutOfMemory where memory runs out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise OutOfMemory(doing, remedy, resume_with) from error
        raise


def smaller_passes(batch_size: int, accumulation: int) -> str:
    """Options for an update that needs less memory and makes the same steps up to rounding, or ""."""
    together = batch_size * accumulation
    less = next((size for size in range(batch_size // 2, 0, -1) if together % size == 0), 0)
    return f"--batch-size {less} --accumulation {together // less}" if less else ""


def fewer_completions(generations: int, batch_size: int, accumulation: int) -> str:
    """Options for half of a step's completions.  They need a new run, because one that goes on keeps these numbers."""
    half = batch_size * accumulation // 2
    sizes = [size for size in range(1, half + 1) if half % size == 0]
    group = max((size for size in sizes if 1 < size <= generations), default=half)
    rows = max((size for size in sizes if size <= batch_size), default=0)
    new = f"another --run-name with --generations {group} --batch-size {rows} --accumulation"
    return f"{new} {half // rows}" if half > 1 else "fewer --max-new-tokens"
