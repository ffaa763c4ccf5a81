"""gpt-oss checkpoints in the three forms that users load, made of any weights: for benchmarks and tests.

- bf16: as `unsloth/gpt-oss-20b-BF16`.
- mxfp4: as `openai/gpt-oss-20b`, the experts packed.  Training's default loads this one.
- nf4: as `unsloth/gpt-oss-20b-unsloth-bnb-4bit`, a 4-bit layer for each projection of each expert, and attention in 4
  bits.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from toolkit.model import adapters
from toolkit.serve import export

if TYPE_CHECKING:
    import torch

FORMS: dict[str, dict[str, Any] | None] = {  # quantization_config by form
    "bf16": None,
    "mxfp4": export.MXFP4_CONFIG,
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_use_double_quant": True,
            "llm_int8_skip_modules": ["router", "lm_head", "embed_tokens"]},
}  # fmt: skip


def nf4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A weight (out, in) of a linear layer in 4 bits, with what bitsandbytes needs to read it."""
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(weight.contiguous(), quant_type="nf4", compress_statistics=True)
    return {name: packed} | {f"{name}.{part}": value for part, value in state.as_dict(packed=True).items()}


def stored(name: str, weight: torch.Tensor, form: str) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint of a form holds for one bfloat16 parameter of transformers' model."""
    import torch

    experts, _, projection = name.rpartition(".")
    is_expert = bool(export.EXPERT_WEIGHTS.search(name))  # (E, in, out)
    if form == "mxfp4" and is_expert:
        packed = zip(*map(adapters.quantize_mxfp4, weight), strict=True)
        return {
            f"{name}_{part}": torch.stack(tensors) for part, tensors in zip(("blocks", "scales"), packed, strict=True)
        }
    if form != "nf4":
        return {name: weight}
    if is_expert:
        layers = (nf4(f"{experts}.{projection}s.{expert}.weight", matrix.T) for expert, matrix in enumerate(weight))
        return {key: tensor for layer in layers for key, tensor in layer.items()}
    if projection.endswith("_proj_bias"):  # (E, out)
        layer = f"{experts}.{projection.removesuffix('_bias')}s"
        return {f"{layer}.{expert}.bias": bias.clone() for expert, bias in enumerate(weight)}
    if "self_attn" in name and name.endswith("proj.weight"):
        return nf4(name, weight)
    return {name.replace(".router.", ".router.linear."): weight}
