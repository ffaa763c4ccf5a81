"""Models of other families: each trains a step, or gets one line that says what to take, before its weights are loaded.

The models are random, in folders, with the embedded model's tokenizer.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gpt_2048_rl as program
from tests import preloaded
from tests.helpers import HELD_OUT, NO_TENSORS
from toolkit import UsageError
from toolkit.model import loading, machine, models
from toolkit.run.reading import read_curves
from toolkit.run.sampler import ROUNDED

STEP = ("--steps", 1, "--generations", 4, "--batch-size", 4, "--accumulation", 1, "--boards", 1, "--games", 2,
        "--ladder", "4:128", "--max-new-tokens", 16, "--best-of", 4, "--race-games", 1, *HELD_OUT)  # fmt: skip
SMALL: dict[str, Any] = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": SMALL, "Qwen2": SMALL, "Qwen3": SMALL | {"head_dim": 16}, "Mistral": SMALL,
    "Gemma2": SMALL | {"head_dim": 16}}  # fmt: skip


def save_random(family: str, base: Path, folder: Path, without: str = "", **shape: Any) -> Path:
    """A random model of a family, with a tokenizer that may lack its pad token or its chat template."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": None if without == "pad_token" else tokenizer.pad_token_id}  # fmt: skip
    if without:
        setattr(tokenizer, without, None)
    config = getattr(transformers, f"{family}Config")(**shape, **ends)
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("family", "without"), [
    *(pytest.param(family, "", marks=getattr(pytest.mark, "slow" if family == "Gemma2" else "long"))
      for family in FAMILIES),
    pytest.param("Llama", "pad_token", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_family_trains_a_step(family: str, without: str, base: Path, tmp_path: Path) -> None:
    """A tokenizer without a pad token, too."""
    folder = save_random(family, base, tmp_path / "model", without, **FAMILIES[family])
    done = preloaded.run("--model", folder, "--output-dir", tmp_path, "--run-name", "run", "--json", *STEP)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 1


def train_in_bfloat16(model: str, folder: str) -> None:
    """A step as on a processor with instructions for bfloat16."""
    machine.multiplies_bfloat16 = lambda: True
    assert program.main(["--model", model, "--output-dir", folder, "--run-name", "run", *map(str, STEP)]) == 0


@pytest.mark.slow
@pytest.mark.skipif(preloaded.GPU, reason="a GPU is taken instead")
def test_a_step_in_bfloat16_trains_what_it_samples(base: Path, tmp_path: Path) -> None:
    """Emulated where the processor has no instructions for it.  The adapter stays in float32."""
    from safetensors.torch import load_file

    model = save_random("Llama", base, tmp_path / "model", **SMALL)
    preloaded.call(train_in_bfloat16, model, tmp_path)
    curves = read_curves(tmp_path / "run")
    assert 0 < curves["sampler/gap"][1] < curves["sampler/limit"][1] == pytest.approx(ROUNDED)
    adapter = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert {str(weights.dtype) for weights in adapter.values()} == {"torch.float32"}


def gpt2(base: Path, folder: Path) -> Path:
    """A GPT-2, whose attention is one layer, c_attn."""
    return save_random("GPT2", base, folder, n_embd=64, n_layer=2, n_head=4, vocab_size=1024, n_positions=1024)


def test_a_model_without_the_layers_that_are_trained_is_named_with_what_to_take(base: Path, tmp_path: Path) -> None:
    """GPT-2 ended in a traceback of PEFT, after its weights had been loaded."""
    with pytest.raises(UsageError, match=r"is a gpt2, .* no layers named q_proj, .*: take a model of another family"):
        models.check_layers(str(gpt2(base, tmp_path / "gpt2")))
    assert models.check_layers(str(base)) == ""


def test_a_model_of_which_less_is_trained_is_named(base: Path, tmp_path: Path) -> None:
    """Phi-3 has one layer for queries, keys and values, which got no adapter, without a word."""
    folder = save_random("Phi3", base, tmp_path / "phi3", **SMALL)
    said = models.check_layers(str(folder))
    assert said.endswith("is a phi3, whose attention has no layers named q_proj, k_proj, v_proj: less of it is trained")


@pytest.mark.slow
def test_such_a_model_is_refused_before_its_weights_are_loaded(base: Path, tmp_path: Path) -> None:
    folder = gpt2(base, tmp_path / "gpt2")
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    done = preloaded.run("--model", folder, "--output-dir", tmp_path, *STEP)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {folder} is a gpt2")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "generation_config.json"])
def test_a_file_that_is_cut_short_is_named(name: str, base: Path, tmp_path: Path) -> None:
    """As a copy that broke off leaves it.  The doctor said ok, and the others said it with the libraries loaded."""
    folder = Path(shutil.copytree(base, tmp_path / "model"))
    models.check_model(str(folder), "none")
    os.truncate(folder / name, 200)
    with pytest.raises(UsageError, match=f"{name} is missing or damaged: restore it"):
        models.check_model(str(folder), "none")


def test_a_part_of_the_weights_that_is_missing_is_named(base: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "model"))
    index = {"weight_map": {"embed": "model.safetensors", "head": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match=r"model-2.safetensors is missing or damaged"):
        models.check_model(str(folder), "none")


def test_files_that_are_none_and_names_that_lead_elsewhere_are_refused(base: Path, tmp_path: Path) -> None:
    """A pipe was waited at for ever, and /dev/zero read until no memory was left."""
    folder = Path(shutil.copytree(base, tmp_path / "model"))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"embed": "/dev/zero"}}))
    with pytest.raises(UsageError, match=r"model.safetensors.index.json is damaged"):
        models.check_model(str(folder), "none")
    index.unlink()
    os.mkfifo(folder / "more.json")
    with pytest.raises(UsageError, match=r"more.json is missing or damaged"):
        models.check_model(str(folder), "none")


def test_answers_are_sampled_by_the_model_alone(base: Path, tmp_path: Path) -> None:
    """Penalties, as Qwen's files have them, changed its evaluation and not its training; the tokenizer's end token
    ended its training's answers and not its evaluation's; and without a pad token there was no evaluation.
    """
    folder = save_random("Llama", base, tmp_path / "model", "pad_token", **SMALL)
    asked = {"do_sample": True, "repetition_penalty": 1.3, "top_k": 5, "num_return_sequences": 3, "eos_token_id": [5]}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    config = program.EvalConfig(model=str(folder), max_new_tokens=4)
    model, tokenizer = program.load_model(str(folder), config, lambda _: None)
    found = model.generation_config.to_diff_dict()
    assert found.pop("eos_token_id") == [tokenizer.eos_token_id, 5]
    assert found.keys() <= {"bos_token_id", "transformers_version"}
    assert len(program.sample_batch(model, tokenizer, ["short", "a longer one"], config)) == 2


def test_a_model_without_attention_in_every_layer_answers(base: Path, tmp_path: Path) -> None:
    """Layers of other kinds, as in LFM2 and Qwen3.5, cannot share a prompt: it was a traceback."""
    shape = SMALL | {"layer_types": ["conv", "full_attention"]}
    folder = save_random("Lfm2", base, tmp_path / "model", **shape)
    config = program.EvalConfig(model=str(folder), max_new_tokens=4)
    model, tokenizer = program.load_model(str(folder), config, lambda _: None)
    assert len(program.sample_batch(model, tokenizer, ["the same", "the same"], config)) == 2


def test_no_dropout_stands_between_sampling_and_training(base: Path, tmp_path: Path) -> None:
    """With dropout, as HunYuan's config has it, a run ended in its first step: for another model than the trained."""
    import torch

    folder = save_random("Qwen2", base, tmp_path / "model", **SMALL, attention_dropout=0.5)
    model, _ = program.load_model(str(folder), program.EvalConfig(model=str(folder)), lambda _: None)
    ids = torch.arange(1, 9)[None]
    assert torch.equal(model.train()(ids).logits, model(ids).logits)


def test_a_template_gets_the_effort_and_the_thoughts_that_it_knows(base: Path) -> None:
    """Mistral's refuses an effort of low; a served export has to be asked as in training."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    assert program.template_arguments(tokenizer, "none")["reasoning_effort"] == "low"
    tokenizer.chat_template = thinking = "{% if enable_thinking is defined and not enable_thinking %}at once{% endif %}"
    assert program.template_arguments(tokenizer, "none")["reasoning_effort"] == "none"
    for effort, said in (("none", "at once"), ("high", ""), ("none", "at once"), ("none", "at once")):
        program.open_channel(tokenizer, effort)
        assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == said
    program.open_channel(tokenizer, "low")
    assert tokenizer.chat_template == thinking


def test_towers_that_see_get_no_adapter(base: Path, tmp_path: Path) -> None:
    """Their layers have the names of attention's: useless adapters, and with Gemma 4 a traceback of PEFT."""
    from torch import nn

    folder = str(save_random("Llama", base, tmp_path / "model", **SMALL))
    config = program.TrainConfig(model=folder, loader="transformers")
    model, tokenizer = program.load_model(folder, config, lambda _: None)
    model.vision_tower = nn.ModuleDict({"q_proj": nn.Linear(8, 8)})
    names = [name for name, _ in program.add_adapters(model, config).named_parameters() if "lora" in name]
    assert names
    assert not [name for name in names if "vision" in name]
    sees = SimpleNamespace(tokenizer=tokenizer, chat_template="of both")
    assert loading.text_tokenizer(tokenizer) is tokenizer
    tokenizer.chat_template = None
    assert loading.text_tokenizer(sees) is tokenizer
    assert tokenizer.chat_template == "of both"


def test_weights_that_are_not_there_are_named(base: Path, tmp_path: Path) -> None:
    """Random ones took their place."""
    from safetensors.torch import load_file, save_file

    folder = save_random("Llama", base, tmp_path / "model", **SMALL)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"lacks weights \(1, such as model.layers.1.self_attn.q_proj.weight\)"):
        loading.load_plain(str(folder), "auto")


def test_a_quantized_model_is_named_with_what_to_take(base: Path, tmp_path: Path) -> None:
    folder = save_random("Llama", base, tmp_path / "model", **SMALL)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UsageError, match=r"is quantized \(fp8\): name the model that it was made from"):
        loading.load_plain(str(folder), "auto")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", {"hidden_act": "evil"}, "evil"),
        ("config.json", {"num_attention_heads": 0}, "zero"),
        ("config.json", {"rope_parameters": {"rope_type": "evil"}}, "evil"),
        ("chat_template.jinja", "{% for", "unexpected"),
        ("chat_template.jinja", "{{ 1 / 0 }}", "zero"),
        ("tokenizer.json", "[]", "tokenizer"),
    ],
)
def test_a_folder_that_says_nonsense_gets_one_line(
    name: str, content: str | dict[str, Any], said: str, base: Path, tmp_path: Path
) -> None:
    """They were tracebacks."""
    folder = save_random("Llama", base, tmp_path / "model", **SMALL)
    if isinstance(content, dict):
        content = json.dumps(json.loads((folder / name).read_text()) | content)
    (folder / name).write_text(content)
    with pytest.raises(UsageError, match=said) as error:
        program.load_model(str(folder), program.EvalConfig(model=str(folder)), lambda _: None)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_tokenizer_is_named(base: Path, tmp_path: Path) -> None:
    folder = save_random("Llama", base, tmp_path / "model", **SMALL)
    for file in folder.glob("*token*"):
        file.unlink()
    with pytest.raises(UsageError, match="holds a model without its tokenizer"):
        models.check_model(str(folder), "none")


def test_a_folder_without_weights_is_named(base: Path, tmp_path: Path) -> None:
    """The doctor said that it was available, and training ended over it with the libraries loaded."""
    folder = save_random("Llama", base, tmp_path / "model", **SMALL)
    models.check_model(str(folder), "none")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="holds a model without its weights"):
        models.check_model(str(folder), "none")


def test_a_run_without_its_adapter_is_named(tmp_path: Path) -> None:
    """One that was killed.  It was told that it needs a config.json, which it has."""
    for file in ("config.json", "origin.json"):
        (tmp_path / file).write_text("{}")
    with pytest.raises(UsageError, match="is a run without its adapter: name one of its checkpoints, or resume it"):
        models.check_model(str(tmp_path), "none")
