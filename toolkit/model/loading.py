"""What happens around the loading of a model: libraries, settings and checks before it, its weights after it.

`prepare` is everything before.  The script calls Unsloth's loader or, for transformers alone, `load_plain`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from toolkit import UsageError
from toolkit.base.ranks import SHARDED, by_first_rank
from toolkit.model import machine, smollm2
from toolkit.model.memory import check_download, four_bit_name, memory_warning
from toolkit.model.models import (
    MADE_HERE,
    OWN_CODE_ALONE,
    adapter_base,
    base_of,
    check_layers,
    config_of,
    reading_model,
    uses_transformers,
)
from toolkit.model.settings import ModelConfig, choose_settings, choose_weights, settings_table
from toolkit.model.tiny import GameSpec, every_tenth, layout_of, warm_start

if TYPE_CHECKING:
    import torch


def import_libraries(say: Callable[[Any], None], local: bool, plain: bool) -> None:
    """Import what loads a model: unsloth first, because it patches the others, or transformers alone where `plain`."""
    machine.prepare_environment(offline=local)
    say(f"loading torch, {'transformers' if plain else 'unsloth'} and trl")
    gpu = machine.gpu_is_there()
    logging.getLogger("bitsandbytes").setLevel(logging.WARNING if gpu else logging.ERROR)  # it looks for kernels
    gc.disable()  # it would search the modules again and again, a quarter of the time, and find nothing
    try:
        if not plain:
            with contextlib.nullcontext() if gpu else contextlib.redirect_stdout(io.StringIO()):
                import unsloth  # noqa: F401
        from transformers.utils.logging import disable_progress_bar
    finally:
        if not gc.get_freeze_count():  # once: what a model has left behind since must stay collectable
            gc.freeze()  # or it would search them later: accelerate's collection before a training took 0.7 s
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

    Returns the name or folder to load, and the loader's arguments.  Training loads an adapter's base; the
    adapter is added later.  `spec` says what the warm start has to know of a keyboard layout.
    """
    base = adapter_base(name)
    layout = getattr(config, "keys", "bepo") if name == "tiny" else layout_of(base)
    ours = bool(layout) or base_of(name) == "smollm2"
    local = ours or (Path(name).is_dir() and (base is None or base.is_dir()))
    plain = uses_transformers(config, name)
    import_libraries(say, local, plain)
    if trains and name not in MADE_HERE and (lacks := check_layers(name)):
        say(lacks)
    here = machine.find_machine()
    machine.bound_memory(here)
    choice = choose_weights(here, name, config)
    config = dataclasses.replace(config, weights=choice.weights)  # type: ignore[type-var]
    settings = choose_settings(here, name, choice, plain)
    os.environ.update(settings.environment)
    say(settings_table(settings))
    if ours:  # an adapter's base can have left the cache
        made = made_here(layout, say, spec)
        name = name if base else str(made)
    if warning := memory_warning(name, here, config):
        say(warning)
    if not local:
        check_download(four_bit_name(name) if settings.load.get("load_in_4bit") else name)
    return str(base) if trains and base else name, settings.load


def load_tokenizer(name: str | Path) -> Any:
    """A tokenizer by transformers.  One without a pad token, such as Llama's, pads with its end token, as in TRL.

    Raises UsageError.
    """
    from transformers import AutoTokenizer

    with reading_model(f"the tokenizer of {name} cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(name, **OWN_CODE_ALONE)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def text_tokenizer(loaded: Any) -> Any:
    """The tokenizer in what Unsloth returns, which for a model that sees is a processor, with the template of both."""
    tokenizer = getattr(loaded, "tokenizer", loaded)
    tokenizer.chat_template = tokenizer.chat_template or loaded.chat_template
    return tokenizer


def least_effort(tokenizer: Any) -> str:
    """What a chat template calls the least reasoning: gpt-oss's knows low and no less; Mistral's refuses low."""
    return "low" if "<|channel|>" in (tokenizer.chat_template or "") else "none"


def sample_as_trained(model: Any, tokenizer: Any) -> None:
    """Let answers end where TRL ends them, at the tokenizer's end token, too, and be sampled by the model alone.

    Whatever else its generation_config.json asks for, such as penalties or top-k, would be no part of what is trained.
    Neither would dropout, which TRL leaves on while it samples.
    """
    from torch import nn
    from transformers import GenerationConfig

    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]:
            setattr(module, name, 0.0)

    given = model.generation_config
    ends = given.eos_token_id if isinstance(given.eos_token_id, list) else [given.eos_token_id]
    ends = [end for end in ends if end is not None]
    if tokenizer.eos_token_id not in (*ends, None):
        ends = [tokenizer.eos_token_id, *ends]
    model.generation_config = GenerationConfig(
        bos_token_id=given.bos_token_id,
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
        pad_token_id=given.pad_token_id,
    )


def load_plain(name: str, dtype: torch.dtype | Literal["auto"]) -> tuple[Any, Any]:
    """A model and its tokenizer by transformers alone, MXFP4 unpacked.  It stays in RAM until the trainer moves it."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    packed = getattr(config_of(str(adapter_base(name) or name)), "quantization_config", None)
    if packed and packed["quant_method"] != "mxfp4":
        raise UsageError(f"{name} is quantized ({packed['quant_method']}): name the model that it was made from")
    unpacked = Mxfp4Config(dequantize=True) if packed else None
    model, found = AutoModelForCausalLM.from_pretrained(
        name, dtype=dtype, quantization_config=unpacked, output_loading_info=True, **OWN_CODE_ALONE
    )
    if missing := sorted(found["missing_keys"]):  # transformers would take random ones
        raise UsageError(f"{name} lacks weights ({len(missing)}, such as {missing[0]}): restore them")
    model._is_fsdp_managed_module = SHARDED  # accelerate does not set it, and ranks would not wait for one another
    # Generation would copy the weights of every row's experts: 6.4 GB a layer and token for 32 rows of gpt-oss-20b.
    model._optimize_model_for_decode = contextlib.nullcontext
    tokenizer = load_tokenizer(name)
    sample_as_trained(model, tokenizer)
    return model, tokenizer


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
