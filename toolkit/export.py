"""Exports: the adapter or the whole model as folders that other programs load, compared with the trained model.

An export reads and writes files with transformers and PEFT, and never imports unsloth, whose own MXFP4 export installs
packages.  The MXFP4 rounding is written here, because transformers can only read the format unless it downloads
kernels.  llamacpp.py writes GGUF, verify.py compares.

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
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from toolkit import UsageError, llamacpp, smollm2, tiny, verify
from toolkit.evaluation import read_scores
from toolkit.machine import (
    OWN_CODE_ALONE,
    adapter_base,
    available_memory,
    check_disk,
    check_download,
    check_model,
    config_of,
    download_size,
    library_versions,
    load_plain,
    parameter_shapes,
)
from toolkit.runs import TRAINING, check_links, checkpoints, keep_config, read_json

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from rich.console import Console


@dataclass
class ExportConfig:
    """Write what a run has learned to a folder that other programs can load."""

    source: Path  # a run's folder, one of its checkpoints, or an adapter's folder
    format: Literal["lora", "merged_16bit", "mxfp4", "gguf", "gguf_lora"] = "lora"  # the adapter (lora, gguf_lora) or
    # the whole model; mxfp4 and gguf for gpt-oss only, gguf for llama.cpp
    output_dir: Path | None = None  # default: export/FORMAT in the run's folder, where a new export replaces an old one
    base: str = ""  # model to merge the adapter into; default: the one it was trained on
    experts: Literal["q8_0", "mxfp4"] = "q8_0"  # a gguf's experts: 24 GB for gpt-oss-20b; mxfp4: 14 GB that keep less
    verify: bool = True  # compare the export with the trained model, where memory allows
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


def experts_of(config: ExportConfig) -> str:
    """The format of an export's experts; "" for bfloat16."""
    return config.experts if config.format == "gguf" else "mxfp4" if config.format == "mxfp4" else ""


EXPERT_BITS = {"mxfp4": 4.25, "q8_0": 8.5}  # of a weight, with its share of a group's scale; all others have 16


def weights_size(config: Any, experts: str = "") -> float:
    """Bytes of a model's weights in bfloat16, or with its experts in a smaller format."""
    return sum(shape.numel() * (EXPERT_BITS.get(experts, 16) if EXPERT_WEIGHTS.search(name) else 16) / 8
               for name, shape in parameter_shapes(config).items())  # fmt: skip


def check_base(base: str, config: Any, written: float, copied: float, folder: Path) -> None:
    """Raise UsageError if this machine has no room for the adapted model, `copied` bytes of it and `written` on disk.

    `config` is the base model's transformers config.  Memory is RAM: an export runs on the CPU.
    """
    packed = getattr(config, "quantization_config", None)
    if packed and packed["quant_method"] != "mxfp4":
        raise UsageError(f"{base} is quantized ({packed['quant_method']}): "
                         "name the model that it was made from with --base")  # fmt: skip
    check_disk(folder, written, "choose another --output-dir")
    needed, available = 1.1 * weights_size(config) + copied, available_memory()
    if needed > available:
        raise UsageError(f"holding {base} needs {needed / 1e9:.0f} GB of RAM and {available / 1e9:.0f} GB are free: "
                         "use a larger machine, or the adapter (--format lora)")  # fmt: skip


def load_adapted(base: str, adapter: Path, say: Callable[[str], None]) -> PeftModel:
    """The base model, in 16 bits or as it was trained, with its adapter."""
    from peft import PeftModel
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()
    say(f"loading {base}")
    try:
        model, _ = load_plain(base, "auto")
    except OSError as error:
        raise UsageError(f"the weights of {base} cannot be read: {str(error).partition(chr(10))[0]}") from None
    return PeftModel.from_pretrained(model, adapter)


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


def find_run(source: Path) -> Path:
    """The run's folder that a source is, or lies in; the source itself if there is no run."""
    return next((folder for folder in (source, source.parent) if (folder / "config.json").is_file()
                 and "recipe" in read_json(folder / "config.json")), source)  # fmt: skip


def for_transformers_4(folder: Path) -> None:
    """Let transformers 4 read a folder that transformers 5 wrote.

    It does not know the tokenizer's new class name and list of tokens.  It looks for `rope_theta` and `rope_scaling`,
    and without them takes its defaults without a word.  transformers 5 reads these names too.
    """

    def rewrite(name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        if found := read_json(folder / name):
            (folder / name).write_text(json.dumps(change(found), indent=2) + "\n", encoding="utf-8")

    def tokenizer(found: dict[str, Any]) -> dict[str, Any]:
        if found.get("tokenizer_class") == "TokenizersBackend":
            found["tokenizer_class"] = "PreTrainedTokenizerFast"  # there with token_type_ids, which `generate` refuses
            found.setdefault("model_input_names", ["input_ids", "attention_mask"])
        if isinstance(found.get("extra_special_tokens"), list):
            found["additional_special_tokens"] = found.pop("extra_special_tokens")
        return found

    def model(found: dict[str, Any]) -> dict[str, Any]:
        rope = dict(found.get("rope_parameters") or {})
        if "rope_theta" not in rope:  # none, or one for each kind of layer
            return found
        found |= {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
        return found | {"rope_scaling": rope if rope.get("rope_type", "default") != "default" else None}

    rewrite("tokenizer_config.json", tokenizer)
    rewrite("config.json", model)


def write_merged(
    adapted: PeftModel, tokenizer: Any, config: ExportConfig, folder: Path, say: Callable[[str], None]
) -> None:
    """Write a model with its adapter merged into it: in bfloat16, with its experts in MXFP4, or as GGUF."""
    import torch

    experts, packed = experts_of(config), dict[str, torch.Tensor]()
    if experts == "mxfp4":
        say("rounding the experts to four bits")
        packed, left, error = pack_experts(adapted)
        say(f"on average rounding keeps {left:.0%} of the adapter's change to the experts; a single weight is off by "
            f"{error:.1f} times what the adapter changed it by (root mean square)")  # fmt: skip
    say("merging the adapter")
    model = adapted.merge_and_unload().to(torch.bfloat16)
    weights = model.state_dict()
    if packed:
        weights = {name: tensor for name, tensor in weights.items() if not EXPERT_WEIGHTS.search(name)} | packed
    if config.format == "gguf":
        folder.mkdir()
        llamacpp.write_model(folder / "model.gguf", weights, model.config, tokenizer, experts)
        (folder / "Modelfile").write_text(llamacpp.modelfile(tokenizer), encoding="utf-8")
        return
    if packed:
        model.config.quantization_config = MXFP4_CONFIG
    model.hf_quantizer = None  # it describes the weights as they were loaded
    # The files of the base may name a temperature, top-k and top-p; programs sampled without them in training.
    asked = read_json(find_run(config.source) / "config.json") or read_json(config.source / TRAINING)
    model.generation_config.update(do_sample=True, temperature=asked.get("temperature", 1.0), top_k=0, top_p=1.0)
    # With save_original_format, transformers leaves out the experts of a gpt-oss that was unpacked.
    model.save_pretrained(folder, state_dict=weights, save_original_format=model.config.model_type != "gpt_oss")


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
{results}{verified}
{use}{config}"""
LOAD = """\
```python
from {library} import {loader}
from transformers import AutoTokenizer

model = {loader}.from_pretrained(FOLDER, dtype="auto", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
```

`python gpt_2048_rl.py eval FOLDER` shows it at work.
"""
LLAMACPP = """\
```
llama-server -m model.gguf --jinja
ollama create player -f Modelfile && ollama run player
```
"""
LLAMACPP_ADAPTER = """\
```
llama-server -m gpt-oss-20b-mxfp4.gguf --lora adapter.gguf --jinja --chat-template-file chat_template.jinja
```
"""


@dataclass(frozen=True)
class Format:
    """What there is to say about a format."""

    kind: str
    library: str
    use: str  # how to load it, in Markdown
    exact: bool = False  # loses nothing, so verification requires it
    instead: str = ""  # what keeps what it loses


PEFT = LOAD.format(library="peft", loader="AutoPeftModelForCausalLM")
TRANSFORMERS = LOAD.format(library="transformers", loader="AutoModelForCausalLM")
FORMATS = {
    "lora": Format("A LoRA adapter", "peft", PEFT, exact=True),
    "merged_16bit": Format("The whole model in bfloat16", "transformers", TRANSFORMERS, exact=True),
    "mxfp4": Format("The whole model with its experts in MXFP4", "transformers", TRANSFORMERS,
                    instead="--format merged_16bit"),
    "gguf": Format("The whole model for llama.cpp and Ollama", "gguf", LLAMACPP,
                   instead="--experts q8_0 or --format gguf_lora"),
    "gguf_lora": Format("A LoRA adapter for llama.cpp", "gguf", LLAMACPP_ADAPTER, instead="--format lora"),
}  # fmt: skip


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


def model_card(base: str, format: str, run: Path, verified: str = "") -> str:
    """README.md of an export: what it is, the run's results, how to load it, and the run's config with its seed."""
    config, result = read_json(run / "config.json"), read_json(run / "result.json")
    config.pop("output_dir", None)  # a path on this machine
    settings, this = json.dumps(config, indent=2), FORMATS[format]
    return MODEL_CARD.format(
        library=this.library, kind=this.kind, use=this.use, results=results_table(result),
        verified=(f"\nCompared with the model as trained, on held-out prompts. {verified}.\n" if verified else
                  "\nIt was not compared with the model as trained.\n"),
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


def check_export(config: ExportConfig, base: str, folder: Path, say: Callable[[str], None]) -> bool:
    """Raise UsageError if this machine cannot write an export.  Returns whether it can compare it, and says why not."""
    whole = config.format not in ("lora", "gguf_lora")
    if config.format not in ("lora", "merged_16bit") and (
        family := config_of(base).model_type) != "gpt_oss":  # fmt: skip
        raise UsageError(f"{config.format} is a format for gpt-oss, but {base} is {family}: use --format "
                         f"{'merged_16bit' if whole else 'lora'}")  # fmt: skip
    if not whole and not config.verify:
        return False
    try:
        if not whole and download_size(base):
            raise UsageError(f"the weights of {base} are not on this machine")
        known = config_of(base)
        written = weights_size(known, experts_of(config)) if config.format != "lora" else 0
        check_base(base, known, written, written if config.format != "merged_16bit" else 0, folder)
    except (OSError, UsageError) as error:
        if whole:
            raise
        say(f"the export is not verified: {error}")
        return False
    return config.verify


def write_format(
    config: ExportConfig, adapted: Any, lora: Path, base: str, made: Path, say: Callable[[str], None]
) -> None:
    """Write the files of a format.  `lora` holds the adapter in the released layout, and the tokenizer."""
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    if config.format == "lora":
        shutil.copytree(lora, made)
        return
    if config.format == "gguf_lora":
        made.mkdir()
        llamacpp.write_adapter(made / "adapter.gguf", load_file(lora / "adapter_model.safetensors"),
                               config_of(base), read_json(lora / "adapter_config.json"))  # fmt: skip
    else:
        tokenizer = AutoTokenizer.from_pretrained(lora, **OWN_CODE_ALONE)
        write_merged(adapted, tokenizer, config, made, say)
    for file in [file for file in lora.iterdir() if not file.name.startswith("adapter_")]:
        shutil.copy(file, made)  # the tokenizer
    for_transformers_4(made)


def served(config: ExportConfig, made: Path, base: str, scratch: Path) -> verify.Logits:
    """The logits of an export, by the program that will serve it."""
    if config.format == "gguf":
        return llamacpp.served_by_llamacpp(made / "model.gguf")
    if config.format != "gguf_lora":
        return verify.served_by_transformers(made, base)
    model, tokenizer = load_plain(base, "auto")
    llamacpp.write_model(scratch / "base.gguf", model.state_dict(), model.config, tokenizer, "bf16")  # MXFP4 fits in it
    return llamacpp.served_by_llamacpp(scratch / "base.gguf", made / "adapter.gguf")


def serving_program(format: str) -> str:
    """The program that `served` asks, with its version."""
    names = {"lora": ("transformers", "peft"), "gguf": ("llama-cpp-python",), "gguf_lora": ("llama-cpp-python",)}
    return " with ".join(f"{name} {version}" for name, version in
                         library_versions(names.get(format, ("transformers",))).items())  # fmt: skip


def write_export(
    config: ExportConfig, adapter: Path, base: str, prompts: list[str], folder: Path, say: Callable[[str], None]
) -> verify.Agreement | None:
    """Write an export next to its final place and then rename it, so the folder is never incomplete.

    With `prompts` it is first compared with the trained model.  Raises UsageError if it differs, see `verify.report`.
    """
    from transformers import AutoTokenizer

    run, this, found, report = find_run(config.source), FORMATS[config.format], None, ""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder.parent) as scratch:
        made, lora = Path(scratch) / "made", Path(scratch) / "lora"
        lora.mkdir()
        write_adapter(adapter, base, lora)
        tokenizer = AutoTokenizer.from_pretrained(adapter, **OWN_CODE_ALONE)
        tokenizer.save_pretrained(lora)
        for_transformers_4(lora)
        whole = config.format not in ("lora", "gguf_lora")
        adapted: Any = None
        try:
            adapted = load_adapted(base, lora, say) if whole or prompts else None
        except UsageError as error:  # an adapter can be written without the base's weights
            if whole:
                raise
            say(f"the export is not verified: {error}")
        answers = verify.reference(adapted, tokenizer, prompts) if adapted and prompts else []
        write_format(config, adapted, lora, base, made, say)
        adapted = None  # makes room
        if answers:
            say("comparing the export with the trained model")
            found = verify.compare(answers, served(config, made, base, Path(scratch)))
            report = verify.report(found, config.format, this.exact, this.instead)
            say(report)
            report = f"{serving_program(config.format)} ran it: {report}"
        (made / "README.md").write_text(model_card(base, config.format, run, report), encoding="utf-8")
        keep_config(run, made)
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        made.rename(folder)
    return found


def export(config: ExportConfig, console: Console, task: Callable[[str], tiny.Task]) -> dict[str, Any]:
    """The export command.  Returns what --json prints.

    `task` returns the embedded model's task for a keyboard layout.
    """
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    if config.push_to_hub and not re.fullmatch(r"[\w.-]+/[\w.-]+", config.push_to_hub):
        raise UsageError(f"--push-to-hub must be OWNER/NAME, not {config.push_to_hub!r}")
    if config.format.startswith("gguf"):
        llamacpp.check_installed()
    adapter, run = find_adapter(config.source), find_run(config.source)
    for place in (run, adapter):  # an upload must hold nothing from elsewhere
        check_links(place)
    folder = config.output_dir or run / "export" / config.format
    if config.output_dir and folder.exists():
        raise UsageError(f"{folder} already exists: choose another --output-dir")
    base = config.base or full_precision(str(adapter_base(str(adapter))))
    layout = tiny.layout_of(Path(base))
    if layout:
        tiny.warm_start(task(layout), progress=tiny.every_tenth(say))  # it may have left the cache
    elif Path(base) == smollm2.folder():
        smollm2.converted(say)
    else:
        check_model(base, "none")
    if config.format not in ("lora", "gguf_lora"):
        check_download(base)
    if config.push_to_hub:
        check_token()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT imports it, and it misses kernels that we need not
    say("loading torch and transformers")
    from safetensors import SafetensorError

    try:
        known = task(layout or read_json(run / "config.json").get("keys", "bepo"))
        prompts = verify.held_out_prompts(known) if check_export(config, base, folder, say) else []
        found = write_export(config, adapter, base, prompts, folder, say)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{folder} cannot be written ({reason}): choose another --output-dir") from None
    except SafetensorError as error:
        raise UsageError(f"weights of {adapter} or of {base} are damaged ({error}): export a checkpoint") from None
    say(f"{config.format} of {config.source} is in {folder}")
    if config.push_to_hub:
        say(f"uploading to {config.push_to_hub}")
        upload(folder, config.push_to_hub, config.private)
    return {"format": config.format, "base": base, "folder": str(folder), "hub": config.push_to_hub or None,
            "verified": asdict(found) if found else None}  # fmt: skip
