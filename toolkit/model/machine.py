"""What this machine has: its GPU, its memory, its libraries and the environment that they read.

Facts (`Machine`) are plain data, so the settings for every GPU (settings.py) are tested without one.  All files call
`machine.gpu_is_there` by this full name, so a test replaces it in one place.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit import cache_folder


def prepare_environment(offline: bool) -> None:
    """Set the environment variables that libraries read at import.  Call it before the first import of unsloth.

    A variable that the user has set stays as it is.
    """
    defaults = {
        "TOKENIZERS_PARALLELISM": "false",
        "UNSLOTH_DISABLE_STATISTICS": "1",  # a download that only counts users
        "UNSLOTH_COMPILE_LOCATION": str(cache_folder() / "unsloth_compiled"),  # the default is the working directory
        "TORCHINDUCTOR_CACHE_DIR": str(cache_folder() / "torchinductor"),  # its code is run, and anyone can write /tmp
        "UNSLOTH_GRPO_SEQ_PACKING": "0",  # gpt-oss's attention takes no packed rows: Unsloth would try and fall back
        "UNSLOTH_GRPO_PREFIX_GROUPER": "0",
        "UNSLOTH_COMPILE_DECODE": "0",  # decoding.py instead
        # torch's idle threads spin a thirtieth as long as PyTorch lets them: other programs need the cores.  Asleep at
        # once, they would wake up too late for a small model's next product.
        **({} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": "10000"}),
        **({"HF_HUB_OFFLINE": "1"} if offline else {}),
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class Machine:
    """What there is to train with."""

    gpu: str = ""  # name of the GPU; empty without one
    capability: tuple[int, int] = (0, 0)  # CUDA compute capability
    memory: int = 0  # bytes of GPU memory; of RAM without a GPU
    unified: bool = False  # GPU and processor share their memory
    processor: str = "x86_64"
    triton: tuple[int, int] = (0, 0)  # version
    bfloat16: bool = False  # without a GPU: the processor multiplies it


LIBRARIES = ("torch", "triton", "unsloth", "unsloth_zoo", "transformers", "trl", "peft", "bitsandbytes")


def library_versions(names: Sequence[str] = LIBRARIES) -> dict[str, str]:
    """Installed versions by name; "0.0" for a library that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = dict.fromkeys(names, "0.0")
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for it.  Without them it is several times slower than float32."""
    return bool(re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", Path("/proc/cpuinfo").read_text()))


def find_machine() -> Machine:
    """This machine.  Of several GPUs it describes the first."""
    import torch

    processor = os.uname().machine
    if not torch.cuda.is_available():
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Machine(memory=memory, processor=processor, bfloat16=multiplies_bfloat16())
    gpu = torch.cuda.get_device_properties(0)
    major, minor = library_versions(("triton",))["triton"].split(".")[:2]
    return Machine(
        gpu=gpu.name,
        capability=(gpu.major, gpu.minor),
        memory=gpu.total_memory,
        unified=bool(gpu.is_integrated),
        processor=processor,
        triton=(int(major), int(minor)),
    )


def available_memory() -> int:
    """Bytes of RAM that are free or can be freed; on a machine with unified memory the GPU's too."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


LEFT_FREE = 8e9  # bytes, for players, pages, and the rest of the machine


def bound_memory(machine: Machine) -> None:
    """Let PyTorch run out of memory before a machine does whose GPU shares it: that would freeze (pytorch 174358)."""
    import torch

    if machine.unified:
        share = (available_memory() - LEFT_FREE) / machine.memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.1, share)))


def gpu_is_there() -> bool:
    """Whether a CUDA GPU has a device node.  Works without torch, so --help stays fast."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1")
    return visible and any(any(Path("/dev").glob(node)) for node in ("nvidia[0-9]*", "nvhost-gpu", "dxg"))
