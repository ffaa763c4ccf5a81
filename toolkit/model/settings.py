"""How a model is loaded and trained on a machine, and why.

Decisions (`Choice`, `Settings`) are plain data that follows from facts (machine.py), so the choice for every GPU is
tested without one.  The `doctor` command (doctor.py) prints them with their reasons.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from toolkit import UsageError, cache_folder
from toolkit.base.files import read_json
from toolkit.base.ranks import SHARDED
from toolkit.model.machine import Machine, library_versions
from toolkit.model.models import is_embedded, is_in_mxfp4, stays_as_stored

if TYPE_CHECKING:
    from rich.table import Table

# ---------------------------------------------------------------------------------------------------------------------
# What is asked for


class ModelConfig(Protocol):
    """What a model's settings and its memory depend on.

    A training configuration also has `loader`, `batch_size`, `accumulation`, `lora_rank` and `adapt`; without them the
    model is only evaluated.
    """

    @property
    def weights(self) -> str: ...

    @property
    def max_seq_length(self) -> int: ...

    @property
    def eval_batch_size(self) -> int: ...


def rows_at_once(config: ModelConfig) -> int:
    """How many completions a model generates together, at most: those of a step, or a part of an evaluation's."""
    step = getattr(config, "batch_size", 1) * getattr(config, "accumulation", 1)
    return max(int(step), config.eval_batch_size)


# ---------------------------------------------------------------------------------------------------------------------
# The form of the weights

ROOM_FOR_16_BITS = 75e9  # bytes; GPUs sold with 80 GB have a little less
ROOM_FOR_MXFP4 = 22e9  # to train gpt-oss-20b with its default options; GPUs sold with 24 GB have it


def has_room_for_mxfp4(machine: Machine, name: str) -> bool:
    """Whether a GPU can train a model whose experts are stored in MXFP4 as it is.  True for all other models."""
    return machine.memory >= ROOM_FOR_MXFP4 or not is_in_mxfp4(name)


@dataclass(frozen=True)
class Choice:
    """In which form a model's weights are held on a GPU, and why."""

    weights: str = "4bit"  # 4bit, stored or 16bit
    why: str = "the default; doctor --measure finds what is fastest on this GPU"


def speeds() -> Path:
    """The file with what `doctor --measure` has found."""
    return cache_folder() / "speeds.json"


def speed_key(machine: Machine, name: str) -> str:
    """What a measured speed belongs to: GPU, model, libraries."""
    versions = library_versions(("torch", "unsloth", "transformers"))
    return " ".join((machine.gpu, name, *versions.values()))


def choose_weights(machine: Machine, name: str, config: ModelConfig) -> Choice:
    """The form that was asked for, the fastest one that was measured, gpt-oss's own, or 4 bits."""
    if stays_as_stored(name):
        return Choice("stored", why="the embedded model and adapters to fused experts stay as they are")
    if config.weights != "auto":
        return Choice(config.weights, why=f"--weights {config.weights}")
    if name == "smollm2":
        return Choice("stored", why="it is small")
    if getattr(config, "sampler", "") == "vllm":
        return Choice("stored", why="so that the vLLM server holds the same weights")
    if kept := read_json(speeds()).get(speed_key(machine, name)):
        why = f"the fastest here: {kept['tokens_per_s']:.0f} tokens/s (doctor --measure)"
        return Choice(kept["weights"], why)
    if getattr(config, "lora_rank", 0) and not has_room_for_mxfp4(machine, name):
        return Choice("4bit", why="as in public runs on a GPU with less than 24 GB")
    if is_in_mxfp4(name):  # docs/gpu.md has the figures
        return Choice("stored", why="generates faster than in NF4; doctor --measure compares them here")
    return Choice()


# ---------------------------------------------------------------------------------------------------------------------
# Settings


@dataclass(frozen=True)
class Settings:
    """How a model is loaded and trained on a machine, and why."""

    load: dict[str, Any]  # arguments of Unsloth's loader, or the type alone for transformers'
    environment: dict[str, str]  # set before anything is compiled
    rows: tuple[tuple[str, str, str], ...]  # (what, how, why), for people


def settings_for_cpu(machine: Machine, name: str, plain: bool) -> Settings:
    """A CPU.  The embedded model is in float32 on each, so its figures do not depend on the processor."""
    import torch

    in_16_bits = plain and machine.bfloat16 and not is_embedded(name)
    precision = ("bfloat16", "this processor multiplies it") if in_16_bits else ("float32", "no 4-bit kernels on a CPU")
    rows = (
        ("device", f"CPU, {machine.processor}", "no CUDA GPU was found"),
        ("memory", f"{machine.memory / 1e9:.0f} GB", ""),
        ("precision", *precision),
    )
    of_unsloth = {} if plain else {"load_in_4bit": False, "use_gradient_checkpointing": False}
    return Settings({"dtype": torch.bfloat16 if in_16_bits else torch.float32, **of_unsloth}, {}, rows)


def device_row(machine: Machine) -> tuple[str, str, str]:
    """The GPU with its compute capability."""
    return "device", f"{machine.gpu} ({machine.capability[0]}.{machine.capability[1]}), {machine.processor}", ""


def settings_for_transformers(machine: Machine) -> Settings:
    """A GPU with `--loader transformers`."""
    import torch

    rows = (
        device_row(machine),
        ("memory", f"{machine.memory / 1e9:.0f} GB", "each GPU holds a shard of the weights" if SHARDED else ""),
        ("precision", "bfloat16", "--loader transformers"),
        ("gradient checkpointing", "on the GPU", ""),
    )
    return Settings({"dtype": torch.bfloat16}, {}, rows)


FORMS = {"4bit": "4-bit NF4", "stored": "as stored; gpt-oss's experts in MXFP4", "16bit": "bfloat16"}


def settings_for_unsloth(machine: Machine, choice: Choice) -> Settings:
    """A GPU with Unsloth's loader."""
    environment = {"UNSLOTH_MXFP4_KEEP_PACKED": "0"} if choice.weights == "16bit" else {}
    ptxas = ("triton's own", "")
    if machine.capability >= (10, 0) and machine.triton < (3, 6):
        environment |= {
            "TRITON_PTXAS_PATH": "/usr/local/cuda/bin/ptxas",
            "TORCH_CUDA_ARCH_LIST": f"{machine.capability[0]}.{machine.capability[1]}a",
        }
        ptxas = ("CUDA's", f"triton {machine.triton[0]}.{machine.triton[1]} has none for this GPU")
    load = {
        "load_in_4bit": choice.weights == "4bit",
        "load_in_16bit": choice.weights == "16bit",
        "use_gradient_checkpointing": True,
        "offload_embedding": False if machine.unified else "auto",
    }
    useless = "GPU and processor share their memory: moving them frees nothing"
    rows = (
        device_row(machine),
        ("memory", f"{machine.memory / 1e9:.0f} GB", "shared with the processor" if machine.unified else ""),
        ("precision", FORMS[choice.weights], choice.why),
        (
            "gradient checkpointing",
            "on the GPU",
            useless if machine.unified else "sequences are short: moving activations to RAM costs more time",
        ),
        (
            "embeddings",
            "on the GPU" if machine.unified else "in RAM if memory is tight",
            useless if machine.unified else "Unsloth decides",
        ),
        (
            "attention",
            "gpt-oss: flex in training, eager in generation",
            "flash-attn and xformers do not fit its attention sinks",
        ),
        ("generation", "a CUDA graph for each batch", "one launch for a token instead of thousands"),
        ("ptxas", *ptxas),
    )
    return Settings(load, environment, rows)


def choose_settings(machine: Machine, name: str, choice: Choice, plain: bool) -> Settings:
    """The settings that fit a machine and a model; `plain` is transformers without Unsloth.

    Raises UsageError for an option that the machine cannot do.
    """
    if not machine.gpu:
        return settings_for_cpu(machine, name, plain)
    if choice.weights == "16bit" and machine.memory < ROOM_FOR_16_BITS:
        raise UsageError(
            f"--weights 16bit needs a GPU of 80 GB, and {machine.gpu} has {machine.memory / 1e9:.0f}: leave it out"
        )
    return settings_for_transformers(machine) if plain else settings_for_unsloth(machine, choice)


def settings_table(settings: Settings) -> Table:
    """The settings with their reasons.  For a Console without markup, which prints brackets as they are."""
    from rich.table import Table

    table = Table("", "", "why", box=None, show_header=False)
    for row in settings.rows:
        table.add_row(*row)
    return table
