"""What is found, what is switched and why; models from a hub and of other families; what cannot be had, in one line."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gpt_2048_rl as program
from tests.fake_hub import FakeHub
from tests.helpers import run

GB10 = program.Machine("NVIDIA GB10", (12, 1), 128_000_000_000, unified=True, processor="aarch64", triton=(3, 7))
H100 = program.Machine("NVIDIA H100 80GB HBM3", (9, 0), 85_000_000_000, triton=(3, 7))
RTX_4090 = program.Machine("NVIDIA GeForce RTX 4090", (8, 9), 25_000_000_000, triton=(3, 7))
DEFAULTS = program.TrainConfig(max_seq_length=768)


@pytest.mark.parametrize("machine", [GB10, H100, RTX_4090])
def test_four_bits_are_the_default_on_every_gpu(machine: program.Machine) -> None:
    load = program.choose_settings(machine, DEFAULTS).load
    assert load["load_in_4bit"]
    assert not load["load_in_16bit"]


def test_what_four_bits_are_not_for(tmp_path: Path) -> None:
    """The embedded model, and adapters to experts that are fused; also such as know of no fused experts at all."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "unsloth/gpt-oss-20b"}))
    assert not program.stays_as_stored(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"target_parameters": ["mlp.experts.down_proj"]}))
    assert program.stays_as_stored(str(tmp_path))
    assert program.stays_as_stored("tiny")
    assert not program.stays_as_stored("unsloth/gpt-oss-20b")


def test_embeddings_are_moved_to_ram_only_where_that_frees_anything() -> None:
    assert program.choose_settings(GB10, DEFAULTS).load["offload_embedding"] is False
    assert program.choose_settings(H100, DEFAULTS).load["offload_embedding"] == "auto"


def test_activations_are_computed_again_wherever_the_embeddings_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first parameter's device decided, and on a GPU with little memory Unsloth leaves the embeddings in RAM."""
    import torch

    told: dict[str, Any] = {}
    loader = SimpleNamespace(get_peft_model=lambda _, **options: told.update(options))
    monkeypatch.setitem(sys.modules, "unsloth", SimpleNamespace(FastLanguageModel=loader))
    monkeypatch.setattr(program, "find_machine", lambda: RTX_4090)
    program.add_adapters(torch.nn.Embedding(4, 2), DEFAULTS)
    assert told["use_gradient_checkpointing"] is True


def test_sixteen_bits_need_eighty_gigabytes() -> None:
    config = program.TrainConfig(load_in_16bit=True)
    for machine in (GB10, H100):
        load = program.choose_settings(machine, config).load
        assert load["load_in_16bit"]
        assert not load["load_in_4bit"]
    with pytest.raises(program.UsageError, match="--load-in-16bit needs a GPU of 80 GB, and NVIDIA GeForce RTX 4090"):
        program.choose_settings(RTX_4090, config)


def test_the_compiler_is_named_only_where_triton_needs_it() -> None:
    """From 3.6 on triton has its own for these GPUs and would ignore the variable."""
    old = dataclasses.replace(GB10, triton=(3, 5))
    assert program.choose_settings(GB10, DEFAULTS).environment == {}
    assert program.choose_settings(H100, DEFAULTS).environment == {}
    assert program.choose_settings(old, DEFAULTS).environment == {
        "TRITON_PTXAS_PATH": "/usr/local/cuda/bin/ptxas", "TORCH_CUDA_ARCH_LIST": "12.1a"}  # fmt: skip


def test_every_setting_is_told_with_its_reason() -> None:
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(program.settings_table(program.choose_settings(GB10, DEFAULTS)))
    text = console.export_text()
    for word in ("GB10 (12.1), aarch64", "128 GB", "4-bit", "checkpointing", "embeddings", "attention", "ptxas"):
        assert word in text


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.json of gpt-oss-20b, without the weights."""
    from transformers import GptOssConfig

    folder = tmp_path_factory.mktemp("gpt-oss")
    GptOssConfig(num_hidden_layers=24, num_local_experts=32).save_pretrained(folder)
    return folder


def test_the_memory_of_gpt_oss_20b(gpt_oss: Path) -> None:
    """20.9 billion parameters; 768 tokens of 32 completions at 49,152 bytes each."""
    four = program.memory_needed(str(gpt_oss), DEFAULTS)
    sixteen = program.memory_needed(str(gpt_oss), program.TrainConfig(load_in_16bit=True, max_seq_length=768))
    assert four["weights"] == pytest.approx(12.5e9, rel=0.03)
    assert sixteen["weights"] == pytest.approx(2 * 20.91e9, rel=0.001)
    assert four["keys and values"] == 32 * 768 * 49_152
    assert four["adapters"] == pytest.approx(46.2e6 * 10, rel=0.01)


def test_the_adapters_are_counted_as_peft_makes_them(base: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = program.train_defaults("tiny", "stable", "none")
    adapter = LoraConfig(r=config.lora_rank, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
                         target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])  # fmt: skip
    trainable, _ = get_peft_model(AutoModelForCausalLM.from_pretrained(base), adapter).get_nb_trainable_parameters()
    assert program.memory_needed(str(base), config)["adapters"] == 10 * trainable


def test_too_little_memory_is_said_with_what_takes_it(gpt_oss: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    needed = program.memory_needed(str(gpt_oss), DEFAULTS)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (16_000_000_000, 16_000_000_000))
    with pytest.raises(program.UsageError, match=r"about 17 GB .*weights 12\..* and 16 are free: .*--batch-size"):
        program.check_memory("gpt-oss", H100, needed)
    monkeypatch.setattr(program, "available_memory", lambda: 40_000_000_000)
    program.check_memory("gpt-oss", GB10, needed)


def test_the_doctor_finds_this_machine_fit() -> None:
    done = run("doctor", "--model", "tiny", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["fit"]
    assert told["versions"]["trl"] == "1.14.2"
    assert told["checks"].keys() == {"settings", "jail", "model", "memory"}
    assert "unsloth" in done.stderr


def test_the_doctor_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["doctor", "--model", str(tmp_path)]) == 2
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines() if " NO " in line] == [["model", "NO"]]


# ---------------------------------------------------------------------------------------------------------------------
# Other models

SHORT = ("--steps", "1", "--generations", "2", "--batch-size", "2", "--accumulation", "1", "--boards", "1",
         "--size", "4", "--games", "2", "--max-new-tokens", "16", "--eval-batch-size", "2", "--json")  # fmt: skip


@pytest.fixture(scope="module")
def qwen(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another family, with random weights, the embedded model's tokenizer and a template that thinks."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "Qwen-nano"
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\\n{% endfor %}assistant:"
        "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    size: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32,
                            "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 1024}  # fmt: skip
    Qwen3ForCausalLM(Qwen3Config(**size, eos_token_id=tokenizer.eos_token_id)).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_model_of_another_family_comes_from_the_hub(qwen: Path, tmp_path: Path) -> None:
    """And trains.  It is downloaded once; later the hub is not needed any more."""
    with FakeHub() as hub:
        hub.publish("someone/Qwen-nano", qwen)
        environment = hub.environment(tmp_path)
        done = run("--model", "someone/Qwen-nano", "--output-dir", tmp_path, "--run-name", "one", *SHORT,
                   env=environment)  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 1
    assert (tmp_path / "one" / "adapter" / "adapter_model.safetensors").is_file()
    done = run("eval", "someone/Qwen-nano", *SHORT[-9:], env=environment)
    assert done.returncode == 0, done.stderr


def test_a_base_model_is_refused_with_the_name_to_try(qwen: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(qwen, tmp_path / "Qwen-nano-Base")
    (folder / "chat_template.jinja").unlink()
    done = run("--model", folder)
    assert done.returncode == 2
    assert f"has no chat template, so it is no model for chats: try {tmp_path}/Qwen-nano\n" in done.stderr
    with FakeHub() as hub:
        hub.publish("someone/Nano-2-1B", folder)
        done = run("--model", "someone/Nano-2-1B", env=hub.environment(tmp_path))
    assert done.returncode == 2
    assert "try someone/Nano-2-1B-Instruct" in done.stderr


@pytest.mark.parametrize(
    ("base", "instruct"),
    [("Qwen/Qwen3-4B-Base", "Qwen/Qwen3-4B"), ("google/gemma-3-1b-pt", "google/gemma-3-1b-it"),
     ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct")],
)  # fmt: skip
def test_instruct_variants_go_by_the_family_s_habit(base: str, instruct: str) -> None:
    assert program.instruct_variant(base) == instruct


def test_a_download_that_does_not_fit_is_refused_first(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    files = [SimpleNamespace(file_size=13_800_000_000, will_download=True),
             SimpleNamespace(file_size=10**12, will_download=False)]  # fmt: skip
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: files)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000_000))
    with pytest.raises(program.UsageError, match=r"needs 13\.8 GB, and 5\.0 are free: set HF_HOME"):
        program.check_download("unsloth/gpt-oss-20b")
