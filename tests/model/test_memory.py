"""What a model takes of the disk and of memory, as estimated and as measured; what is left out when memory runs out."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

import gpt_2048_rl as program
from tests import preloaded
from tests.fake_hub import FakeHub
from tests.model.conftest import CPU, DEFAULTS, GB10, H100, RTX_4090, save_model
from toolkit import UsageError
from toolkit.model.memory import check_download, fewer_completions, memory_needed, memory_warning

# ---------------------------------------------------------------------------------------------------------------------
# Disk


def test_a_download_that_does_not_fit_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    files = [SimpleNamespace(file_size=13_800_000_000, will_download=True),
             SimpleNamespace(file_size=10**12, will_download=False)]  # fmt: skip
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: files)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000_000))
    with pytest.raises(UsageError, match=r"needs 13\.8 GB, and 5\.0 are free: set HF_HOME"):
        check_download("unsloth/gpt-oss-20b")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    check_download("unsloth/gpt-oss-20b")


def test_only_missing_files_take_room(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder = save_model(tmp_path / "Nano", {"chat_template": "hi"})
    hub.publish("someone/Nano", folder)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
        with pytest.raises(UsageError, match="are free"):
            check_download("someone/Nano")
        check_download(str(folder))
    huggingface_hub.snapshot_download("someone/Nano")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    check_download("someone/Nano")


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def test_the_memory_of_gpt_oss_20b(gpt_oss: Path) -> None:
    """20.9 billion parameters; 568 + 768 tokens of 32 completions at 49,152 bytes each."""
    four = memory_needed(str(gpt_oss), DEFAULTS)
    sixteen = memory_needed(str(gpt_oss), program.TrainConfig(weights="16bit"))
    assert four["weights"] == pytest.approx(12.5e9, rel=0.03)
    assert sixteen["weights"] == pytest.approx(2 * 20.91e9, rel=0.001)
    assert four["keys and values"] == 32 * 1336 * 49_152
    assert four["adapters"] == pytest.approx(46.2e6 * 16, rel=0.01)
    assert four["update"] == 2 * 8 * 768 * 201_088 * 2


@pytest.mark.parametrize(("weights", "packing", "took"),
                         [("stored", {"quantization_config": {"quant_method": "mxfp4"}}, 18.3e9),
                          ("4bit", {}, 18.2e9), ("16bit", {}, 46.2e9)])  # fmt: skip
def test_the_memory_of_training_is_what_an_h200_took(
    weights: Any, packing: dict[str, Any], took: float, tmp_path: Path
) -> None:
    """With the default options and a prompt of 30 tokens.  568 are provided for, and in 4 bits 24 GB have them."""
    from transformers import GptOssConfig

    config = GptOssConfig(num_hidden_layers=24, num_local_experts=32).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | packing))
    needed = memory_needed(str(tmp_path), dataclasses.replace(DEFAULTS, weights=weights))
    assert took < sum(needed.values()) - needed["CUDA"] < 1.15 * took
    assert weights == "16bit" or sum(needed.values()) < RTX_4090.memory


def test_activations_are_recomputed_on_a_gpu_even_with_embeddings_in_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first parameter's device decided.  On a GPU with little memory that is the CPU.  And TRL switches it on again
    after each generation, without saying how: in PyTorch's own way an H200 took four times the memory."""
    import torch

    told: dict[str, Any] = {}
    base = SimpleNamespace(gradient_checkpointing_enable=lambda **options: told.update(options))
    adapted = SimpleNamespace(get_base_model=lambda: base)
    loader = SimpleNamespace(get_peft_model=lambda _, **options: told.update(options) or adapted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "unsloth", SimpleNamespace(FastLanguageModel=loader))
    program.add_adapters(torch.nn.Embedding(4, 2), DEFAULTS)
    assert told["use_gradient_checkpointing"] is True
    base.gradient_checkpointing_enable()
    assert told["gradient_checkpointing_kwargs"] == {"use_reentrant": True}


@pytest.mark.parametrize(("numbers", "fewer"), [((16, 8, 4), (16, 8, 2)), ((64, 64, 1), (32, 32, 1)),
                                                ((2, 1, 6), (3, 1, 3))])  # fmt: skip
def test_half_of_a_steps_completions_make_whole_groups(
    numbers: tuple[int, int, int], fewer: tuple[int, int, int]
) -> None:
    words = "another --run-name with --generations {} --batch-size {} --accumulation {}"
    assert fewer_completions(*numbers) == words.format(*fewer)
    assert fewer_completions(2, 2, 1) == "fewer --max-new-tokens"


def test_an_evaluation_needs_no_adapter_and_other_keys(gpt_oss: Path) -> None:
    config = program.EvalConfig(model="", eval_batch_size=8)
    needed = memory_needed(str(gpt_oss), config)
    assert needed["adapters"] == 0
    assert needed["keys and values"] == 8 * 1336 * 49_152


def check_the_adapters(base: str, adapt: Literal["all", "attention"]) -> None:
    config = dataclasses.replace(program.train_defaults("tiny"), adapt=adapt)
    model = program.add_adapters(program.load_model(base, config, lambda _: None)[0], config)
    adapters = {name: weights for name, weights in model.named_parameters() if weights.requires_grad}
    assert all(".lora_" in name for name in adapters)
    assert any("experts" in name for name in adapters) == (adapt == "all")
    assert {name.split(".")[6] for name in adapters if "self_attn" in name} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert memory_needed(base, config)["adapters"] == 16 * sum(weights.numel() for weights in adapters.values())


@pytest.mark.parametrize("adapt", ["all", "attention"])
def test_adapters_are_where_they_should_be_and_counted(adapt: str, base: Path) -> None:
    preloaded.call(check_the_adapters, base, adapt)


@pytest.mark.usefixtures("little_memory")
def test_too_little_memory_is_a_warning_that_names_what_takes_it(gpt_oss: Path) -> None:
    warning = memory_warning(str(gpt_oss), H100, DEFAULTS)
    for words in ("about 22 GB (weights 12.", "keys and values 2.1", "and 16 are free", "lower --batch-size"):
        assert words in warning
    assert "\n" not in warning


@pytest.mark.usefixtures("little_memory")
def test_no_warning_if_it_fits_or_nothing_is_known(gpt_oss: Path, tmp_path: Path) -> None:
    assert memory_warning(str(gpt_oss), GB10, DEFAULTS) == ""  # shares its memory with the processor
    assert memory_warning(str(gpt_oss), CPU, DEFAULTS) == ""
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    assert memory_warning(str(tmp_path), H100, DEFAULTS) == ""
