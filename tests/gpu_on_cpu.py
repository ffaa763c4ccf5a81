"""A script on a CPU that says it is an H200, so that what Unsloth does on a GPU is really done.

    python tests/gpu_on_cpu.py gpt_2048_rl.py train ...
    torchrun --nproc_per_node 2 tests/gpu_on_cpu.py gpt_2048_rl.py train ...     two of them

Its loader, 4-bit classes, LoRA on experts, gpt-oss attention, generation and generated GRPO trainer run as they are, on
bfloat16 tensors.  Not what only a GPU has: Triton's and CUDA's kernels, torch.compile, CUDA graphs (a recording repeats
the call), memory, speed.  Tensors go to "cuda" and stay where they are; FlexAttention is written out, because PyTorch's
has no backward pass on a CPU.  Of TRL's trainers Unsloth rewrites only those of SFT and GRPO: a third of its import
would be spent on the others.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import bitsandbytes  # while torch still says that there is no GPU: its library for CUDA needs CUDA's
import torch
import torch.nn.attention.flex_attention as flex
from torch.overrides import TorchFunctionMode

from tests.recorder import Recorder
from toolkit.model import decoding, machine

UNUSED = ("trl.trainer.distillation_trainer", "trl.trainer.dpo_trainer", "trl.trainer.kto_trainer",
          "trl.trainer.reward_trainer", "trl.trainer.rloo_trainer", "trl.experimental.cpo", "trl.experimental.gkd",
          "trl.experimental.gold", "trl.experimental.online_dpo", "trl.experimental.orpo", "trl.experimental.sdft",
          "trl.experimental.server_distillation")  # fmt: skip
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
MEMORY = 150_000_000_000
H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=MEMORY, multi_processor_count=132,
                       is_integrated=0, warp_size=32, gcnArchName="")  # fmt: skip
IS_CUDA: Any = torch.Tensor.is_cuda
RANDOM = torch.zeros(16, dtype=torch.uint8)
ANSWERS: dict[str, Any] = {  # of torch.cuda, to any arguments
    "is_available": True, "is_initialized": True, "device_count": RANKS, "current_device": 0,
    "get_device_name": H200.name,
    "get_device_properties": H200, "get_device_capability": (H200.major, H200.minor), "is_bf16_supported": True,
    "mem_get_info": (MEMORY, MEMORY), "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0,
    "max_memory_reserved": 0, "memory_stats": defaultdict(int), "is_current_stream_capturing": False,
    "current_stream": None, "get_arch_list": ["sm_90"],
    **dict.fromkeys(("synchronize", "empty_cache", "ipc_collect", "_lazy_init", "set_device",
                     "reset_peak_memory_stats"))}  # fmt: skip
OF_RANDOM: dict[str, Any] = {
    "get_rng_state": RANDOM, "get_rng_state_all": [RANDOM],
    **dict.fromkeys(("set_rng_state", "set_rng_state_all", "manual_seed", "manual_seed_all"))}  # fmt: skip


class Device(contextlib.nullcontext[None]):
    """torch.cuda.device."""

    idx = 0

    def __init__(self, *_: object) -> None:
        super().__init__()


class Redirected(TorchFunctionMode):
    """Tensors that should go to a GPU stay on the CPU and say that they are on the GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function == IS_CUDA.__get__:
            return True
        if function is torch.device:
            return function("cuda", *args) if type(args[0]) is int else function(*args, **kwargs)
        if function.__name__ in ("pin_memory", "cuda"):
            return args[0]
        to = function.__name__ == "to"
        args = tuple(on_cpu(value, to and place > 0) for place, value in enumerate(args))
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"], number=True)
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)


def on_cpu(value: Any, number: bool) -> Any:
    """ "cuda" in any form -> "cpu"; everything else stays as it is.  A number may be a device's."""
    is_gpu = str(value).startswith("cuda") if isinstance(value, (str, torch.device)) else number and type(value) is int
    return torch.device("cpu") if is_gpu else value


def flex_attention(query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: Any = None,
                   enable_gqa: bool = False, return_lse: bool = False, **options: Any) -> Any:  # fmt: skip
    """FlexAttention, written out: query (B, H, T, D), key and value (B, H / G, S, D)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1).float(), value.repeat_interleave(groups, 1).float()
    scores = query.float() @ key.mT * (scale or query.shape[-1] ** -0.5)  # (B, H, T, S)
    if block_mask is not None:
        row, column = torch.arange(scores.shape[2])[:, None], torch.arange(scores.shape[3])
        scores = scores.masked_fill(~block_mask.mask_mod(row * 0, row * 0, row, column), -torch.inf)
    result, lse = (scores.softmax(-1) @ value).to(query.dtype), scores.logsumexp(-1)
    if options.get("return_aux") is not None:
        return result, flex.AuxOutput(lse=lse, max_scores=None)
    return (result, lse) if return_lse else result


class Native:
    """bitsandbytes' library for the CPU, with the names of functions that there are for CUDA only."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self.library, name) if "4bit" not in name and "dequantize" not in name else _Absent(name)


class _Absent:
    restype = None  # by which unsloth tells a native function

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: object) -> None:
        raise NotImplementedError(f"{self.name} is for CUDA")


def become_gpu() -> None:
    """From here on this process has an H200."""
    stream = SimpleNamespace(is_capturing=lambda: False)
    accelerator = {"is_available": True, "current_accelerator": torch.device("cuda"), "device_count": RANKS,
                   "current_device_index": 0, "current_stream": stream}  # fmt: skip
    for module, answers in ((torch.cuda, ANSWERS | OF_RANDOM), (torch.cuda.random, OF_RANDOM),
                            (torch.accelerator, accelerator)):  # fmt: skip
        for name, answer in answers.items():
            setattr(module, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.device = torch.cuda.device_of = Device  # type: ignore[assignment, misc]
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.stream = Device  # type: ignore[assignment, misc]
    torch.version.cuda = "13.0"
    machine.gpu_is_there = lambda: True  # it looks for a device node
    decoding.record = Recorder()
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    flex.flex_attention = flex_attention  # type: ignore[assignment]
    bitsandbytes.functional.lib = Native(bitsandbytes.functional.lib)
    # It is written in Triton for heads of 512, and the loader always imports it.
    sys.modules["unsloth.kernels.large_head_attention"] = SimpleNamespace(patch_large_head_attention=lambda _: None)  # type: ignore[assignment]
    sys.modules["openenv"] = None  # type: ignore[assignment]  # where it is installed, unsloth imports it for seconds
    sys.modules.update(dict.fromkeys(UNUSED))  # type: ignore[arg-type]
    Redirected().__enter__()  # type: ignore[no-untyped-call]
    if RANKS > 1:
        become_one_of_several()
    run = threading.Thread.run

    def run_redirected(self: threading.Thread) -> None:
        with Redirected():
            run(self)

    threading.Thread.run = run_redirected  # type: ignore[method-assign]


def become_one_of_several() -> None:
    """The processes meet by gloo, as if it were NCCL."""
    from accelerate import DistributedType, PartialState

    begin = torch.nn.parallel.DistributedDataParallel.__init__

    def without_devices(self: Any, module: Any, device_ids: Any, output_device: Any, **options: Any) -> None:
        begin(self, module, **options)

    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    torch.nn.parallel.DistributedDataParallel.__init__ = without_devices  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    become_gpu()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
