"""What this machine has, what is switched for it and why, and the checks that run before anything expensive.

Facts (`Machine`) and decisions (`Settings`) are plain data, so the choice for every GPU is tested without one.  Checks
run in the order of their cost: names and chat templates before libraries are imported, disk space before a download.
The `doctor` command (doctor.py) prints all of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from toolkit import OutOfMemory, UsageError, cache_folder
from toolkit.base.files import check_whole, read_json
from toolkit.base.ranks import RANKS, SHARDED, by_first_rank
from toolkit.model import smollm2
from toolkit.model.cpu_speed import speed_up
from toolkit.model.tiny import POSITIONS, GameSpec, every_tenth, layout_of, warm_start

if TYPE_CHECKING:
    import torch
    from rich.table import Table

# ---------------------------------------------------------------------------------------------------------------------
# Machine


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
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads of torch would take the cores that the players need
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


LIBRARIES = ("torch", "triton", "unsloth", "unsloth_zoo", "transformers", "trl", "peft", "bitsandbytes")


def library_versions(names: Sequence[str] = LIBRARIES) -> dict[str, str]:
    """Installed versions by name; "0.0" for a library that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = dict.fromkeys(names, "0.0")
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def find_machine() -> Machine:
    """This machine.  Of several GPUs it describes the first."""
    import torch

    processor = os.uname().machine
    if not torch.cuda.is_available():
        return Machine(memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), processor=processor)
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


def resolve_model(name: str) -> str:
    """What a model's name stands for: "auto" for this machine's default, a run's folder for its adapter.

    Links are followed, because `latest` soon names another run.
    """
    if name != "auto":
        folder = Path(name, "adapter") if Path(name, "adapter").is_dir() else Path(name)
        if not folder.is_dir():
            return name
        return str(folder if folder.resolve() == folder.absolute() else folder.resolve())
    return "unsloth/gpt-oss-20b" if gpu_is_there() else "tiny"


# ---------------------------------------------------------------------------------------------------------------------
# Settings


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


def adapter_base(name: str) -> Path | None:
    """The base model of an adapter's folder; None if the folder holds no adapter."""
    base = read_json(Path(name) / "adapter_config.json").get("base_model_name_or_path")
    return Path(base) if base else None


def base_of(name: str) -> str:
    """The model that an adapter was trained on, by the name that people give it; any other model's own name."""
    base = adapter_base(name)
    return "tiny" if layout_of(base) else "smollm2" if base == smollm2.folder() else str(base or name)


def is_embedded(name: str) -> bool:
    """Whether a model is the embedded one, or an adapter to it."""
    return base_of(name) == "tiny"


def default_loader(name: str) -> Literal["unsloth", "transformers"]:
    """Unsloth's kernels are for GPUs.  On a CPU, models that transformers loads are sped up (cpu_speed.py)."""
    return "unsloth" if gpu_is_there() or is_embedded(name) else "transformers"


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
        return bool(config.get("quantization_config", {}).get("quant_method") == "mxfp4")
    return Path(name).name.lower() in ("gpt-oss-20b", "gpt-oss-120b")


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


@dataclass(frozen=True)
class Settings:
    """How a model is loaded and trained on a machine, and why."""

    load: dict[str, Any]  # arguments of Unsloth's loader
    environment: dict[str, str]  # set before anything is compiled
    rows: tuple[tuple[str, str, str], ...]  # (what, how, why), for people


def settings_for_cpu(machine: Machine) -> Settings:
    """Everything in float32."""
    rows = (
        ("device", f"CPU, {machine.processor}", "no CUDA GPU was found"),
        ("memory", f"{machine.memory / 1e9:.0f} GB", ""),
        ("precision", "float32", "no 4-bit kernels without a GPU"),
    )
    return Settings({"load_in_4bit": False, "use_gradient_checkpointing": False}, {}, rows)


def device_row(machine: Machine) -> tuple[str, str, str]:
    """The GPU with its compute capability."""
    return "device", f"{machine.gpu} ({machine.capability[0]}.{machine.capability[1]}), {machine.processor}", ""


def settings_for_transformers(machine: Machine) -> Settings:
    """A GPU with `--loader transformers`."""
    rows = (
        device_row(machine),
        ("memory", f"{machine.memory / 1e9:.0f} GB", "each GPU holds a shard of the weights" if SHARDED else ""),
        ("precision", "bfloat16", "--loader transformers"),
        ("gradient checkpointing", "on the GPU", ""),
    )
    return Settings({}, {}, rows)


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


def choose_settings(machine: Machine, config: ModelConfig, choice: Choice) -> Settings:
    """The settings that fit a machine.  Raises UsageError for an option that the machine cannot do."""
    if not machine.gpu:
        return settings_for_cpu(machine)
    if choice.weights == "16bit" and machine.memory < ROOM_FOR_16_BITS:
        raise UsageError(
            f"--weights 16bit needs a GPU of 80 GB, and {machine.gpu} has {machine.memory / 1e9:.0f}: leave it out"
        )
    return settings_for_transformers(machine) if uses_transformers(config) else settings_for_unsloth(machine, choice)


def settings_table(settings: Settings) -> Table:
    """The settings with their reasons.  For a Console without markup, which prints brackets as they are."""
    from rich.table import Table

    table = Table("", "", "why", box=None, show_header=False)
    for row in settings.rows:
        table.add_row(*row)
    return table


# ---------------------------------------------------------------------------------------------------------------------
# Models


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


MADE_HERE = {"tiny": POSITIONS, "smollm2": smollm2.POSITIONS}  # models made on this machine, and their positions


def positions_of(name: str, unknown: int) -> int:
    """How many tokens a model made here or a folder's model takes, prompt and completion; `unknown` of any other."""
    base = base_of(name)
    return int(MADE_HERE.get(base) or read_json(Path(base, "config.json")).get("max_position_embeddings") or unknown)


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
            "--max-new-tokens or --max-seq-length"
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


OWN_CODE_ALONE = {"trust_remote_code": False}
"""For every from_pretrained.  Unsaid, transformers asks a terminal whether to run the Python in a model's folder."""


def config_of(name: str) -> Any:
    """A model's transformers config.  Raises UsageError for a model that transformers does not know."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(smollm2.folder() if name == "smollm2" else name, **OWN_CODE_ALONE)
    except ValueError as error:
        raise UsageError(f"{name} is no model that transformers knows: {str(error).partition(chr(10))[0]}") from None


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


# ---------------------------------------------------------------------------------------------------------------------
# Disk and memory


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
# Loading


def import_libraries(say: Callable[[Any], None], local: bool, plain: bool) -> None:
    """Import what loads a model: unsloth first, because it patches the others, or transformers alone where `plain`."""
    prepare_environment(offline=local)
    say(f"loading torch, {'transformers' if plain else 'unsloth'} and trl")
    gpu = gpu_is_there()
    logging.getLogger("bitsandbytes").setLevel(logging.WARNING if gpu else logging.ERROR)  # it looks for kernels
    gc.disable()  # it would search the modules again and again, a quarter of the time, and find nothing
    try:
        if not plain:
            with contextlib.nullcontext() if gpu else contextlib.redirect_stdout(io.StringIO()):
                import unsloth  # noqa: F401
        from transformers.utils.logging import disable_progress_bar
    finally:
        gc.enable()

    if local:
        disable_progress_bar()  # it is for downloads


def made_here(layout: str | None, say: Callable[[Any], None], spec: Callable[[str], GameSpec]) -> Path:
    """The folder of the embedded model for a keyboard layout, or of SmolLM2: made at first, then from the cache."""
    import torch

    if layout is None:
        return by_first_rank(partial(smollm2.converted, say))
    torch.set_num_threads(1)  # as in its warm start
    return by_first_rank(partial(warm_start, spec(layout), progress=every_tenth(say)))


def prepare(
    name: str, config: ModelConfig, say: Callable[[Any], None], spec: Callable[[str], GameSpec], trains: bool
) -> tuple[str, dict[str, Any]]:
    """Everything before a model is loaded: environment, settings, checks, the embedded model's warm start.

    Returns the name or folder to load, and the arguments of Unsloth's loader.  Training loads an adapter's base; the
    adapter is added later.  `spec` says what the warm start has to know of a keyboard layout.
    """
    base = adapter_base(name)
    layout = getattr(config, "keys", "bepo") if name == "tiny" else layout_of(base)
    ours = bool(layout) or base_of(name) == "smollm2"
    local = ours or (Path(name).is_dir() and (base is None or base.is_dir()))
    import_libraries(say, local, uses_transformers(config, name))
    if trains and name not in MADE_HERE and (lacks := check_layers(name)):
        say(lacks)
    machine = find_machine()
    bound_memory(machine)
    choice = choose_weights(machine, name, config)
    config = dataclasses.replace(config, weights=choice.weights)  # type: ignore[type-var]
    settings = choose_settings(machine, config, choice)
    os.environ.update(settings.environment)
    say(settings_table(settings))
    if ours:  # an adapter's base can have left the cache
        made = made_here(layout, say, spec)
        name = name if base else str(made)
    if warning := memory_warning(name, machine, config):
        say(warning)
    if not local:
        check_download(four_bit_name(name) if settings.load.get("load_in_4bit") else name)
    return str(base) if trains and base else name, settings.load


def check_weights(model: Any, name: str, load: Mapping[str, Any]) -> None:
    """Raise UsageError if a model's weights are not held as its settings say.  `load` are the loader's arguments."""
    import torch

    packed = {type(weights).__name__ for weights in model.parameters() if weights.dtype == torch.uint8}
    held = "4 bits (NF4)" if "Params4bit" in packed else "MXFP4" if packed else "16 bits or more"
    if load.get("load_in_4bit") and held != "4 bits (NF4)":
        raise UsageError(
            f"the weights are in {held}, not in 4 bits, because bitsandbytes does not work here: see the "
            "lines above, or take --weights stored"
        )
    if load.get("load_in_16bit") and packed:
        raise UsageError(f"the weights are in {held}, not in 16 bits: leave out --weights 16bit")
    if load.get("load_in_16bit") is False and not load["load_in_4bit"]:
        stored = getattr(config_of(str(adapter_base(name) or name)), "quantization_config", None)
        if stored and stored["quant_method"] == "mxfp4" and held != "MXFP4":
            raise UsageError(f"the weights are in {held}, not in MXFP4 as stored: name --weights 4bit")


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


def load_plain(name: str, dtype: torch.dtype | Literal["auto"]) -> tuple[Any, Any]:
    """A model and its tokenizer by transformers alone, MXFP4 unpacked.  It stays in RAM until the trainer moves it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config

    packed = getattr(config_of(str(adapter_base(name) or name)), "quantization_config", None)
    unpacked = Mxfp4Config(dequantize=True) if packed else None
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, quantization_config=unpacked, **OWN_CODE_ALONE)
    if dtype == torch.float32 and not SHARDED:  # on a CPU; never tried elsewhere
        speed_up(model)
    model._is_fsdp_managed_module = SHARDED  # accelerate does not set it, and ranks would not wait for one another
    # Generation would copy the weights of every row's experts: 6.4 GB a layer and token for 32 rows of gpt-oss-20b.
    model._optimize_model_for_decode = contextlib.nullcontext
    return model, AutoTokenizer.from_pretrained(name, **OWN_CODE_ALONE)
