"""What a model's name stands for, and what is known of the model before its weights are loaded.

A model is refused in one line.  Its checks run in the order of their cost: names, files and chat templates before
libraries are imported, layers before weights are read.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Container, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from toolkit import UsageError
from toolkit.base.files import check_whole, naming, read_json
from toolkit.model import machine, smollm2
from toolkit.model.tiny import POSITIONS, layout_of

if TYPE_CHECKING:
    import torch

# ---------------------------------------------------------------------------------------------------------------------
# Names


def resolve_model(name: str) -> str:
    """What a model's name stands for: "auto" for this machine's default, a run's folder for its adapter.

    Links are followed, because `latest` soon names another run.
    """
    if name != "auto":
        folder = Path(name, "adapter") if Path(name, "adapter").is_dir() else Path(name)
        if not folder.is_dir():
            return name
        return str(folder if folder.resolve() == folder.absolute() else folder.resolve())
    return "unsloth/gpt-oss-20b" if machine.gpu_is_there() else "tiny"


def adapter_base(name: str) -> Path | None:
    """The base model of an adapter's folder; None if the folder holds no adapter."""
    base = read_json(file := Path(name) / "adapter_config.json").get("base_model_name_or_path")
    with naming(file):
        return Path(base) if base else None


def base_of(name: str) -> str:
    """The model that an adapter was trained on, by the name that people give it; any other model's own name."""
    base = adapter_base(name)
    return "tiny" if layout_of(base) else "smollm2" if base == smollm2.folder() else str(base or name)


def is_embedded(name: str) -> bool:
    """Whether a model is the embedded one, or an adapter to it."""
    return base_of(name) == "tiny"


MADE_HERE = {"tiny": POSITIONS, "smollm2": smollm2.POSITIONS}  # models made on this machine, and their positions


def positions_of(name: str, unknown: int) -> int:
    """How many tokens a model made here or a folder's model takes, prompt and completion; `unknown` of any other."""
    base = base_of(name)
    with naming(file := Path(base, "config.json")):
        return int(MADE_HERE.get(base) or read_json(file).get("max_position_embeddings") or unknown)


# ---------------------------------------------------------------------------------------------------------------------
# Forms


def default_loader(name: str) -> Literal["unsloth", "transformers"]:
    """Unsloth's kernels are for GPUs.  On a CPU, models that transformers loads are sped up (cpu_speed.py)."""
    return "unsloth" if machine.gpu_is_there() or is_embedded(name) else "transformers"


def uses_transformers(config: object, name: str = "") -> bool:
    """Whether a model is loaded by transformers alone, without Unsloth.  Unnamed, it is one on a GPU."""
    default = default_loader(name) if name else "unsloth"
    return (getattr(config, "loader", "") or default) == "transformers"


def stays_as_stored(name: str) -> bool:
    """Whether a model must not be loaded in 4 bits.

    The embedded model is too small for it.  Adapters to fused experts do not fit the 4-bit form, which splits experts.
    """
    return name == "tiny" or bool(read_json(Path(name) / "adapter_config.json").get("target_parameters"))


def is_in_mxfp4(name: str) -> bool:
    """Whether a model's experts are stored in MXFP4, as gpt-oss is published.  An adapter can be to another form."""
    if adapter_base(name):
        return False
    config = read_json(Path(name) / "config.json")
    if config:
        return bool((config.get("quantization_config") or {}).get("quant_method") == "mxfp4")
    return Path(name).name.lower() in ("gpt-oss-20b", "gpt-oss-120b")


# ---------------------------------------------------------------------------------------------------------------------
# Files, of a folder or of the hub


def instruct_variant(name: str) -> str:
    """The name that a base model's instruct variant most likely has."""
    for ending, instead in (("-Base", ""), ("-base", ""), ("-pt", "-it")):
        if name.endswith(ending):
            return name.removesuffix(ending) + instead
    return f"{name}-Instruct"


def check_template(name: str, files: Container[str], read: Callable[[str], Path | str]) -> None:
    """Raise UsageError for a model without a chat template.

    `files` has the names of the model's files; `read` fetches one of them and returns its path.
    """
    if "chat_template.jinja" in files or "chat_template.json" in files or "tokenizer_config.json" not in files:
        return
    if not read_json(Path(read("tokenizer_config.json"))).get("chat_template"):
        instead = "take its instruct variant" if Path(name).is_dir() else f"try {instruct_variant(name)}"
        raise UsageError(f"{name} has no chat template, so it cannot chat: {instead}")


def check_files(folder: Path) -> None:
    """Raise UsageError for a folder that holds no whole model."""
    if "model_type" not in read_json(folder / "config.json"):
        if (folder / "origin.json").exists():
            raise UsageError(f"{folder} is a run without its adapter: name one of its checkpoints, or resume it")
        raise UsageError(f"{folder} holds no model: it needs a model's config.json or an adapter_config.json")
    files = {file.name for file in folder.iterdir()}
    if not files & {"tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"}:
        raise UsageError(f"{folder} holds a model without its tokenizer: put the tokenizer's files beside it")
    if not any(file.endswith((".safetensors", ".bin")) for file in files):
        raise UsageError(f"{folder} holds a model without its weights: put model.safetensors beside its config.json")
    check_template(str(folder), files, folder.joinpath)


def check_hub(name: str) -> None:
    """Raise UsageError if the hub does not have a model or does not give it.

    Without a connection a cached model is used, and the rest of the process stays offline.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        info = HfApi().model_info(name, timeout=10)
        check_template(name, {file.rfilename for file in info.siblings or ()}, partial(hf_hub_download, name))
    except UsageError:
        raise
    except HFValidationError:
        raise UsageError(f"{name} is no hub id like unsloth/gpt-oss-20b") from None
    except GatedRepoError:
        raise UsageError(f"{name} is gated: accept its licence on its page, then set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise UsageError(f"the hub has no model {name!r}, or it is private: check the name, or set HF_TOKEN") from None
    except Exception:  # the network stack raises errors of many libraries
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            raise UsageError(f"the hub cannot be reached for {name!r}: go online, or name a local folder") from None
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True


def check_model(name: str, reasoning: str, tokens: int = 0) -> None:
    """Raise UsageError for a model that is not there or cannot be used like this, before anything expensive starts.

    `tokens` is the longest prompt with its completion.
    """
    folder, base = Path(name), adapter_base(name)
    if reasoning != "none" and is_embedded(name):
        raise UsageError("the embedded model cannot reason: use --reasoning none")
    if name == "smollm2":
        smollm2.check_installed()
    if tokens > (positions := positions_of(name, tokens)):
        raise UsageError(
            f"prompt and completion may take {tokens} tokens, and {name} has {positions} positions: lower "
            "--max-new-tokens"
        )
    if folder.is_dir():
        if base is None:
            check_files(folder)
        kept = (layout_of(base), base == smollm2.folder())  # are made again
        if base and base.is_absolute() and not base.exists() and not any(kept):
            raise UsageError(f"{name} is an adapter to {base}, which does not exist any more: put that model back")
        old_format = (folder / "adapter_model.bin").is_file()
        check_whole(folder, *(["adapter_model.safetensors"] if base and not old_format else []))
        if base and base.is_dir() and not any(kept):
            check_whole(base)
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        try:
            check_hub(name)
        except UsageError as error:
            raise UsageError(f"there is no folder {name}: {error}" if folder.parent.is_dir() else error) from None
    elif name not in MADE_HERE:
        raise UsageError(
            f"model {name!r} is neither auto, {', '.join(MADE_HERE)}, a folder that exists nor a hub id like "
            "unsloth/gpt-oss-20b"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Layers

OWN_CODE_ALONE = {"trust_remote_code": False}
"""For every from_pretrained.  Unsaid, transformers asks a terminal whether to run the Python in a model's folder."""


@contextlib.contextmanager
def reading_model(failure: str) -> Iterator[None]:
    """Turn whatever libraries raise over a model's files, which may hold anything, into a UsageError of one line."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UsageError(f"{failure}: {reason}") from error


def config_of(name: str) -> Any:
    """A model's transformers config.  Raises UsageError for a model that transformers does not know."""
    from transformers import AutoConfig

    with reading_model(f"{name} is no model that transformers knows"):
        return AutoConfig.from_pretrained(smollm2.folder() if name == "smollm2" else name, **OWN_CODE_ALONE)


def parameter_shapes(config: Any) -> dict[str, torch.Size]:
    """The shapes of a causal language model's parameters, from its transformers config and without its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **OWN_CODE_ALONE)
    return {name: weights.shape for name, weights in model.named_parameters()}


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")  # the layers of attention that get adapters
TRIED = "Llama, Qwen2, Qwen3, Mistral, Gemma 2, gpt-oss"  # families that trained a step


def check_layers(name: str) -> str:
    """What to say of a model that lacks layers which get adapters; "" if it has all of them.

    Raises UsageError for a model that has none, before its weights are loaded.
    """
    try:
        config = config_of(name)
        layers = {part for parameter in parameter_shapes(config) for part in parameter.split(".")}
    except Exception:  # transformers does not know every architecture; loading will tell
        return ""
    missing = [layer for layer in ATTENTION if layer not in layers]
    lacks = f"{name} is a {config.model_type}, whose attention has no layers named {', '.join(missing)}"
    if missing == [*ATTENTION]:
        raise UsageError(f"{lacks}, which are trained here: take a model of another family ({TRIED})")
    return f"{lacks}: less of it is trained" if missing else ""
