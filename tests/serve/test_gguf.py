"""GGUF: the files hold exactly the model's weights, and llama.cpp computes with them what transformers does."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import gpt_2048_rl as program
from toolkit import UsageError
from toolkit.model import adapters, smollm2
from toolkit.serve import export, llamacpp, verify

if TYPE_CHECKING:
    import torch

IDS = [2, *range(100, 180)]


def random_model(seed: int, **changes: Any) -> Any:
    """A small gpt-oss whose every weight matters, also biases and sinks: YaRN, and a window shorter than IDS."""
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}  # fmt: skip
    shape = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32,
             "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
             "max_position_embeddings": 128, "sliding_window": 16, "rope_parameters": rope}  # fmt: skip
    model = GptOssForCausalLM(GptOssConfig(**shape | changes)).float().eval()
    generator = torch.Generator().manual_seed(seed)
    for name, weights in model.named_parameters():
        weights.data.normal_(std=0.1, generator=generator)
        if "norm" in name:
            weights.data += 1
    return model.bfloat16().float()  # so that storing attention in bfloat16 loses nothing


def random_llama(seed: int) -> Any:
    """A small model like SmolLM2: tied embeddings, fewer keys than queries."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "default", "rope_theta": 100000.0}
    shape = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
             "tie_word_embeddings": True, "rope_parameters": rope}  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, weights in model.named_parameters():
        weights.data.normal_(std=0.2, generator=generator)
        if "norm" in name:
            weights.data += 1
    return model.bfloat16().float()


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> Any:
    """The embedded model's, which has 1024 tokens."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(base)


@pytest.fixture(scope="module")
def model() -> Any:
    pytest.importorskip("gguf")
    return random_model(1)


def packed(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A model's weights with the experts in MXFP4: as a file has them, and as they are computed with."""
    import torch

    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, weights in model.state_dict().items():
        if not export.EXPERT_WEIGHTS.search(name):
            stored[name] = meant[name] = weights
            continue
        parts = [adapters.quantize_mxfp4(expert) for expert in weights]
        for part, tensors in zip(("blocks", "scales"), zip(*parts, strict=True), strict=True):
            stored[f"{name}_{part}"] = torch.stack(tensors)
        meant[name] = torch.stack([adapters.dequantize_mxfp4(*part) for part in parts])
    return stored, meant


def read_back(file: Path) -> dict[str, Any]:
    """A file's tensors in float32, by name."""
    import gguf

    return {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(file).tensors}


def expected_tensors(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a file has to hold, by the names in llama.cpp's gpt-oss."""
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}  # fmt: skip
    inner = {"input_layernorm.weight": "attn_norm.weight", "self_attn.sinks": "attn_sinks.weight",
             "post_attention_layernorm.weight": "post_attention_norm.weight"}  # fmt: skip
    for ours, theirs in (("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"),
                         ("self_attn.o_proj", "attn_output"), ("mlp.router", "ffn_gate_inp")):  # fmt: skip
        inner |= {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}
    found = {}
    for name, tensor in weights.items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if not layer:
            found[names[name]] = tensor
        elif layer[2] in inner:
            found[f"blk.{layer[1]}.{inner[layer[2]]}"] = tensor
        else:  # experts: (E, in, out), gate and up in turn on the last axis, or biases (E, out)
            kind = "bias" if name.endswith("_bias") else "weight"
            whole = tensor if kind == "bias" else tensor.transpose(1, 2)
            parts = {"gate": whole[:, ::2], "up": whole[:, 1::2]} if "gate_up" in name else {"down": whole}
            found |= {f"blk.{layer[1]}.ffn_{part}_exps.{kind}": half for part, half in parts.items()}
    return found


@pytest.mark.optional
@pytest.mark.parametrize("experts", ["mxfp4", "q8_0", "bf16"])
def test_a_file_holds_exactly_the_models_weights(model: Any, tokenizer: Any, experts: str, tmp_path: Path) -> None:
    """Nothing is missing or new.  Q8_0 rounds to 255 values, and their step to float16."""
    import torch

    stored, meant = packed(model) if experts == "mxfp4" else (model.state_dict(), model.state_dict())
    llamacpp.write_model(tmp_path / "model.gguf", stored, model.config, tokenizer, experts)
    found, expected = read_back(tmp_path / "model.gguf"), expected_tensors(meant)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        read = torch.from_numpy(found[name].copy()).reshape(tensor.shape)
        if experts == "q8_0" and "_exps.weight" in name:
            step = tensor.unflatten(-1, (-1, 32)).abs().amax(-1) / 127
            assert ((read - tensor).unflatten(-1, (-1, 32)).abs() <= 0.6 * step[..., None]).all()
        else:
            assert torch.equal(read, tensor)


@pytest.mark.optional
def test_smollm2_is_written_as_it_is_read(tokenizer: Any, tmp_path: Path) -> None:
    """Rows of queries and keys go to llama.cpp's order and back, and the tied embeddings stand there once."""
    gguf, model = pytest.importorskip("gguf"), random_llama(1)
    llamacpp.write_model(tmp_path / "model.gguf", model.state_dict(), model.config, tokenizer, "bf16")
    tensors = gguf.GGUFReader(tmp_path / "model.gguf").tensors
    found, expected = smollm2.read_weights(tensors, model), dict(model.named_parameters())
    assert len(tensors) == len(expected) == len(found)
    for name, weights in expected.items():
        assert found[name].float().equal(weights)
    assert not model.model.layers[0].self_attn.q_proj.weight.equal(
        smollm2.rows_for_llamacpp(model.model.layers[0].self_attn.q_proj.weight, 4)
    )


def agreement(model: Any, exported: verify.Logits) -> tuple[float, float]:
    """The share of equal most likely tokens, and the median difference relative to the spread of the logits.

    At a few tokens rounding sends the router to another expert, and there the difference is large.
    """
    expected, found = verify.logits_of(model)(IDS, 1), exported(IDS, 1)
    return (float((found.argmax(-1) == expected.argmax(-1)).float().mean()),
            float((found - expected).abs().median() / expected.std()))  # fmt: skip


@pytest.mark.optional
@pytest.mark.parametrize("experts", ["mxfp4", "q8_0", "bf16"])
def test_llamacpp_computes_what_transformers_does(model: Any, tokenizer: Any, experts: str, tmp_path: Path) -> None:
    """Up to its rounding of activations, to 8 bits for experts in MXFP4 or Q8_0.  Biases, sinks, YaRN, the window, gate
    and up: each of them wrong would be far away, as the next test shows for one."""
    pytest.importorskip("llama_cpp")
    stored, meant = packed(model) if experts == "mxfp4" else (model.state_dict(), model.state_dict())
    llamacpp.write_model(tmp_path / "model.gguf", stored, model.config, tokenizer, experts)
    other = random_model(1)
    other.load_state_dict(meant)
    equal, distance = agreement(other, llamacpp.served_by_llamacpp(tmp_path / "model.gguf"))
    assert equal >= 0.9
    assert distance < 0.1


@pytest.mark.optional
def test_llamacpp_computes_smollm2_as_transformers_does(tokenizer: Any, tmp_path: Path) -> None:
    """With rows of queries and keys in transformers' order it does not."""
    pytest.importorskip("llama_cpp")
    model, file = random_llama(1), tmp_path / "model.gguf"
    llamacpp.write_model(file, model.state_dict(), model.config, tokenizer, "bf16")
    equal, distance = agreement(model, llamacpp.served_by_llamacpp(file))
    assert equal >= 0.9
    assert distance < 0.1
    turned = {
        name: smollm2.rows_in_order(tensor, 4 if "q_proj" in name else 2) if "q_proj" in name or "k_proj" in name
        else tensor for name, tensor in model.state_dict().items()
    }  # fmt: skip
    llamacpp.write_model(file, turned, model.config, tokenizer, "bf16")
    assert agreement(model, llamacpp.served_by_llamacpp(file))[0] < 0.5


@pytest.mark.optional
def test_gate_and_up_swapped_are_noticed(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    swapped = {name: tensor.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if "gate_up" in name else tensor
               for name, tensor in model.state_dict().items()}  # fmt: skip
    llamacpp.write_model(tmp_path / "model.gguf", swapped, model.config, tokenizer, "bf16")
    assert agreement(model, llamacpp.served_by_llamacpp(tmp_path / "model.gguf"))[0] < 0.5


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FEED_FORWARD = ["gate_proj", "up_proj", "down_proj"]


@pytest.mark.optional
@pytest.mark.parametrize(("made", "modules", "parameters"), [(random_model, [], EXPERTS),
                                                             (random_llama, FEED_FORWARD, None)])  # fmt: skip
def test_an_adapter_on_a_file_computes_what_peft_does(
    made: Callable[[int], Any], modules: list[str], parameters: list[str] | None, tokenizer: Any, tmp_path: Path
) -> None:
    """Attention and what follows it: for experts, llama.cpp has a pair for gate and one for up, PEFT one for both."""
    pytest.importorskip("llama_cpp")
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    model = made(1)
    llamacpp.write_model(tmp_path / "base.gguf", model.state_dict(), model.config, tokenizer, "bf16")
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", *modules],
                      target_parameters=parameters)  # fmt: skip
    adapted = get_peft_model(made(1), lora)
    generator = torch.Generator().manual_seed(2)
    for name, weights in adapted.named_parameters():
        if "lora_" in name:
            weights.data.normal_(std=0.1, generator=generator)
    adapted.eval().save_pretrained(tmp_path / "adapter")
    llamacpp.write_adapter(tmp_path / "adapter.gguf", load_file(tmp_path / "adapter" / "adapter_model.safetensors"),
                           model.config, {"r": 4, "lora_alpha": 8})  # fmt: skip
    exported = llamacpp.served_by_llamacpp(tmp_path / "base.gguf", tmp_path / "adapter.gguf")
    equal, distance = agreement(adapted, exported)
    assert equal >= 0.9
    assert distance < 0.1
    assert agreement(model, exported)[0] < 0.8  # the adapter does something


@pytest.mark.optional
def test_a_file_that_llamacpp_refuses_gets_one_line(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match="does not load"):
        llamacpp.served_by_llamacpp(tmp_path / "model.gguf")


def test_the_modelfile_asks_as_training_did(tokenizer: Any) -> None:
    """Its template is a Go template, in which a constant stands for itself."""
    program.open_channel(tokenizer, "none")
    template = llamacpp.modelfile(tokenizer, 1.0).split('"""')[1]
    prompt = template.replace('{{ "end" }}', "end").replace("{{ .Prompt }}", "Play!").replace("{{ .Response }}", "")
    assert prompt == tokenizer.apply_chat_template(
        [{"role": "user", "content": "Play!"}], tokenize=False, add_generation_prompt=True
    )
    assert "<|end|>" not in template  # it would make Ollama parse the answer as if it had a header


@pytest.mark.parametrize(("opened", "ends"), [("none", ["<|return|>", "<|end|>"]), ("low", ["<|return|>"])])
def test_the_modelfile_samples_and_ends_as_training_did(tokenizer: Any, opened: str, ends: list[str]) -> None:
    program.open_channel(tokenizer, opened)
    said = [line.split()[1:] for line in llamacpp.modelfile(tokenizer, 0.8).splitlines() if line.startswith("PARAM")]
    assert [value for name, value in said if name == "stop"] == ends
    assert ["temperature", "0.8"] in said


@pytest.mark.parametrize("format", ["gguf", "gguf_lora"])
def test_without_the_packages_the_command_that_installs_them_is_named(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert program.main(["export", str(tmp_path), "--format", format]) == 2
    assert capsys.readouterr().err.endswith("./setup.sh --with gguf\n")
