"""Exports: the adapter or the whole model as folders that other programs load, compared with the trained model.

An export reads and writes files with transformers and PEFT, and never imports unsloth, whose own MXFP4 export installs
packages.  The MXFP4 rounding is ours (model/adapters.py), because transformers can only read the format unless it
downloads kernels.  llamacpp.py writes GGUF, verify.py compares.

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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from toolkit import UsageError, checked
from toolkit.base.cached_models import removing_leftovers
from toolkit.base.files import check_links, check_whole, naming, read_json
from toolkit.model import smollm2, tiny
from toolkit.model.adapters import WEIGHTS, dequantize_mxfp4, full_precision, quantize_mxfp4, write_adapter
from toolkit.model.loading import load_plain, load_tokenizer
from toolkit.model.machine import available_memory, library_versions, prepare_environment
from toolkit.model.memory import check_disk, check_download, download_size
from toolkit.model.models import adapter_base, check_model, config_of, parameter_shapes, reading_model
from toolkit.run.card import FORMATS, model_card
from toolkit.run.checkpoints import TRAINING, checkpoints, keep_config
from toolkit.serve import llamacpp, verify

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from rich.console import Console


@dataclass
class ExportConfig:
    """Write what a run has learned to a folder that other programs can load."""

    source: Path  # a run's folder, one of its checkpoints, or an adapter's folder
    # The adapter (lora, gguf_lora) or the whole model; mxfp4 for gpt-oss only, gguf for llama.cpp and with smollm2 too.
    format: Literal["lora", "merged_16bit", "mxfp4", "gguf", "gguf_lora"] = "lora"
    output_dir: Path | None = None  # default: export/FORMAT in the run's folder, where a new export replaces an old one
    base: str = ""  # model to merge the adapter into, also tiny or smollm2; default: the one it was trained on
    experts: Literal["q8_0", "mxfp4"] = "q8_0"  # a gguf's experts: 24 GB for gpt-oss-20b; mxfp4: 14 GB that keep less
    verify: bool = True  # compare the export with the trained model, where memory allows
    push_to_hub: str = ""  # also upload the folder to this hub repository: OWNER/NAME
    private: bool = True  # make a new hub repository private
    json: bool = False  # print one JSON object as the last line of stdout, and everything else to stderr

    def check(self) -> None:
        """Each option has something to decide."""
        if self.push_to_hub and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.push_to_hub):
            raise UsageError(f"--push-to-hub must be OWNER/NAME, not {self.push_to_hub!r}")
        if not self.private and not self.push_to_hub:
            raise UsageError("--no-private needs --push-to-hub: nothing else is uploaded")
        if self.experts != ExportConfig.experts and self.format != "gguf":
            raise UsageError(f"--experts is for --format gguf, and {self.format} has no choice: leave it out")


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


# ---------------------------------------------------------------------------------------------------------------------
# Whole model


def experts_of(config: ExportConfig) -> str:
    """The format of an export's experts; "" for bfloat16."""
    return config.experts if config.format == "gguf" else "mxfp4" if config.format == "mxfp4" else ""


EXPERT_BITS = {"mxfp4": 4.25, "q8_0": 8.5}  # of a weight, with its share of a group's scale; all others have 16


def weights_size(config: Any, experts: str = "") -> float:
    """Bytes of a model's weights in bfloat16, or with its experts in a smaller format."""
    return sum(
        shape.numel() * (EXPERT_BITS.get(experts, 16) if EXPERT_WEIGHTS.search(name) else 16) / 8
        for name, shape in parameter_shapes(config).items()
    )


def check_base(base: str, config: Any, written: float, copied: float, folder: Path) -> None:
    """Raise UsageError if this machine has no room for the adapted model, `copied` bytes of it and `written` on disk.

    `config` is the base model's transformers config.  Memory is RAM: an export runs on the CPU.
    """
    packed = getattr(config, "quantization_config", None)
    if packed and packed["quant_method"] != "mxfp4":
        raise UsageError(
            f"{base} is quantized ({packed['quant_method']}): name the model that it was made from with --base"
        )
    check_disk(folder, written, "choose another --output-dir")
    needed, available = 1.1 * weights_size(config) + copied, available_memory()
    if needed > available:
        raise UsageError(
            f"holding {base} needs {needed / 1e9:.0f} GB of RAM and {available / 1e9:.0f} GB are free: "
            "use a larger machine, or the adapter (--format lora)"
        )


def load_base(base: str, say: Callable[[str], None]) -> Any:
    """The base model, in 16 bits or as it was trained."""
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()
    say(f"loading {base}")
    with reading_model(f"the weights of {base} cannot be read"):
        model, _ = load_plain(base, "auto")
    return model


def adapt(model: Any, base: str, adapter: Path) -> PeftModel:
    """The base model with its adapter, whose every matrix has to have its place there."""
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open

    try:
        adapted = PeftModel.from_pretrained(model, adapter, torch_device="cpu")
    except Exception as error:  # other names of layers, other shapes, or damaged
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
        raise UsageError(f"the adapter does not fit {base} ({reason}): name another --base") from None
    with safe_open(adapter / WEIGHTS, "pt") as file:
        placed = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        if any("lora_" in name for name in set(placed) ^ set(file.keys())):
            raise UsageError(f"the adapter does not fit {base} (other layers): name another --base")
    return adapted


def pack_experts(adapted: PeftModel) -> tuple[dict[str, torch.Tensor], float, float]:
    """The experts of an adapted model in MXFP4, by the names that transformers reads, and what the rounding costs.

    The cost is two numbers, both relative to the size of the adapter's change to the experts: how much of the change
    is left after rounding, and the size of the rounding error.
    """
    import torch
    from peft.tuners.lora.layer import ParamWrapper

    def plain(name: str) -> str:
        return name.removeprefix("base_model.model.").replace(".base_layer", "")

    changes = {
        f"{plain(name)}.{module.parameter_name}": partial(module.get_delta_weight, "default")
        for name, module in adapted.named_modules()
        if isinstance(module, ParamWrapper)
    }
    experts = {
        plain(name): weights.detach()
        for name, weights in adapted.named_parameters()
        if EXPERT_WEIGHTS.search(plain(name))
    }
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
    return next(
        (
            folder
            for folder in (source, source.parent)
            if (folder / "config.json").is_file() and "recipe" in read_json(folder / "config.json")
        ),
        source,
    )


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
        say(
            f"on average rounding keeps {left:.0%} of the adapter's change to the experts; a single weight is off by "
            f"{error:.1f} times what the adapter changed it by (root mean square)"
        )
    say("merging the adapter")
    model = adapted.merge_and_unload().to(torch.bfloat16)
    weights = model.state_dict()
    if packed:
        weights = {name: tensor for name, tensor in weights.items() if not EXPERT_WEIGHTS.search(name)} | packed
    asked = read_json(find_run(config.source) / "config.json") or read_json(config.source / TRAINING)
    with naming(config.source):
        temperature = checked(asked.get("temperature", 1.0), float)  # in training
    if config.format == "gguf":
        folder.mkdir()
        llamacpp.write_model(folder / "model.gguf", weights, model.config, tokenizer, experts)
        text = llamacpp.modelfile(tokenizer, temperature)
        (folder / "Modelfile").write_text(text, encoding="utf-8")
        return
    if packed:
        model.config.quantization_config = MXFP4_CONFIG
    model.hf_quantizer = None  # it describes the weights as they were loaded
    # The files of the base may name a temperature, top-k and top-p; programs sampled without them in training.
    model.generation_config.update(do_sample=True, temperature=temperature, top_k=0, top_p=1.0)
    # With save_original_format, transformers leaves out the experts of a gpt-oss that was unpacked.
    model.save_pretrained(folder, state_dict=weights, save_original_format=model.config.model_type != "gpt_oss")


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
        if (folder / WEIGHTS).is_file():
            return folder
    if not source.exists():
        raise UsageError(f"there is no folder {source}: name a run's folder, a checkpoint or an adapter's folder")
    kept = checkpoints(source)
    instead = f"export {kept[0]}" if kept else "name a run's folder, a checkpoint or an adapter's folder"
    raise UsageError(f"{source} holds no adapter: {instead}")


FAMILIES = {"mxfp4": ("gpt_oss",), "gguf": ("gpt_oss", "smollm2"), "gguf_lora": ("gpt_oss", "smollm2")}  # others: all


def check_export(config: ExportConfig, base: str, folder: Path, say: Callable[[str], None]) -> bool:
    """Raise UsageError if this machine cannot write an export.  Returns whether it can compare it, and says why not."""
    whole = config.format not in ("lora", "gguf_lora")
    if fitting := FAMILIES.get(config.format):
        family = "smollm2" if Path(base) == smollm2.folder() else config_of(base).model_type
        if family not in fitting:
            raise UsageError(
                f"{config.format} is a format for {' and '.join(fitting).replace('_', '-')}, but {base} is {family}: "
                f"use --format {'merged_16bit' if whole else 'lora'}"
            )
        if config.experts != ExportConfig.experts and family != "gpt_oss":
            raise UsageError(f"--experts is for a model with experts, and {family} has none: leave it out")
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

    if config.format == "lora":
        shutil.copytree(lora, made)
        return
    if config.format == "gguf_lora":
        made.mkdir()
        llamacpp.write_adapter(
            made / "adapter.gguf",
            load_file(lora / WEIGHTS),
            config_of(base),
            read_json(lora / "adapter_config.json"),
        )
    else:
        tokenizer = load_tokenizer(lora)
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
    return " with ".join(
        f"{name} {version}" for name, version in library_versions(names.get(format, ("transformers",))).items()
    )


def write_export(
    config: ExportConfig, adapter: Path, base: str, prompts: list[str], folder: Path, say: Callable[[str], None]
) -> verify.Agreement | None:
    """Write an export next to its final place and then rename it, so the folder is never incomplete.

    With `prompts` it is first compared with the trained model.  Raises UsageError if it differs, see `verify.report`.
    """
    run, this, found, report = find_run(config.source), FORMATS[config.format], None, ""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        removing_leftovers(folder.parent, ".export-*"),
        tempfile.TemporaryDirectory(prefix=".export-", dir=folder.parent) as scratch,
    ):
        made, lora = Path(scratch) / "made", Path(scratch) / "lora"
        lora.mkdir()
        write_adapter(adapter, base, lora)
        own = (adapter / "tokenizer_config.json").is_file()  # what a run began from has none
        tokenizer = load_tokenizer(adapter if own else base)
        tokenizer.save_pretrained(lora)
        for_transformers_4(lora)
        whole = config.format not in ("lora", "gguf_lora")
        adapted: Any = None
        try:
            adapted = load_base(base, say) if whole or prompts else None
        except UsageError as error:  # an adapter can be written without the base's weights
            if whole:
                raise
            say(f"the export is not verified: {error}")
        adapted = adapted and adapt(adapted, base, lora)
        answers = verify.reference(adapted, tokenizer, prompts) if adapted and prompts else []
        write_format(config, adapted, lora, base, made, say)
        adapted = None  # makes room
        if answers:
            say("comparing the export with the trained model")
            found = verify.compare(answers, served(config, made, base, Path(scratch)))
            report = verify.report(found, config.format, this.exact, this.instead)
            say(report)
            report = f"{serving_program(config.format)} ran it: {report}"
        card = model_card(base, config.format, run, report, last=adapter == run / "adapter")
        (made / "README.md").write_text(card, encoding="utf-8")
        keep_config(run, made)
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        made.rename(folder)
    return found


def export(config: ExportConfig, console: Console, spec: Callable[[str], tiny.GameSpec]) -> dict[str, Any]:
    """The export command.  Returns what --json prints.

    `spec` says of a keyboard layout what the embedded model has to know.
    """
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    prepare_environment(offline=False)
    if config.format.startswith("gguf"):
        llamacpp.check_installed()
    adapter, run = find_adapter(config.source), find_run(config.source)
    for place in (run, adapter):  # an upload must hold nothing from elsewhere
        check_links(place)
    check_whole(adapter)
    folder = config.output_dir or run / "export" / config.format
    if config.output_dir and folder.exists():
        raise UsageError(f"{folder} already exists: choose another --output-dir")
    own = adapter_base(str(adapter))
    base = config.base or full_precision(str(own))
    if base == "tiny" and not tiny.layout_of(own):
        raise UsageError(f"the adapter was made for {own}, which is not this version's tiny: leave out --base")
    base = {"tiny": str(own), "smollm2": str(smollm2.folder())}.get(base, base)
    layout = tiny.layout_of(Path(base))
    if layout:
        tiny.warm_start(spec(layout), progress=tiny.every_tenth(say))  # it may have left the cache
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
        with naming(run / "config.json"):
            known = spec(layout or read_json(run / "config.json").get("keys", "bepo"))
        prompts = verify.held_out_prompts(known) if check_export(config, base, folder, say) else []
        found = write_export(config, adapter, base, prompts, folder, say)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{folder} cannot be written ({reason}): choose another --output-dir") from None
    say(f"{config.format} of {config.source} is in {folder}")
    if config.push_to_hub:
        say(f"uploading to {config.push_to_hub}")
        upload(folder, config.push_to_hub, config.private)
    return {
        "format": config.format,
        "base": base,
        "folder": str(folder),
        "hub": config.push_to_hub or None,
        "verified": asdict(found) if found else None,
    }
