"""gpt-oss and SmolLM2 for llama.cpp: a model or an adapter as a GGUF file, and llama.cpp's logits.

The `gguf` package has the file format and the names of tensors.  What differs from the released layout:
- Experts have gate and up apart, which the released model interleaves, and (out, in) instead of (in, out).
- A group of 32 weights in MXFP4 is 17 bytes: the scale, then code j and code j + 16 in byte j.
- An adapter has a pair `.lora_a` (r, in) and `.lora_b` (out, r) for each tensor, experts on one axis more.
- SmolLM2's queries and keys have their rows in another order (model/smollm2.py).
llama.cpp always rounds the bounds of YaRN to whole dimensions, which gpt-oss's config does not want (`truncate`).

Shapes: E experts of a layer, `in` and `out` the sides of a matrix, r the rank of an adapter.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit import UsageError
from toolkit.model import smollm2
from toolkit.model.loading import least_effort

if TYPE_CHECKING:
    import torch

CONTEXT = 1024  # tokens that verification and the Modelfile keep: a prompt with its answer
FINAL = "<|message|>"  # a prompt that ends with it has opened the final channel
ARCHITECTURES = {"gpt_oss": "GPT_OSS", "llama": "LLAMA"}  # gguf's names by transformers' model_type


def check_installed() -> None:
    """Raise UsageError without the packages that write GGUF and run it."""
    if not all(map(importlib.util.find_spec, ("gguf", "llama_cpp"))):
        raise UsageError("GGUF needs the packages gguf and llama-cpp-python: ./setup.sh --with gguf")


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


def ggml_blocks(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Blocks (E, out, in/32, 16) and scales (E, out, in/32) of the released layout, as (E, out, in/32 * 17) bytes."""
    import torch

    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # (E, out, in/32, 32)
    return torch.cat((scales[..., None], codes[..., :16] | codes[..., 16:] << 4), -1).flatten(-2)


def halves(name: str, tensor: torch.Tensor, axis: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Gate and up, which take turns along an axis of `gate_up`; any other tensor alone."""
    if "gate_up" not in name:
        yield name, tensor
        return
    for first, half in enumerate(("gate", "up")):
        every_second = [slice(None)] * axis + [slice(first, None, 2)]
        yield name.replace("gate_up", half), tensor[tuple(every_second)]


def architecture(config: Any) -> Any:
    """A model's architecture in gguf."""
    import gguf

    return gguf.MODEL_ARCH[ARCHITECTURES[config.model_type]]


def names_of(config: Any) -> Any:
    """The package's map from names of tensors to those in GGUF."""
    import gguf

    return gguf.get_tensor_name_map(architecture(config), config.num_hidden_layers)


def named(name: str, names: Any) -> str:
    """The name of a tensor in GGUF.  `names` is the package's map for the model."""
    stem = name.removesuffix("_bias") + (".bias" if name.endswith("_bias") else "")
    if stem.endswith(("_proj", "sinks")):
        stem += ".weight"
    found: str | None = names.get_name(stem, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise UsageError(f"GGUF has no name for the tensor {name}: use --format merged_16bit")
    return found


def typed(name: str, tensor: torch.Tensor, experts: str) -> tuple[Any, Any]:
    """A tensor as GGUF stores it: (array, type).  Vectors, biases and the router stay in float32."""
    import gguf
    import torch

    kinds = gguf.GGMLQuantizationType
    if tensor.dtype == torch.uint8:
        return tensor.contiguous().numpy(), kinds.MXFP4
    if tensor.ndim == 1 or name.endswith(".bias") or "ffn_gate_inp" in name:
        return tensor.float().numpy(), kinds.F32
    if tensor.ndim == 3 and experts == "q8_0":
        return gguf.quantize(tensor.float().contiguous().numpy(), kinds.Q8_0), kinds.Q8_0
    return tensor.bfloat16().contiguous().view(torch.uint8).numpy(), kinds.BF16


def in_ggml_order(module: str, rows: torch.Tensor, config: Any) -> torch.Tensor:
    """What a projection `module` adds to its output, (out, any), with the rows as llama.cpp has them."""
    heads = smollm2.heads_of(module, config) if config.model_type == "llama" else 0
    return smollm2.rows_for_llamacpp(rows, heads) if heads else rows


def ggml_tensors(weights: Mapping[str, torch.Tensor], config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model by their names in GGUF.  Experts may be in the released MXFP4 (`_blocks`, `_scales`)."""
    names = names_of(config)
    for name, tensor in weights.items():
        if name.endswith("_scales") or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        tensor = in_ggml_order(name.removesuffix(".weight"), tensor, config)
        if name.endswith("_blocks"):
            name = name.removesuffix("_blocks")
            tensor = ggml_blocks(tensor, weights[f"{name}_scales"])
        elif tensor.ndim == 3:
            tensor = tensor.transpose(1, 2)
        for half, part in halves(name, tensor, 1):
            yield named(half, names), part


# ---------------------------------------------------------------------------------------------------------------------
# Files


def describe(writer: Any, config: Any) -> None:
    """Write the numbers of a config."""
    import gguf

    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters
    if config.model_type == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_sliding_window(config.sliding_window)
    else:
        writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def add_tokenizer(writer: Any, tokenizer: Any, size: int) -> None:
    """Write a tokenizer's vocabulary, merges, special tokens and chat template.

    The way of splitting text has a name in llama.cpp: gpt-oss's is that of GPT-4o, SmolLM2's its own.  The embedded
    model's has none, so llama.cpp may split a text in another way than training did, and has to be given token ids.
    """
    import json

    import gguf

    kept = json.loads(tokenizer.backend_tokenizer.to_str())
    ids, added = {id: token for token, id in tokenizer.get_vocab().items()}, tokenizer.added_tokens_decoder
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    splitting, names = json.dumps(kept["pre_tokenizer"]), {"Split": "gpt-4o", "Digits": "smollm"}
    writer.add_tokenizer_pre(next((name for kind, name in names.items() if kind in splitting), "gpt-2"))
    writer.add_token_list([ids.get(id, f"[PAD{id}]") for id in range(size)])
    writer.add_token_types(
        [
            kinds.UNUSED
            if id not in ids
            else kinds.NORMAL
            if id not in added
            else kinds.CONTROL
            if added[id].special
            else kinds.USER_DEFINED
            for id in range(size)
        ]
    )
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in kept["model"]["merges"]]
    writer.add_token_merges(merges)
    for name in ("bos", "eos", "pad"):
        if (token := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(token)
    writer.add_add_bos_token(False)  # the template begins with it
    writer.add_chat_template(tokenizer.chat_template)


def write(file: Path, config: Any, fill: Callable[[Any], None]) -> None:
    """Write a GGUF file.  `fill` adds keys and tensors to the writer."""
    import gguf

    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture(config)])
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(file: Path, weights: Mapping[str, torch.Tensor], config: Any, tokenizer: Any, experts: str) -> None:
    """Write a whole model.  Experts that are not in MXFP4 already are written as `experts`: q8_0 or bf16."""
    import gguf

    def fill(writer: Any) -> None:
        writer.add_type("model")
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        describe(writer, config)
        add_tokenizer(writer, tokenizer, config.vocab_size)
        for key, tensor in ggml_tensors(weights, config):
            array, kind = typed(key, tensor, experts)
            writer.add_tensor(key, array, raw_dtype=kind)

    write(file, config, fill)


def adapter_tensors(weights: Mapping[str, torch.Tensor], rank: int, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The pairs of an adapter in the released layout (adapters.fuse_expert_adapters) by their names in GGUF."""
    names = names_of(config)
    for key, tensor in weights.items():
        module, side = re.fullmatch(r"base_model\.model\.(.*)\.lora_([AB])\.weight", key).groups()  # type: ignore[union-attr]
        if module.endswith(".experts.base_layer"):  # PEFT wraps a module once per adapted parameter, this one first
            module = module.removesuffix("base_layer") + "gate_up_proj"
        elif module.endswith(".experts"):
            module += ".down_proj"
        if ".experts." in module and side == "A":
            tensor = tensor.unflatten(0, (-1, rank))  # (E, r, in)
        elif ".experts." in module:
            tensor = tensor.unflatten(1, (rank, -1)).permute(2, 0, 1)  # (out, r * E) to (E, out, r)
        elif side == "B":
            tensor = in_ggml_order(module, tensor, config)
        parts = halves(module, tensor, 1) if side == "B" else ((half, tensor) for half, _ in halves(module, tensor, 1))
        for half, part in parts:
            yield f"{named(half, names)}.lora_{side.lower()}", part


def write_adapter(file: Path, weights: Mapping[str, torch.Tensor], config: Any, lora: Mapping[str, Any]) -> None:
    """Write an adapter in the released layout.  `lora` is its config."""
    import gguf

    def fill(writer: Any) -> None:
        writer.add_type("adapter")
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(lora["lora_alpha"]))
        for key, tensor in adapter_tensors(weights, lora["r"], config):
            writer.add_tensor(key, tensor.float().contiguous().numpy())

    write(file, config, fill)


# ---------------------------------------------------------------------------------------------------------------------
# Use


def served_by_llamacpp(model: Path, adapter: Path | None = None) -> Callable[[list[int], int], torch.Tensor]:
    """llama.cpp's logits, as in verify.Logits.  Raises UsageError if it refuses a file."""
    import llama_cpp
    import torch

    try:
        llama = llama_cpp.Llama(
            str(model),
            lora_path=str(adapter) if adapter else None,
            n_ctx=CONTEXT,
            n_batch=CONTEXT,
            logits_all=True,
            swa_full=False,
            verbose=False,
        )
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"llama.cpp does not load {adapter or model}: {error}") from None

    def logits(ids: list[int], start: int) -> torch.Tensor:
        llama.reset()
        llama.eval(ids)
        return torch.from_numpy(llama.scores[start - 1 : len(ids) - 1].copy())

    return logits


def modelfile(tokenizer: Any, temperature: float) -> str:
    """Ollama's recipe beside model.gguf.  Its template is the prompt that training used, with the user's message left
    open."""
    ends = [tokenizer.eos_token]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "{{ .Prompt }}"}],
        tokenize=False,
        add_generation_prompt=True,
        reasoning_effort=least_effort(tokenizer),
    )
    if prompt.endswith(FINAL):
        # Where both <|start|> and <|end|> stand in a template, Ollama parses answers of gpt-oss as harmony messages,
        # and would take all of this answer for a header: its header has been in the prompt.
        prompt = prompt.replace("<|end|>", '<|{{ "end" }}|>')
        ends.append("<|end|>")
    stops = "".join(f"PARAMETER stop {end}\n" for end in ends)
    return (
        f'FROM ./model.gguf\nTEMPLATE """{prompt}{{{{ .Response }}}}"""\nPARAMETER num_ctx {CONTEXT}\n'
        f"PARAMETER temperature {temperature}\n{stops}"
    )
