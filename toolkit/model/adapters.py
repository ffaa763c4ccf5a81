"""Adapters: from which a run begins; and in the layouts that other programs read, like experts in MXFP4.

MXFP4: groups of 32 weights with a common power of two, each weight rounded to four bits.

Shapes: E experts of a layer, `in` and `out` the sides of a matrix, r the rank of an adapter.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit import UsageError, checked
from toolkit.base.files import check_links, check_whole, naming, read_json

if TYPE_CHECKING:
    import torch

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # an adapter's files
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

    config = read_json(source / CONFIG)
    weights = load_file(source / WEIGHTS)
    fused = fuse_expert_adapters(weights)
    if fused.keys() != weights.keys():
        config["target_modules"] = sorted({key.split(".")[-3] for key in fused if ".experts." not in key})
        config["target_parameters"] = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    # Unsloth's notes describe the layout of the source.  With its auto_mapping but without these notes, unsloth would
    # take the weights for its layout of before September 2026 and repack them.
    for note in ("lora_B_layout", "unsloth_fused_expert_lora"):
        config.pop(note, None)
    config |= {"base_model_name_or_path": base, "auto_mapping": None}
    save_file(fused, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------------
# Beginning from an adapter

# What may differ in the configs of adapters that compute the same.  Unsloth writes the layers in several ways, and the
# names of the weights say which they are.  All else decides how weights are used.
NOTES = {"base_model_name_or_path", "revision", "peft_version", "auto_mapping", "inference_mode", "target_modules",
         "target_parameters", "exclude_modules"}  # fmt: skip


def decided_options(name: str) -> dict[str, Any]:
    """The options of training that an adapter has decided; none for a model."""
    if not (config := read_json(Path(name, CONFIG))):
        return {}
    with naming(Path(name, CONFIG)):
        experts = config.get("target_parameters") or "gate_proj" in config["target_modules"]
        return {
            "lora_rank": checked(config["r"], int),
            "lora_alpha": checked(config["lora_alpha"], int),
            "adapt": "all" if experts else "attention",
        }


def check_adapter(folder: Path) -> None:
    """Raise UsageError for an adapter's folder with links, or that is not whole."""
    check_links(folder)
    check_whole(folder, WEIGHTS)


@contextlib.contextmanager
def holding(weights: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let parameters have other weights for a while.  In place, as an optimizer changes them."""
    import torch

    def put(values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)

    own = [parameter.detach().clone() for parameter in parameters]
    put(weights)
    try:
        yield
    finally:
        put(own)


def begin_from(model: Any, start: Path) -> None:
    """Give the new adapter of a model the weights of an older one.  Raises UsageError if they do not fit.

    From then on `disable_adapter` switches off only what the new one learns, so the older one is the untrained model,
    and gets the credit for what it could already do.
    """
    check_adapter(start)
    stored, made = read_json(start / CONFIG), model.peft_config["default"].to_dict()
    if other := [name for name in made.keys() - NOTES if stored.get(name, made[name]) != made[name]]:
        raise UsageError(f"{start} is no adapter like those made here: {', '.join(sorted(other))} differs")
    try:
        found = model.load_adapter(str(start), "default", is_trainable=True)
    except RuntimeError as error:
        raise UsageError(f"{start} does not fit the model: {str(error).partition(chr(10))[0]}") from None
    if found.missing_keys or found.unexpected_keys:
        raise UsageError(f"{start} does not fit the model: its weights have other names")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = [parameter.detach().clone() for parameter in parameters]
    model.disable_adapter = partial(holding, weights, parameters)
