"""Exports: the adapter, the whole model in bfloat16, or gpt-oss in MXFP4, as folders that other programs load.

An export reads and writes files with transformers and PEFT, and never imports unsloth, whose own MXFP4 export installs
packages.  The MXFP4 rounding is written here, because transformers can only read the format unless it downloads
kernels.

Shapes: E experts of a layer, `in` and `out` the sides of a matrix, r the rank of an adapter.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from toolkit import UsageError, tiny
from toolkit.evaluation import read_scores
from toolkit.machine import (
    adapter_base,
    available_memory,
    check_disk,
    check_download,
    check_model,
    parameter_shapes,
)
from toolkit.runs import checkpoints, keep_config, read_json

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from rich.console import Console


@dataclass
class ExportConfig:
    """Write what a run has learned to a folder that other programs can load."""

    source: Path  # a run's folder, one of its checkpoints, or an adapter's folder
    format: Literal["lora", "merged_16bit", "mxfp4"] = "lora"  # the adapter, or the whole model (mxfp4: gpt-oss only)
    output_dir: Path | None = None  # default: export/FORMAT in the run's folder, where a new export replaces an old one
    base: str = ""  # model to merge the adapter into; default: the one it was trained on
    push_to_hub: str = ""  # also upload the folder to this hub repository: OWNER/NAME
    private: bool = True  # make a new hub repository private
    json: bool = False  # print one JSON object as the last line of stdout, and everything else to stderr


# ---------------------------------------------------------------------------------------------------------------------
# MXFP4: groups of 32 weights with a common power of two, each weight rounded to four bits

MXFP4_CONFIG = {  # the quantization_config of a model with such weights
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
EXPERT_WEIGHTS = re.compile(r"\.experts\.\w+_proj$")  # the parameters that gpt-oss stores in MXFP4
FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the format E2M1; the fourth bit of a code is the sign


def quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix (in, out) to MXFP4; `in` is a multiple of 32.

    Returns blocks (out, in/32, 16) and scales (out, in/32), both uint8.  A block holds 32 codes, two in a byte, the
    first in the low half.  A scale is the exponent of its group's power of two, plus 127.

    Two exponents fit the largest weight of a group.  The one with the smaller squared error is taken, so weights that
    were MXFP4 before come back exactly.  Format: OCP Microscaling Formats 1.0, sections 5 and 6.
    """
    import torch

    groups = weight.float().T.contiguous().unflatten(1, (-1, 32))  # (out, in/32, 32)
    magnitudes = torch.tensor(FP4_MAGNITUDES, device=weight.device)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    largest = groups.abs().amax(-1, keepdim=True)  # (out, in/32, 1)
    floor = torch.frexp(largest).exponent - 3  # floor(log2(largest)) - 2, because magnitudes end between 4 and 8

    def rounded(exponent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, the exponent within the range of a scale, and each group's squared error."""
        exponent = exponent.where(largest > 0, 0).clamp(-127, 127)
        size = torch.ldexp(groups.abs(), -exponent)
        codes = torch.bucketize(size, middles)  # rounds ties down
        codes += (codes % 2 == 1) & (size == middles[codes.clamp(max=6)])  # ties go to the even code
        error = (magnitudes[codes] - size).square().sum(-1, keepdim=True) * torch.exp2(2.0 * exponent)
        return codes + 8 * (groups < 0), exponent, error

    (low_codes, low, low_error), (high_codes, high, high_error) = rounded(floor), rounded(floor + 1)
    better = high_error < low_error
    codes, exponent = high_codes.where(better, low_codes).to(torch.uint8), high.where(better, low)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponent + 127).squeeze(-1).to(torch.uint8)


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The matrix (in, out) that blocks and scales of `quantize_mxfp4` stand for, in float32."""
    import torch

    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()  # (out, in/32, 32)
    negative = (-magnitude for magnitude in FP4_MAGNITUDES)
    values = torch.tensor([*FP4_MAGNITUDES, *negative], device=blocks.device)[codes]
    return torch.ldexp(values, scales.int()[..., None] - 127).flatten(1).T


# ---------------------------------------------------------------------------------------------------------------------
# Adapter


def fuse_expert_adapters(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert an adapter with one LoRA pair per expert, from 4-bit training, to the layout of the released gpt-oss.

    There the experts of a layer are one parameter (E, in, out).  Its pair is A (E * r, in), with the experts one after
    the other, and B (out, r * E), in which the expert is the fastest index.  Other adapters come back unchanged.
    """
    import torch

    name = re.compile(r"(.*\.experts)\.(gate_up|down)_projs\.(\d+)\.(lora_[AB])\.weight")
    matches = {key: name.fullmatch(key) for key in weights}
    fused = {key: weights[key] for key, match in matches.items() if not match}
    experts: dict[tuple[str, str, str], dict[int, torch.Tensor]] = {}
    for key, match in matches.items():
        if match:
            experts.setdefault((match[1], match[2], match[4]), {})[int(match[3])] = weights[key]
    for (module, projection, side), pairs in experts.items():
        inner = ".base_layer" if projection == "gate_up" else ""  # PEFT wraps a module once per adapted parameter
        parts = [pairs[expert] for expert in range(len(pairs))]
        fused[f"{module}{inner}.{side}.weight"] = (
            torch.cat(parts) if side == "lora_A" else torch.stack(parts, -1).flatten(1)
        )
    return fused


def full_precision(name: str) -> str:
    """The model that a 4-bit model was made from, by Unsloth's way of naming them."""
    return re.sub(r"(-unsloth)?-bnb-4bit$", "", name)


def write_adapter(source: Path, base: str, folder: Path) -> None:
    """Write an adapter so that PEFT and vLLM load it on the released model `base`."""
    from safetensors.torch import load_file, save_file

    config = read_json(source / "adapter_config.json")
    weights = load_file(source / "adapter_model.safetensors")
    fused = fuse_expert_adapters(weights)
    if fused.keys() != weights.keys():
        config["target_modules"] = sorted({key.split(".")[-3] for key in fused if ".experts." not in key})
        config["target_parameters"] = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    # Unsloth's notes describe the layout of the source.  With its auto_mapping but without these notes, unsloth would
    # take the weights for its layout of before September 2026 and repack them.
    for note in ("lora_B_layout", "unsloth_fused_expert_lora"):
        config.pop(note, None)
    config |= {"base_model_name_or_path": base, "auto_mapping": None}
    save_file(fused, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------------
# Whole model


def weights_size(config: Any, format: str) -> int:
    """Bytes of a model's weights in bfloat16, or with its experts in MXFP4 (4.25 bits per weight)."""
    return int(sum(shape.numel() * (4.25 if format == "mxfp4" and EXPERT_WEIGHTS.search(name) else 16) / 8
                   for name, shape in parameter_shapes(config).items()))  # fmt: skip


def check_merge(base: str, config: Any, format: str, folder: Path) -> None:
    """Raise UsageError if the model has no such format, or if memory or disk are too small.

    `config` is the model's transformers config.  Memory is RAM: merging runs on the CPU.
    """
    packed = getattr(config, "quantization_config", None)
    if packed and packed["quant_method"] != "mxfp4":
        raise UsageError(f"{base} is quantized ({packed['quant_method']}): "
                         "name the model that it was made from with --base")  # fmt: skip
    if format == "mxfp4" and config.model_type != "gpt_oss":
        raise UsageError(f"mxfp4 is a format for gpt-oss, but {base} is {config.model_type}: use --format merged_16bit")
    written, whole = weights_size(config, format), weights_size(config, "merged_16bit")
    check_disk(folder, written, "choose another --output-dir")
    needed, available = 1.1 * whole + (written if format == "mxfp4" else 0), available_memory()
    if needed > available:
        raise UsageError(f"merging {base} needs {needed / 1e9:.0f} GB of RAM and {available / 1e9:.0f} GB are free: "
                         "use --format lora and merge on a larger machine")  # fmt: skip


def pack_experts(adapted: PeftModel) -> tuple[dict[str, torch.Tensor], float, float]:
    """The experts of an adapted model in MXFP4, by the names that transformers reads, and what the rounding costs.

    The cost is two numbers, both relative to the size of the adapter's change to the experts: how much of the change
    is left after rounding, and the size of the rounding error.
    """
    import torch
    from peft.tuners.lora.layer import ParamWrapper

    def plain(name: str) -> str:
        return name.removeprefix("base_model.model.").replace(".base_layer", "")

    changes = {f"{plain(name)}.{module.parameter_name}": partial(module.get_delta_weight, "default")
               for name, module in adapted.named_modules() if isinstance(module, ParamWrapper)}  # fmt: skip
    experts = {plain(name): weights.detach() for name, weights in adapted.named_parameters()
               if EXPERT_WEIGHTS.search(plain(name))}  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    packed: dict[str, torch.Tensor] = {}
    left = error = size = 0.0
    for name, weights in experts.items():  # (E, in, out)
        parts = []
        for expert, change in zip(weights, changes[name]() if name in changes else 0 * weights, strict=True):
            expert, change = expert.to(device).float(), change.detach().to(device).float()  # (in, out)
            parts.append(quantize_mxfp4(expert + change))
            moved = dequantize_mxfp4(*parts[-1]) - expert
            left += (moved * change).sum().item()
            error += (moved - change).square().sum().item()
            size += change.square().sum().item()
        for part, tensors in zip(("blocks", "scales"), zip(*parts, strict=True), strict=True):
            packed[f"{name}_{part}"] = torch.stack(tensors).cpu()
    return packed, left / (size or 1.0), math.sqrt(error / (size or 1.0))


def merge_adapter(adapter: Path, base: str, format: str, folder: Path, say: Callable[[str], None]) -> None:
    """Write the model with an adapter merged into it, in bfloat16 or with its experts in MXFP4.

    Raises UsageError, see `check_merge`.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()
    config = AutoConfig.from_pretrained(base)
    check_merge(base, config, format, folder)
    say(f"loading {base}")
    unpacked = Mxfp4Config(dequantize=True) if getattr(config, "quantization_config", None) else None
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", quantization_config=unpacked)
    say("merging the adapter")
    adapted = PeftModel.from_pretrained(model, adapter)
    if format == "mxfp4":
        say("rounding the experts to four bits")
        experts, left, error = pack_experts(adapted)
        say(f"on average rounding keeps {left:.0%} of the adapter's change to the experts; a single weight is off by "
            f"{error:.1f} times what the adapter changed it by (root mean square)")  # fmt: skip
    model = adapted.merge_and_unload().to(torch.bfloat16)
    weights = model.state_dict()
    if format == "mxfp4":
        weights = {name: tensor for name, tensor in weights.items() if not EXPERT_WEIGHTS.search(name)} | experts
        model.config.quantization_config = MXFP4_CONFIG
    model.hf_quantizer = None  # it describes the weights as they were loaded
    # With save_original_format, transformers leaves out the experts of a gpt-oss that was unpacked.
    model.save_pretrained(folder, state_dict=weights, save_original_format=config.model_type != "gpt_oss")


# ---------------------------------------------------------------------------------------------------------------------
# Model card

MODEL_CARD = """\
---
library_name: {library}
pipeline_tag: text-generation
tags: [grpo, "2048"]{base}
---

# {name} playing 2048

{kind}, trained with GRPO. It answers a prompt with a Python function that plays the game 2048. Run its code only where
it can do no harm, for example in the jail of gpt_2048_rl.py.
{results}
```python
from {library} import {loader}
from transformers import AutoTokenizer

model = {loader}.from_pretrained(FOLDER, dtype="auto", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
```

`python gpt_2048_rl.py eval FOLDER` shows it at work.
{config}"""


def results_table(result: Mapping[str, Any]) -> str:
    """The results of a run in Markdown, a table for each stage."""
    text = ""
    for stage, played in read_scores(result).items():
        text += (f"\n| held-out boards, {stage} | made {played.target} | 95% interval | median tile | games |\n"
                 "|---|---|---|---|---|\n")  # fmt: skip
        for name, score in played.scores.items():
            text += (f"| {name} | {score.won:.0%} | {score.won_low:.0%} to {score.won_high:.0%} "
                     f"| {score.largest_tile_median:.0f} | {score.games} |\n")  # fmt: skip
    return text


def model_card(base: str, format: str, run: Path) -> str:
    """README.md of an export: what it is, the run's results, how to load it, and the run's config with its seed."""
    config, result = read_json(run / "config.json"), read_json(run / "result.json")
    config.pop("output_dir", None)  # a path on this machine
    settings = json.dumps(config, indent=2)
    library, loader, kind = {
        "lora": ("peft", "AutoPeftModelForCausalLM", "A LoRA adapter"),
        "merged_16bit": ("transformers", "AutoModelForCausalLM", "The whole model in bfloat16"),
        "mxfp4": ("transformers", "AutoModelForCausalLM", "The whole model with its experts in MXFP4"),
    }[format]
    return MODEL_CARD.format(
        library=library, loader=loader, kind=kind, results=results_table(result),
        base="" if Path(base).is_dir() else f"\nbase_model: {base}",
        name="The embedded model" if tiny.layout_of(Path(base)) else Path(base).name,
        config=f"\nThe run's config:\n\n```json\n{settings}\n```\n" if config else "",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Upload


def check_token() -> None:
    """Raise UsageError if this machine cannot upload to the hub."""
    from huggingface_hub import HfApi

    try:
        HfApi().whoami()
    except Exception as error:  # no token, a wrong one, or no network
        raise UsageError(f"cannot log in to the hub ({error}): set HF_TOKEN or run hf auth login") from None


def upload(folder: Path, repository: str, private: bool) -> None:
    """Upload a folder to the hub.  Raises UsageError."""
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(repository, private=private, exist_ok=True)
        HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message="Trained by gpt_2048_rl.py")
    except Exception as error:
        raise UsageError(f"cannot upload to {repository} ({error}): {folder} is complete, use hf upload") from None


# ---------------------------------------------------------------------------------------------------------------------
# Command


def find_adapter(source: Path) -> Path:
    """The folder of the adapter in a run's folder, a checkpoint or an adapter's folder.  Raises UsageError."""
    for folder in (source / "adapter", source):
        if (folder / "adapter_model.safetensors").is_file():
            return folder
    kept = checkpoints(source)
    instead = f"export {kept[0]}" if kept else "name a run's folder, a checkpoint or an adapter's folder"
    raise UsageError(f"{source} holds no adapter: {instead}")


def find_run(source: Path) -> Path:
    """The run's folder that a source is, or lies in; the source itself if there is no run."""
    return next((folder for folder in (source, source.parent) if (folder / "config.json").is_file()
                 and "recipe" in read_json(folder / "config.json")), source)  # fmt: skip


def write_export(source: Path, adapter: Path, base: str, format: str, folder: Path, say: Callable[[str], None]) -> None:
    """Write an export next to its final place and then rename it, so the folder is never incomplete."""
    from transformers import AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder.parent) as scratch:
        made, lora = Path(scratch) / "made", Path(scratch) / "lora"
        lora.mkdir()
        write_adapter(adapter, base, lora)
        AutoTokenizer.from_pretrained(adapter).save_pretrained(lora)
        if format == "lora":
            lora.rename(made)
        else:
            merge_adapter(lora, base, format, made, say)
            for file in [file for file in lora.iterdir() if not file.name.startswith("adapter_")]:
                shutil.copy(file, made)  # the tokenizer
        (made / "README.md").write_text(model_card(base, format, find_run(source)), encoding="utf-8")
        keep_config(find_run(source), made)
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        made.rename(folder)


def export(config: ExportConfig, console: Console, task: Callable[[str], tiny.Task]) -> dict[str, Any]:
    """The export command.  Returns what --json prints.

    `task` returns the embedded model's task for a keyboard layout.
    """
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    if config.push_to_hub and not re.fullmatch(r"[\w.-]+/[\w.-]+", config.push_to_hub):
        raise UsageError(f"--push-to-hub must be OWNER/NAME, not {config.push_to_hub!r}")
    adapter = find_adapter(config.source)
    folder = config.output_dir or find_run(config.source) / "export" / config.format
    if config.output_dir and folder.exists():
        raise UsageError(f"{folder} already exists: choose another --output-dir")
    base = config.base or full_precision(str(adapter_base(str(adapter))))
    if layout := tiny.layout_of(Path(base)):
        tiny.warm_start(task(layout), progress=tiny.every_tenth(say))  # it may have left the cache
    else:
        check_model(base, "none")
    if config.format != "lora":
        check_download(base)
    if config.push_to_hub:
        check_token()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT imports it, and it misses kernels that we need not
    say("loading torch and transformers")
    from safetensors import SafetensorError

    try:
        write_export(config.source, adapter, base, config.format, folder, say)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{folder} cannot be written ({reason}): choose another --output-dir") from None
    except SafetensorError as error:
        raise UsageError(f"weights of {adapter} or of {base} are damaged ({error}): export a checkpoint") from None
    say(f"{config.format} of {config.source} is in {folder}")
    if config.push_to_hub:
        say(f"uploading to {config.push_to_hub}")
        upload(folder, config.push_to_hub, config.private)
    return {"format": config.format, "base": base, "folder": str(folder), "hub": config.push_to_hub or None}
